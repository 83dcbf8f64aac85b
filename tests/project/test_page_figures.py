"""Figures of README's table are those of the records, with the shown digits."""

from __future__ import annotations

import re

import pytest
import records
import results_pictures as results
from pages import README, ROOT

SENTENCES = "attention: sentences-b64h8kmax-p0.1-float32-train"
CAUSAL = "attention: full causal-b2h8k1024-p0.0-float32-infer"
MODELS, PACKED = ("cpu-avx2-model", "cpu-model"), "ours packed"
FIGURES: dict[str, list[tuple[str, ...]]] = {
    "training step, BERT": [
        (r, "hugging_face: bert-training step", "before") for r in ("cpu-avx2-packed", "cpu-packed")
    ],
    "training step, paper's": [(m, "training_step: base-b16-l64", "eager", PACKED) for m in MODELS],
    "evaluation, paper's base": [(m, "inference: base-b16-l64") for m in MODELS],
    "attention with dropout": [(r, SENTENCES, "eager", PACKED) for r in ("cpu-avx2", "cpu")],
    "causal attention": [(r, CAUSAL, "sdpa flash_attention") for r in ("cpu-avx2", "cpu")],
}
"""Beginning of each row of the table: its figures in order, as arguments of ``results_pictures.ratio``."""


def rows() -> dict[str, list[str]]:
    """Return the rows of README's table: the case, and the figures of both columns."""
    table = README.read_text().partition("## What is fast where")[2].partition("\nOn a GPU")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    return {case.strip(): re.findall(r"\d+(?:\.\d+)?", avx2 + avx512) for case, avx2, avx512 in cells}


def test_every_row_of_the_table_is_checked() -> None:
    known = [[case for case in rows() if case.startswith(beginning)] for beginning in FIGURES]
    assert sorted(case for found in known for case in found) == sorted(rows())


@pytest.mark.parametrize("beginning", FIGURES)
def test_the_figures_are_those_of_the_records(beginning: str) -> None:
    (figures,) = (figures for case, figures in rows().items() if case.startswith(beginning))
    measured = [results.ratio(*arguments) for arguments in FIGURES[beginning]]
    places = [len(figure.partition(".")[2]) for figure in figures]
    assert figures == [f"{value:.{n}f}" for value, n in zip(measured, places, strict=True)]


WAYS = ("ours", "ours packed", "ours kept", "ours packed, kept", "eager", "compiled, frozen", "onnxruntime", "OpenVINO",
        "OpenVINO by sentence", "CTranslate2")  # fmt: skip
"""Rows of the table of docs/runtimes.md, as the record names them."""
GPU = "h200/measured"
"""Record of the GPU."""
GPU_ROWS = {"64 sentences": "sentences-b64h16k256-p0.1"}
"""Beginning of each row of the GPU's table: its case in the record."""


def test_the_figures_of_the_gpu_are_those_of_its_record() -> None:
    times = records.cases(GPU, "us")
    table = README.read_text().partition("\nOn a GPU")[2].partition("\n## ")[0]
    found = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    assert [any(case.strip().startswith(name) for name in GPU_ROWS) for case, *_ in found] == [True] * len(GPU_ROWS)
    for case, *figures in found:
        us = times[next(of for name, of in GPU_ROWS.items() if case.strip().startswith(name)) + "-bfloat16-train"]
        pairs = ("sdpa efficient_attention", "ours"), ("sdpa cudnn_attention", "ours"), ("FA2 varlen", "ours packed")
        for figure, (peer, ours) in zip(map(str.strip, figures), pairs, strict=True):
            assert figure == f"{us[peer].median / us[ours].median:.{len(figure.partition('.')[2])}f}", (case, peer)


def test_the_training_steps_on_a_gpu_are_those_of_its_record() -> None:
    ms, least, peak = (
        {(case.removeprefix("step: "), way): row.median for case, ways in found.items() for way, row in ways.items()}
        for found in (records.cases(GPU, unit) for unit in ("ms", "ms, least", "bytes"))
    )
    sentence = README.read_text().partition("A training step of BERT-base")[2].partition("\n\n")[0]
    named = [("bert", way) for way in ("ours packed", "sdpa")]
    assert re.findall(r"(\d+) ms", sentence) == [f"{ms[name]:.0f}" for name in named]
    page = (ROOT / "docs/results/gpu.md").read_text().partition("## Measured: whole training steps")[2]
    found = {}
    for line in page.partition("\n## ")[0].replace("**", "").replace("`", "").splitlines():
        way, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if way == "base Transformer":
            columns = (("base256", ""), ("base", ""), ("base", ", graph"))
        elif way == "BERT-base":
            columns = (("bert", ""), ("bert", " compiled"))
        elif any(re.match(r"\d+( \(|$)", cell) for cell in cells):
            for (what, end), cell in zip(columns, cells, strict=True):
                found |= {(what, way.replace("SDPA", "sdpa") + end): cell} if cell else {}
    assert len(found) == len(ms)
    for name, cell in found.items():
        full = f"{ms[name]:.0f} ({least[name]:.0f}), {peak[name] / 1e9:.1f} GB"
        assert cell == (full.partition(" ")[0] if "graph" in name[1] else full), name


def test_the_figures_of_what_is_swapped_on_a_gpu_are_those_of_its_record() -> None:
    """torch 2.11 chooses cuDNN there in 16 bits."""
    times = records.cases(GPU, "us")
    page = (ROOT / "docs/explained/accelerate.md").read_text()
    for kinds, peer, words in (
        (("sentences", "long"), "sdpa cudnn_attention", "with padding {:.1f} to {:.1f} times as fast on an H200 as"),
        (("sentences", "long"), "sdpa efficient_attention", "and {:.1f} to {:.1f} times as fast as mem-efficient"),
    ):
        ratios = [us[peer].median / us["ours"].median for case, us in times.items() if case.startswith(kinds)]
        assert words.format(min(ratios), max(ratios)) in page


def test_the_times_beside_runtimes_are_those_of_the_record() -> None:
    found = records.cases("cpu-runtimes")
    cases = {case.removeprefix("bert: ").replace("-", ", "): ways for case, ways in found.items()}
    table = (ROOT / "docs/runtimes.md").read_text().partition("| milliseconds")
    lines = "".join(table[1:]).partition("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|"))
    columns = [cases[name.replace(" x ", "x")] for name in header[1:]]
    ways = next(iter(cases.values()))
    assert len(rows) == len(ways)
    for way, (_, *cells) in zip(WAYS, rows, strict=True):
        for times, cell in zip(columns, cells, strict=True):
            if way not in times:
                assert cell == "-"
                continue
            ms = 1000 * times[way].median
            is_least = times[way].median == min(of.median for of in times.values())
            shown = f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
            assert cell == (f"**{shown}**" if is_least else shown), way
