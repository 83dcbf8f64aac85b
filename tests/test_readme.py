"""What README shows must run."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import cli

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


def test_the_line_for_hugging_face():
    transformers = pytest.importorskip("transformers")
    example = re.findall(r"```python\n(tfast\.integrations.*?)```", TEXT, re.DOTALL)[0]

    class AutoModelForSeq2SeqLM:
        """Instead of a model from the network a small one of the same kind."""

        @staticmethod
        def from_pretrained(name, **options):
            assert name == "Helsinki-NLP/opus-mt-en-de"
            sizes = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
            heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
            ids = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            config = transformers.MarianConfig(**sizes, **heads, **ids, **options)
            return transformers.MarianMTModel(config)

    names = {"tfast": tfast, "AutoModelForSeq2SeqLM": AutoModelForSeq2SeqLM}
    exec(example, names)
    assert names["model"].config._attn_implementation == "transformer_fast"
    assert names["model"](torch.ones(1, 3).long(), decoder_input_ids=torch.ones(1, 2).long()).logits.isfinite().all()


def test_no_example_is_left_out():
    """Each test above runs one block; the pages under docs/ are run whole by test_docs.py."""
    assert TEXT.count("```python") == 5 and TEXT.count("```") == 10


REQUIRED = "--source train.en --target train.de --save runs/en-de"  # what "train ..." stands for


def commands():
    """Every command line that README and docs/ show, without what a shell does."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^    .*-m transformer_fast (.*)$", text, re.MULTILINE):
            args = re.sub(r"[<>] \S+|  +#.*", "", line).replace("...", REQUIRED)
            yield pytest.param(args, id=f"{page.stem} {line[:30]}")


@pytest.mark.parametrize("line", list(commands()))
def test_command_lines_are_understood(line):
    cli._parser(training="train" in line).parse_args(shlex.split(line))


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)([^)#]+)\)", TEXT))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)`?", TEXT + (ROOT / "CONTRIBUTING.md").read_text()))
    assert named - {"a"} <= targets
