"""What README shows must run, each block by itself: people copy one of them."""

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_fast as tfast
from transformer_fast import cli

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@functools.cache
def shown_by(block: str) -> str:
    """What a block prints in a fresh interpreter, in an empty folder, without network; raises where it fails."""
    package = Path(tfast.__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", block]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}\nin a fresh interpreter, of\n{block}"
    return run.stdout


def every_block():
    """All blocks of README, and the first of each page of docs/; test_docs.py runs each page as a whole."""
    for page, found in [(README, blocks(README)), *((page, blocks(page)[:1]) for page in PAGES)]:
        for number, block in enumerate(found, start=1):
            yield pytest.param(block, id=f"{page.stem} {number}")


@pytest.mark.cover(1)
@pytest.mark.parametrize("block", list(every_block()))
def test_every_block_runs_alone(block, tmp_path, monkeypatch):
    if "transformers" in re.findall(r"^import (\w+)", block, re.MULTILINE):
        pytest.importorskip("transformers")
    if "torch.onnx" in block:
        pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    shown_by(block)


def test_every_block_is_a_python_block_that_was_found():
    assert 2 * len(blocks(README)) == TEXT.count("```") and len(blocks(README)) >= 5


def block_with(text: str) -> str:
    """README's one block that has this text."""
    (block,) = (block for block in blocks(README) if text in block)
    return block


def test_the_ten_lines():
    block = block_with("tfast.explain")
    assert len([line for line in block.splitlines() if line]) <= 10
    shown = shown_by(block)
    assert "torch.Size([32, 30, 8000])" in shown and "lengths (32,)" in shown


def test_one_op_at_a_time():
    shown = shown_by(block_with("attention_packed"))
    shapes = [tuple(map(int, shape.split(", "))) for shape in re.findall(r"Size\(\[(.*?)\]\)", shown)]
    assert shapes == [(2, 4, 1, 64), (2, 4, 5, 5), (2, 4, 5), (2, 5, 512)]
    assert float(shown.split()[-1]) > 0


def test_packed_and_its_loss():
    assert 0 < float(shown_by(block_with("packed=True"))) < 100


@pytest.mark.slow("trains the models of the page")
def test_the_twelve_lines_of_accelerate():
    block = block_with("tfast.accelerate")
    assert len([line for line in block.splitlines() if line]) <= 12
    shown = shown_by(block)
    differences = [float(text) for text in re.findall(r"largest difference: (\S+)", shown)]
    assert len(differences) == 2 and max(differences) <= 1e-4
    assert "layers.TransformerEncoder" in shown and "fused Encoder" in shown


def test_the_lines_for_hugging_face():
    pytest.importorskip("transformers")
    assert "torch.Size([1, 2, 100])" in shown_by(block_with("import transformers"))


def headline():
    """benchmarks/headline.py"""
    spec = importlib.util.spec_from_file_location("headline", ROOT / "benchmarks" / "headline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_headline_is_what_the_records_say():
    """The picture is the one that is drawn from them, and the sentence above it has the same numbers."""
    module = headline()
    assert module.PICTURE.read_text() == module.draw(), "python benchmarks/headline.py draws it again"
    attention, step = ([module.said(bar.times) for bar in rows if bar.ours] for rows in module.groups().values())
    sentence = re.search(r"\*\*Masked attention.*?\*\*", TEXT, re.DOTALL)[0]
    assert re.findall(r"\d+(?:\.\d)?", sentence) == [*attention, *step]


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
