"""What docs/ shows must run, and its pictures are those that the code draws."""

import re
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
import torch

from transformer_fast import AttentionMask, mask_plots

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_every_family_has_a_page():
    assert {page.stem for page in PAGES} >= {
        "layers",
        "bert",
        "tensorflow",
        "d2l",
        "masks",
        "accelerate",
        "huggingface",
        "export",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page):
    """All examples of a page, one after the other."""
    for package in {"huggingface": ["transformers"], "export": ["onnx", "onnxruntime"]}.get(page.stem, []):
        pytest.importorskip(package)
    text = page.read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert examples and 2 * len(examples) == text.count("```"), "every block is an example and is run"
    names: dict = {}
    for number, example in enumerate(examples, start=1):
        exec(compile(example, f"{page.name}, example {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / path).exists(), path


def test_the_pictures_of_the_masks(tmp_path, monkeypatch):
    figures = []
    save = matplotlib.figure.Figure.savefig

    def record(figure, path, **options):
        figures.append(figure)
        save(figure, path, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", record)
    paths = mask_plots.mask_pictures(tmp_path)
    assert {p.name for p in paths} == {p.name for p in (DOCS / "images").glob("mask_*.png")}
    assert all(f"images/{p.name}" in (DOCS / "masks.md").read_text() for p in paths)

    seen = {
        name: [axes.images[0].get_array() for axes in figure.get_axes()]
        for name, figure in zip((p.stem for p in paths), figures, strict=True)
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
