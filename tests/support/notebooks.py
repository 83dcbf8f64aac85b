"""Run of the notebooks of examples/: ``python tests/support/notebooks.py --write`` writes their outputs into them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat

import transformer_fast as tfast

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LONGEST = 600
"""Time limits in seconds for the start of the kernel and for one cell, on a slow shared core."""
MEASURED = "measured"
"""Tag of a cell that prints times of the machine; its output is not committed."""


def run(path: Path, folder: Path) -> Any:
    """Run a notebook in a new kernel of this Python, without network; return it.

    Args:
        folder: empty; the notebook runs in it.
    """
    import nbclient

    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    variables = {
        "PYTHONPATH": str(Path(tfast.__file__).parent.parent), "JUPYTER_PATH": str(folder), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / "ipython"),
        "TRANSFORMER_FAST_CPU": "avx2",  # with AVX-512, accelerate may swap linear layers, and reports it
    }  # fmt: skip
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": LONGEST, "startup_timeout": LONGEST, "resources": {"metadata": {"path": str(folder)}}}
    with mock.patch.dict(os.environ, variables):
        nbclient.NotebookClient(notebook, kernel_name="python3", **options).execute()
    return notebook


def printed(cell: Any) -> str:
    """Return the output of a cell; "" for a cell that measures."""
    if MEASURED in cell.metadata.get("tags", []):
        return ""
    return "".join(o.text for o in cell.get("outputs", []) if o.output_type == "stream" and o.name == "stdout")


def without_numbers(text: str) -> str:
    """Return a text without numbers and the white space beside them, which differ between machines."""
    text = re.sub(r"\d+(?:[.,]\d+)*(?:e[+-]\d+)?", "#", text)
    return re.sub(r"\s+", " ", re.sub(r"#(?:, #)+", "#", re.sub(r"-{3,}", "---", text))).strip()


def write(path: Path) -> None:
    """Run a notebook and write its outputs into it; its pictures stay."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        fresh = run(path, Path(folder))
    notebook = nbformat.read(path, as_version=4)
    for cell, ran in zip(notebook.cells, fresh.cells, strict=True):
        if cell.cell_type == "code":
            pictures = [o for o in cell.outputs if "image/png" in o.get("data", {})]
            text = printed(ran)
            cell.outputs = [*([nbformat.v4.new_output("stream", text=text)] if text else []), *pictures]
    nbformat.write(notebook, path)


if __name__ == "__main__" and "--write" in sys.argv:
    for notebook in NOTEBOOKS:
        print(notebook.name, flush=True)
        write(notebook)
