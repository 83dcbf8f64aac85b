"""The notebooks of examples/ run, from the first cell to the last; of their outputs, pictures alone are committed."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import transformer_fast as tfast

nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
LONGEST = 600
"""Seconds for the kernel to start, and for one cell, on a slow core that others use too: more is a hang."""
PICTURE = 80_000
"""Characters of base64 that a committed picture may take."""


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"annotated_transformer", "bert_classification", "sliding_window"}


@pytest.mark.slow("a notebook trains for half a minute")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fresh kernel of this Python, in an empty folder, without network."""
    nbclient, _ = pytest.importorskip("nbclient"), pytest.importorskip("ipykernel")
    if path.stem == "bert_classification":
        pytest.importorskip("transformers")
    kernels = tmp_path / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    package = str(Path(tfast.__file__).parent.parent)
    variables = {"PYTHONPATH": package, "JUPYTER_PATH": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name, value in {**variables, "IPYTHONDIR": str(tmp_path / "ipython")}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    patience = {"timeout": LONGEST, "startup_timeout": LONGEST}
    nbclient.NotebookClient(notebook, **patience, kernel_name="python3", resources=resources).execute()
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert pictures and all(o.output_type == "display_data" for o in pictures)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_code_text_and_pictures(path: Path) -> None:
    """No times of one machine, no paths, no counts of runs: only small pictures stay."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = []
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or cell.execution_count is None
        outputs += cell.get("outputs", [])
    for output in outputs:
        assert set(output.data) == {"image/png"} and len(output.data["image/png"]) < PICTURE
    assert os.path.getsize(path) < 4 * PICTURE


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert links and all((path.parent / link).exists() for link in links), links
