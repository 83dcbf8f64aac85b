"""Run each probe with its library in an environment of its own, and write the answers and the page.

``python -m benchmarks.elsewhere`` runs all probes (10 to 30 minutes, 2 GB of a temporary folder), with names only
those; ``--page`` writes the page alone. ``--python`` names the interpreter of the environments: 3.11 for all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.elsewhere import page

PROBES = Path(__file__).with_name("probes")
TORCH, TRANSFORMERS = "torch==2.13.0", "transformers==5.23.0"
PACKAGES: dict[str, list[str]] = {
    "ours": [],
    "torch_functions": [TORCH, "numpy==2.4.6"],
    "transformers_models": [TORCH, TRANSFORMERS],
    "ctranslate2_scores": [TORCH, TRANSFORMERS, "ctranslate2==4.8.5", "setuptools==79.0.1"],
    "x_transformers_layers": [TORCH, "numpy==2.4.6", "x-transformers==2.31.10"],
    "xformers_ops": [TORCH, "numpy==2.4.6", "xformers==0.0.35"],
    "jax_functions": ["jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "optax==0.2.8"],
    "keras_layers": ["tensorflow-cpu==2.21.0", "keras==3.15.1"],
    "onnx_attention": ["onnx==1.23.2", "onnxruntime==1.32.0"],
    "openvino_attention": ["openvino==2026.4.1"],
    "joeynmt_loss": [TORCH, "joeynmt==2.3.0"],
}
"""The packages of each probe; none: the probe runs where this package is installed."""


def run(name: str, python: str) -> list[dict[str, Any]]:
    """Return the rows of a probe, run in a temporary environment."""
    if not PACKAGES[name]:
        return asked(name, sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = str(Path(folder, "bin/python"))
        install = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES[name]]
        subprocess.run(install, check=True, stderr=subprocess.DEVNULL)
        return asked(name, inside)


def asked(name: str, python: str) -> list[dict[str, Any]]:
    """Return the rows of a probe, run by an interpreter that has its packages."""
    done = subprocess.run([python, "-W", "ignore", PROBES / f"{name}.py"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return [row for line in done.stdout.splitlines() if line.startswith("[{") for row in json.loads(line)]


def main() -> None:
    """Run the probes that are named, keep the other answers, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PROBE", help=f"of {', '.join(PACKAGES)}; all without")
    parser.add_argument("--page", action="store_true", help="write the page from the answers that are there")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    arguments = parser.parse_args()
    answers = json.loads(page.ANSWERS.read_text()) if page.ANSWERS.exists() else {}
    for name in [] if arguments.page else arguments.names or PACKAGES:
        print(name, flush=True)
        answers[name] = run(name, arguments.python)
        ordered = {name: answers[name] for name in PACKAGES if name in answers}
        page.ANSWERS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    page.PAGE.write_text(page.text())


if __name__ == "__main__":
    main()
