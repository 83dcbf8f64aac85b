"""Figures that stand on several pages are those of one record: in tables, and in sentences of any page.

`test_page_figures.py` has README's table. What is listed here is where a figure comes from, never the figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pages
import pytest
import records
import results_pictures as results

STEP, EVALUATION = "training step", "evaluation"
FAMILIES = {
    "BERT": "bert", "RoBERTa": "roberta", "DistilBERT": "distilbert", "ViT": "vit", "Marian": "marian", "BART": "bart",
    "M2M100": "m2m100", "T5": "t5", "Whisper": "whisper", "GPT-2": "gpt2",
}  # fmt: skip
TEXTS = {
    "`nn.Transformer`": "nn.Transformer", "the hand-written classic model": "classic", "the classic code": "classic",
    "a port of TensorFlow's tutorial": "tensorflow", "a port of d2l": "d2l",
}  # fmt: skip
CALLERS = {
    "a GPT of 3 layers": "gpt 128", "the same, 512 tokens": "gpt 512", "the same, 1,024 tokens": "gpt 1024",
    "a vision transformer": "vision", "x-transformers": "x-transformers",
}  # fmt: skip


class Figure(NamedTuple):
    """Times as fast: of ``way`` against ``peer`` in a case of a record; the case may have a place for a row's name."""

    record: str
    case: str
    peer: str = "before"
    way: str = ""

    def ratio(self, name: str = "") -> float:
        return results.ratio(self.record, self.case.format(name), self.peer, self.way)


def both(record: str, case: str, peer: str = "before") -> list[Figure]:
    """Figures of the training step and of the evaluation."""
    return [Figure(record, f"{case}-{kind}", peer) for kind in (STEP, EVALUATION)]


HUGGING_FACE, PORTED = "hugging_face: {}", "before_and_after: {}"
TABLES: dict[tuple[str, str], tuple[dict[str, str], list[list[Figure]]]] = {
    ("models/transformers", "AVX2, `packed=True`: training step"): (
        FAMILIES,
        [[f] for f in (*both("cpu-avx2-packed", HUGGING_FACE), *both("cpu-huggingface", HUGGING_FACE))],
    ),
    ("models/handwritten", "AVX2: training step"): (
        TEXTS,
        [[f] for f in (*both("cpu-avx2-model", PORTED), *both("cpu-accelerate", PORTED))],
    ),
    ("results/models", "AVX2: training step"): (
        TEXTS,
        [[f] for f in (*both("cpu-avx2-model", PORTED), *both("cpu-accelerate", PORTED))],
    ),
    ("functional", "evaluation"): (CALLERS, [[f] for f in both("cpu-accelerate", "callers: {}")]),
    ("results/models", "against eager PyTorch"): (
        {f"{name}, {layers} ": FAMILIES[name] for name in ("BERT", "Marian", "BART", "GPT-2") for layers in "24"},
        [
            both("cpu-avx2-packed", HUGGING_FACE),
            both("cpu-avx2-packed", HUGGING_FACE, "padded"),
            both("cpu-avx2-packed", HUGGING_FACE, "dense"),
        ],
    ),
}
"""Page and name of a column: the rows, by the beginning of their first cell, and the figures of each further cell."""

HOME: dict[str, list[list[Figure]]] = {
    "a BERT": [[Figure(r, "hugging_face: bert-training step")] for r in ("cpu-avx2-packed", "cpu-packed")],
    "Marian or BART": [
        [Figure(r, f"hugging_face: {m}-training step") for m in ("marian", "bart")]
        for r in ("cpu-avx2-packed", "cpu-packed")
    ],
    "GPT-2": [[Figure(r, "hugging_face: gpt2-training step")] for r in ("cpu-avx2-packed", "cpu-packed")],
    "a GPT that calls": [[], [Figure("cpu-accelerate", "callers: gpt 512-training step")]],
    "`nn.Transformer`": [
        [Figure(r, "before_and_after: nn.Transformer-training step")] for r in ("cpu-avx2-model", "cpu-accelerate")
    ],
    "`nn.TransformerEncoder`": [[Figure(r, "torch_encoder: training step")] for r in ("cpu-avx2-packed", "cpu-packed")],
    "the classic": [
        [Figure(r, "before_and_after: classic-training step")] for r in ("cpu-avx2-model", "cpu-accelerate")
    ],
    "no model yet": [
        [Figure(r, "training_step: base-b16-l64", "eager", "ours packed")] for r in ("cpu-avx2-model", "cpu-model")
    ],
    "attention of your own": [
        [Figure(r, "attention: sentences-b64h8kmax-p0.1-float32-train", "eager")] for r in ("cpu-avx2", "cpu")
    ],
    "the same, on packed": [
        [Figure(r, "attention: sentences-b64h8kmax-p0.1-float32-train", "eager", "ours packed")]
        for r in ("cpu-avx2", "cpu")
    ],
}
"""Rows of the table of docs/index.md, by the beginning of their first cell: figures of the columns AVX2 and AVX-512."""

NUMBER = r"(\d+(?:\.\d+)?)"
PADDED = [Figure("cpu-avx2-packed", f"hugging_face: {{}}-{kind}", "before", "padded") for kind in (STEP, EVALUATION)]
SENTENCES: dict[str, list[tuple[Figure, str]]] = {
    rf"padding left in, a training step of BERT is {NUMBER}": [(PADDED[0], "bert")],
    rf"BERT is {NUMBER} times as fast and an evaluation {NUMBER} times, of Marian {NUMBER} and {NUMBER} times": [
        (PADDED[0], "bert"), (PADDED[1], "bert"), (PADDED[0], "marian"), (PADDED[1], "marian"),
    ],
    rf"one of Marian {NUMBER}, an evaluation {NUMBER} and {NUMBER} \(": [
        (PADDED[0], "marian"), (PADDED[1], "bert"), (PADDED[1], "marian"),
    ],
    rf"training step of BERT with 44 % padding is {NUMBER} times": [(both("cpu-avx2-packed", HUGGING_FACE)[0], "bert")],
    rf"as fast as eager PyTorch with AVX2, of Marian {NUMBER}": [(both("cpu-avx2-packed", HUGGING_FACE)[0], "marian")],
    rf"BERT {NUMBER}, Marian {NUMBER}, GPT-2 {NUMBER} times": [
        (both("cpu-avx2-packed", HUGGING_FACE)[0], name) for name in ("bert", "marian", "gpt2")
    ],
    rf"{NUMBER} times, the paper's base size": [
        (Figure("cpu-avx2-model", "training_step: base-b16-l64", "eager", "ours packed"), "")
    ],
    rf"evaluation of the paper's base model is {NUMBER} times": [
        (Figure("cpu-avx2-model", "inference: base-b16-l64", "eager"), "")
    ],
    rf"AVX2 the training step is {NUMBER} times": [(both("cpu-avx2-packed", HUGGING_FACE)[0], "bert")],
}  # fmt: skip
"""Words around figures, on any page; and where each figure comes from, with the name in its case."""

MS: dict[str, list[tuple[str, str]]] = {
    r"64 x 256 tokens, (\d+) ms, packed (\d+) ms, with PyTorch's SDPA (\d+) ms": [
        ("bert", "ours"), ("bert", "ours packed"), ("bert", "sdpa"),
    ],
    r"256 x 128 tokens of the paper's base model take (\d+) ms, packed (\d+) ms, with `nn.Transformer` (\d+) ms": [
        ("base256", "ours"), ("base256", "ours packed"), ("base256", "nn.Transformer"),
    ],
    r"BERT-base \(64 x 256\) took (\d+) ms, packed (\d+) ms, with PyTorch's SDPA (\d+) ms": [
        ("bert", "ours"), ("bert", "ours packed"), ("bert", "sdpa"),
    ],
    r"Compiled, ours took (\d+) ms and SDPA (\d+) ms": [("bert", "ours compiled"), ("bert", "sdpa compiled")],
    r"more to do: (\d+) ms, and (\d+) ms padded": [("bert", "ours packed"), ("bert", "ours")],
    r"base Transformer's step takes (\d+) ms packed and (\d+) ms padded": [
        ("base256", "ours packed"), ("base256", "ours"),
    ],
    r"waits for the host there: packed (\d+) ms, SDPA (\d+) ms": [("bert", "ours packed"), ("bert", "sdpa")],
}  # fmt: skip
"""Words around milliseconds of a training step on a GPU, on any page: case and way of each."""
GPU_ROWS = {
    "64 sentences padded": "sentences-b64h16k256-p0.1", "4 sequences of up": "long-b4h16k4096-p0.1",
    "4 full sequences of 4,096, dropout": "full-b4h16k4096-p0.1",
    "4 full sequences of 4,096, causal": "full causal-b4h16k4096-p0.0",
}  # fmt: skip


def like(shown: str, value: float) -> bool:
    """Return True if a figure is this value, rounded to its own digits."""
    return shown == f"{value:.{len(shown.partition('.')[2])}f}"


def lines(page: str, column: str) -> Iterator[list[str]]:
    """Yield the lines of a table as cells; a column name may stand twice, so no dict is made."""
    for text in re.findall(r"(?:^\|.*\n)+", (pages.DOCS / f"{page}.md").read_text(), re.MULTILINE):
        head, _, *rows = text.splitlines()
        if column in head:
            yield from ([cell.strip() for cell in row[1:-1].split("|")] for row in rows)
            return


@pytest.mark.parametrize("page, column", TABLES)
def test_tables_have_the_figures_of_their_records(page: str, column: str) -> None:
    names, columns = TABLES[page, column]
    checked = 0
    for label, *cells in lines(page, column):
        case = next((case for name, case in names.items() if label.startswith(name)), None)
        if case is None:
            continue
        for cell, figures in zip(cells, columns, strict=False):
            shown = cell.split("; ") if cell else []
            for figure, expected in zip(shown, figures, strict=False):
                assert like(figure, expected.ratio(case)), (label, figure, expected.ratio(case))
                checked += 1
    assert checked >= len(columns) * 2


def test_home_has_the_figures_of_the_records() -> None:
    rows = {cells[0]: cells[2:4] for cells in lines("index", "AVX-512 (AMD)")}
    for beginning, columns in HOME.items():
        cells = next(cells for label, cells in rows.items() if label.startswith(beginning))
        for cell, figures in zip(cells, columns, strict=True):
            shown = re.findall(NUMBER, cell.partition("(")[0])
            assert len(shown) == len(figures), (beginning, cell)
            for figure, expected in zip(shown, figures, strict=True):
                assert like(figure, expected.ratio()), (beginning, figure, expected.ratio())


def test_home_has_the_range_of_padded_models() -> None:
    """The padding of BERT, Marian, BART and GPT-2 left in: the least and the largest figure of a training step."""
    (cells,) = (
        cells for cells in lines("index", "AVX-512 (AMD)") if cells[0] == "the same models, padding left in, training"
    )
    case = HUGGING_FACE + f"-{STEP}"
    for cell, (record, way) in zip(cells[2:4], (("cpu-avx2-packed", "padded"), ("cpu-huggingface", "")), strict=True):
        found = [Figure(record, case, way=way).ratio(model) for model in ("bert", "marian", "bart", "gpt2")]
        least, largest = cell.split(" to ")
        assert like(least, min(found)) and like(largest, max(found)), (cell, found)


def places(pattern: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the pages that have these words, and the figures in them."""
    found = []
    for page in pages.PAGES:
        text = " ".join(page.read_text().split())
        found += [(pages.page_name(page), match.groups()) for match in re.finditer(pattern, text)]
    return found


@pytest.mark.parametrize("pattern", SENTENCES)
def test_sentences_have_the_figures_of_their_records(pattern: str) -> None:
    found = places(pattern)
    assert found, "no page has these words: change them here as well"
    for page, shown in found:
        for figure, (expected, name) in zip(shown, SENTENCES[pattern], strict=True):
            assert like(figure, expected.ratio(name)), (page, figure, expected.ratio(name))


@pytest.mark.parametrize("pattern", MS)
def test_sentences_have_the_milliseconds_of_the_gpus_record(pattern: str) -> None:
    found = places(pattern)
    assert found, "no page has these words: change them here as well"
    ms = {case.removeprefix("step: "): ways for case, ways in records.cases("h200/measured", "ms").items()}
    for page, shown in found:
        for figure, (case, way) in zip(shown, MS[pattern], strict=True):
            assert like(figure, ms[case][way].median), (page, figure)


def test_the_page_of_the_gpu_has_the_figures_of_its_record() -> None:
    us, checked = records.cases("h200/measured", "us"), 0
    pairs = ("sdpa efficient_attention", "ours"), ("sdpa cudnn_attention", "ours"), ("FA2 varlen", "ours packed")
    for label, *cells in lines("gpu", "FlashAttention-2, both packed"):
        ways = us[next(case for name, case in GPU_ROWS.items() if label.startswith(name)) + "-bfloat16-train"]
        for shown, (peer, ours) in zip(filter(None, cells), pairs, strict=False):
            assert like(shown, ways[peer].median / ways[ours].median), (label, peer)
            checked += 1
    assert checked == 10


def test_the_page_of_torch_nn_has_the_figures_of_its_records() -> None:
    encoder = [Figure("cpu-avx2-packed", f"torch_encoder: {kind}") for kind in (STEP, EVALUATION)]
    of_stack = [both(record, PORTED.format("nn.Transformer")) for record in ("cpu-avx2-model", "cpu-accelerate")]
    for (_, _, *shown), figures in zip(lines("models/torch_nn", "| record"), (encoder, *of_stack), strict=True):
        assert all(like(figure, expected.ratio()) for figure, expected in zip(shown[:2], figures, strict=True)), shown


def test_no_figure_is_without_a_record() -> None:
    """Three pages had three figures of one case, as two of them were in no record."""
    for page in pages.PAGES:
        text = " ".join(pages.without_blocks(page).split())
        assert not re.search(r"shortest of three( runs)?( and|;) not in a record", text), page
