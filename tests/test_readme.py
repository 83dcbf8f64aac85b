"""What README shows must run."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_the_ten_lines(capsys):
    example = re.findall(r"## Ten lines\n\n```python\n(.*?)```", TEXT, re.DOTALL)[0]
    assert len([line for line in example.splitlines() if line]) <= 10
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "torch.Size([32, 30, 8000])" in shown and "lengths (32,)" in shown


def test_one_op_at_a_time():
    example = re.findall(r"One op at a time:\n\n```python\n(.*?)```", TEXT, re.DOTALL)[0]
    x = torch.randn(2, 5, 512)
    names = {
        "q": torch.randn(2, 4, 5, 8),
        "k": torch.randn(2, 4, 5, 8),
        "v": torch.randn(2, 4, 5, 8),
        "lengths": torch.tensor([5, 2]),
        "x": x,
        "y": torch.randn_like(x),
        "weight": torch.ones(512),
        "bias": torch.zeros(512),
        "ids": torch.randint(0, 9, (2, 5)),
        "learned": torch.zeros(4, 5, 5, requires_grad=True),
        "tokens": torch.randn(7, 4, 8),
        "cu_seqlens": torch.tensor([0, 5, 7], dtype=torch.int32),
        "newest": torch.randn(2, 4, 1, 8),
        "k_cache": torch.randn(2, 4, 6, 8),
        "v_cache": torch.randn(2, 4, 6, 8),
        "vocabulary_weight": torch.randn(9, 512),
        "target": torch.randint(0, 9, (2, 5)),
    }
    example = example.replace("tfast.embed(ids, weight", "tfast.embed(ids, embedding")
    names["embedding"] = torch.randn(9, 512)
    exec("import transformer_fast as tfast\n" + example, names)
    assert names["weights"].shape == (2, 4, 5, 5) and names["lse"].shape == (2, 4, 5)
    assert names["out"].shape == (2, 4, 1, 8) and names["x"].shape == (2, 5, 512) and names["loss"].isfinite()


def test_packed_and_its_loss():
    ten_lines = re.findall(r"## Ten lines\n\n```python\n(.*?)```", TEXT, re.DOTALL)[0].split("logits =")[0]
    packed = re.findall(r"```python\n(model\.packed = True.*?)```", TEXT, re.DOTALL)[0]
    names = {}
    exec(ten_lines + packed, names)
    assert names["loss"].isfinite() and names["loss"].requires_grad


def test_the_twelve_lines_of_accelerate(capsys):
    example = re.findall(r"```python\n(import copy.*?)```", TEXT, re.DOTALL)[0]
    assert len([line for line in example.splitlines() if line]) <= 12
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    differences = [float(text) for text in re.findall(r"largest difference: (\S+)", shown)]
    assert len(differences) == 2 and max(differences) <= 1e-4
    assert "layers.TransformerEncoder" in shown and "fused Encoder" in shown


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)([^)#]+)\)", TEXT))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)`?", TEXT + (ROOT / "CONTRIBUTING.md").read_text()))
    assert named - {"a"} <= targets
