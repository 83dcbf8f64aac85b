"""The page of ``benchmarks/sentence_embeddings.py``, in Markdown."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import records
from cpuinfo import get_cpu_info

import transformer_fast

if TYPE_CHECKING:
    from sentence_embeddings import Result
    from sentence_quality import Quality

PATHS = {"--runtimes": "PYTHON", "--folder": "FOLDER", "--out": "FOLDER"}
"""Options whose values are paths of a machine, and what the record says instead."""
MODELS = {
    "MiniLM": "all-MiniLM-L6-v2 (6 layers of width 384)",
    "base": "A BERT of base size (12 layers of width 768), random weights",
    "tiny": "A tiny BERT",
}
MEASURED = {
    "encode": "Texts a second through `encode`, its sorting and tokenizing included.",
    "alone": "Texts a second of the model alone, with features that are ready.",
    "train": "Seconds of a training step: 64 pairs, dropout 0.1, AdamW.",
    "peak": "MiB of two training steps above the process with its model.",
}
KINDS = {
    "fp32": ("torch", "torch, older", "ours packed", "ours kept", "ONNX", "ONNX O3", "OpenVINO f32"),
    "bf16": ("torch bf16", "ours bf16", "OpenVINO"),
    "int8": ("ours int8", "ONNX int8", "OpenVINO int8", "OpenVINO int8 f32"),
}
"""Ways that are compared with one another; the best of each kind is bold."""


def lines_of(result: Result) -> str:
    """Return a case in a line for each way: median, texts a second, times as fast as torch."""
    head = f"{result.measured}: {result.case} ({len(next(iter(result.times.values())))} rounds)"
    rows = [head]
    for way in result.times:
        median = result.median(way)
        rows.append(
            f"  {way:18}{1e3 * median:10.3f} ms{1 / median:10.1f} a second{result.median('torch') / median:8.2f}"
        )
    return "\n".join(rows)


def table(rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("---" for _ in range(lines[0].count(" | ") + 1)) + " |")
    return "\n".join(lines)


def best(result: Result) -> set[str]:
    """Fastest way of each kind."""
    kinds = [[way for way in ways if way in result.times] for ways in KINDS.values()]
    return {min(ways, key=result.median) for ways in kinds if len(ways) > 1}


def speeds(results: list[Result]) -> str:
    """Return the table of cases of a model: texts a second, and in brackets times as fast as torch."""
    ways = [way for ways in KINDS.values() for way in ways if any(way in result.times for result in results)]
    rows = [["", *ways]]
    for result in results:
        bold, cells = best(result), []
        for way in ways:
            if way not in result.times:
                cells.append("")
                continue
            ratio = f"{result.median('torch') / result.median(way):.2f}"
            cells.append(f"{1 / result.median(way):.4g} ({f'**{ratio}**' if way in bold else ratio})")
        rows.append([f"{result.case}, {result.setting}", *cells])
    return table(rows)


def steps(results: list[Result]) -> str:
    """Return the table of training: torch, ours, and their quotient."""
    rows = [["", "torch", "ours packed", "quotient"]]
    for result in results:
        theirs, ours = result.median("torch"), result.median("ours packed")
        form = "{:.0f} MiB" if result.measured == "peak" else "{:.3f} s"
        cells = [form.format(theirs), form.format(ours), f"{theirs / ours:.2f}"]
        rows.append([f"{result.case}, {result.setting}", *cells])
    return table(rows)


def qualities(found: dict[str, Quality]) -> str:
    """Return the table of quality."""
    rows = [
        [
            "",
            "largest difference",
            "least cosine",
            "Spearman of all pairs",
            "right neighbour first",
            "short beside long",
        ]
    ]
    for way, q in found.items():
        rows.append(
            [way, f"{q.difference:.1e}", f"{q.cosine:.5f}", f"{q.spearman:.5f}", f"{q.first:.1%}", f"{q.mixed:.5f}"]
        )
    return table(rows)


def page(
    results: list[Result], quality: dict[str, dict[str, Quality]], versions: dict[str, dict[str, str]], notes: list[str]
) -> str:
    """Return the record of a run."""
    here = records.here()
    cpu = get_cpu_info().get("brand_raw", "CPU")
    command = "python benchmarks/sentence_embeddings.py " + shlex.join(
        PATHS.get(sys.argv[i], word) for i, word in enumerate(sys.argv[1:])
    )
    parts = [
        f"{cpu}, kernels for {here['kernels']}, PyTorch's for {here['torch_cpu_capability']}; transformer_fast "
        f"{transformer_fast.__version__}, commit {here['commit']}; {datetime.now(UTC).date()}. `{command.strip()}`",
        *(f"{kind}: {', '.join(map(' '.join, found.items()))}." for kind, found in versions.items()),
        "In brackets: times as fast as torch in fp32. Bold: the fastest of its kind. Medians of rounds in turn. ONNX "
        "O3 approximates GELU, and O4 is for a GPU. OpenVINO without a hint takes bf16 where the processor has it. "
        "With AVX2, onnxruntime is missing: it has no switch. The way 'torch, older' is the torch backend in the "
        "environment of ONNX and OpenVINO, whose `encode` is another.",
        *notes,
    ]
    for model in dict.fromkeys(result.model for result in results):
        for measured in ("encode", "alone"):
            found = [r for r in results if (r.model, r.measured) == (model, measured)]
            if found:
                parts += [f"## {MODELS[model]}: {measured}", MEASURED[measured], speeds(found)]
    for measured in ("train", "peak"):
        found = [r for r in results if r.measured == measured]
        if found:
            parts += [f"## Training: {measured}", MEASURED[measured], steps(found)]
    for setting, ways in quality.items():
        head = f"## Quality beside torch in fp32: {setting}"
        parts += [
            head,
            "The last column is the least cosine in a batch of 8 captions and 8 passages.",
            qualities(ways),
        ]
    return "\n\n".join(parts) + "\n"
