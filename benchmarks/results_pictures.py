"""Draws the pictures of docs/results from the records: times as fast as a peer, one row per case, from 0.

python benchmarks/results_pictures.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import records
from headline import ROOT, STYLE, TICKS, axis, svg

FOLDER = ROOT / "docs" / "images"
WIDTH, BAR, ROW, LINE, LEFT, RIGHT = 460, 11, 46, 17, 4, 34
COLOURS = """
  .first { fill: #2da44e } .second { fill: #8bd5a0 } .loss { fill: #d4622a }
  .line { stroke: #57606a; stroke-dasharray: 2 3 } .small { font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .first { fill: #3fb950 } .second { fill: #1f7a35 } .loss { fill: #f0883e } .line { stroke: #8b949e }
  }
"""


class Row(NamedTuple):
    """A case of a picture.

    Attributes:
        label: the case, above its bars.
        first, second: times as fast as the peer, for the two colours of the legend; None: not measured.
    """

    label: str
    first: float | None
    second: float | None


class Group(NamedTuple):
    """Rows under one title; a semicolon in the title ends a line."""

    title: str
    rows: list[Row]


def ratio(record: str, case: str, peer: str = "eager", packed: str = "") -> float:
    """Return how many times as fast as the peer a case is; of our packed form, where `packed` names it."""
    ratios = records.ratios(record, case)
    return ratios[peer] / ratios[packed or "ours"]


def both(label: str, case: str, peer: str = "eager", packed: str = "") -> Row:
    """Row of the two records of ops."""
    return Row(label, *(ratio(folder, case, peer, packed) for folder in ("cpu-avx2", "cpu")))


def ops() -> list[Group]:
    """Ops against eager PyTorch, forward and backward."""
    sentences, kept = "attention: sentences-b64h8kmax-p0.1-float32-train", "2048x512-residual+dropout+layer"
    loss = "linear_cross_entropy: 1024x512x8000-forward+backward"
    linear = "linear: 2048x768x3072-forward+backward"
    return [
        Group(
            "Forward and backward; times as fast as eager PyTorch",
            [
                both("attention, padding and dropout", sentences),
                both("the same, packed", sentences, packed="ours packed"),
                both("dropout, 2048 x 512", "dropout: 2048x512-dropout-forward+backward", "F.dropout"),
                both("residual + dropout + LayerNorm", f"norm: {kept}-forward+backward"),
                both("embedding + positions + dropout", "embed: 32x64x512x32000-0.1-forward+backward-zipf"),
                Row("output layer + loss", ratio("cpu-avx2", loss), ratio("cpu-linear", loss)),
                both("LayerNorm alone, 2048 x 512", "norm: 2048x512-layer-forward+backward", "F.layer_norm"),
                Row("linear layer (AVX2: left as it is)", None, ratio("cpu-linear", linear, "F.linear")),
            ],
        ),
        Group(
            "Forward of 32 MB; times as fast as torch.compile",
            [both("LayerNorm, 16,400 x 512", "norm: 16400x512-layer-forward", "compiled")],
        ),
    ]


def models() -> list[Group]:
    """Whole models against the same model on eager PyTorch."""

    def of_hugging_face(name: str) -> Row:
        case = f"hugging_face: {name.lower().replace('-', '')}-training step"
        ratios = (ratio(folder, case, "before") for folder in ("cpu-avx2-packed", "cpu-packed"))
        return Row(f"{name} of Hugging Face", *ratios)

    def ours(label: str, case: str, packed: str = "") -> Row:
        return Row(label, *(ratio(folder, case, packed=packed) for folder in ("cpu-avx2-model", "cpu-model")))

    def before_and_after(label: str, case: str) -> Row:
        name = f"before_and_after: {case}-training step"
        return Row(label, *(ratio(folder, name, "before") for folder in ("cpu-avx2-model", "cpu-accelerate")))

    step = "training_step: base-b16-l64"
    return [
        Group(
            "Training step, 16 x 128 tokens, 44 % padding, packed",
            [of_hugging_face(name) for name in ("BERT", "Marian", "BART", "GPT-2")],
        ),
        Group(
            "Training step, padding left in",
            [
                before_and_after("nn.Transformer, accelerated", "nn.Transformer"),
                before_and_after("the classic code, accelerated", "classic"),
                ours("tfast.Transformer, the paper's base", step),
            ],
        ),
        Group(
            "tfast.Transformer, the paper's base",
            [ours("training step, packed", step, "ours packed"), ours("evaluation", "inference: base-b16-l64")],
        ),
    ]


def seconds(record: str, case: str) -> dict[str, float]:
    """Return the fastest round of each side of a case of generation."""
    return {side: row.median for side, row in records.cases(f"generation/{record}", records.FASTEST)[case].items()}


def generation() -> list[Group]:
    """Generation against CTranslate2, on a Zen 3."""

    def of(search: str, batch: int) -> Row:
        sides = seconds("bench_generation-zen3", f"{search}, base, batch {batch}, length 64")
        label = f"{'greedy' if search == 'greedy' else 'beam of 5'}, {batch} sentence{'s' * (batch > 1)}"
        return Row(label, *(sides[f"CTranslate2{kind}"] / sides[f"ours{kind}"] for kind in ("", " int8")))

    def text(search: str, label: str) -> Row:
        ratios = []
        for precision in ("fp32", "int8"):
            sides = seconds("compare_translate-zen3", f"{search}, {precision}, lines 20000")
            best = min(value for side, value in sides.items() if side.startswith("CTranslate2"))
            ratios.append(best / sides["ours, 2 workers"])
        return Row(label, *ratios)

    batches = (1, 16, 64)
    return [
        Group(
            "Base size, 64 tokens; times as many tokens a second as CTranslate2",
            [of(search, batch) for search in ("greedy", "beam") for batch in batches],
        ),
        Group(
            "A text of 20,000 lines, a small model; times as many lines a second as CTranslate2",
            [text("greedy", "greedy, two workers"), text("beam 5", "beam of 5, two workers")],
        ),
    ]


LEGENDS = {
    "ops": ("AVX2", "AVX-512"),
    "models": ("AVX2", "AVX-512"),
    "generation": ("fp32", "int8"),
}
PICTURES: dict[str, Callable[[], list[Group]]] = {"ops": ops, "models": models, "generation": generation}


def draw(name: str) -> str:
    """Return a picture as SVG, for light and dark pages."""
    return svg(*bars(PICTURES[name](), LEGENDS[name], 2 if name == "generation" else 1), STYLE + COLOURS, WIDTH)


def bars(groups: list[Group], legend: tuple[str, str], digits: int) -> tuple[list[str], int]:
    """Return the parts of a picture of ratios, each group with its scale, and the picture's height."""
    values = [value for group in groups for row in group.rows for value in row[1:] if value is not None]
    parts, y = list(_legend(legend, min(values) < 1)), 22
    for group in groups:
        y += 10
        for kind, words in zip(("title", ""), group.title.split("; "), strict=False):
            y += LINE
            parts.append(f'<text class="{kind}" x="0" y="{y}">{words}</text>')
        y += 8
        most, end = max(1.0, *(value for row in group.rows for value in row[1:] if value)), y + ROW * len(group.rows)
        unit = (WIDTH - LEFT - RIGHT) / most
        parts += axis(LEFT, unit, most, y, end)
        one = f"{LEFT + unit:.1f}"
        parts.append(f'<line class="line" x1="{one}" x2="{one}" y1="{y}" y2="{end}"/>')
        for row in group.rows:
            parts += _row(row, y, unit, digits)
            y += ROW
        y += TICKS
    return parts, y + 4


def _legend(legend: tuple[str, str], losses: bool) -> Iterator[str]:
    x = 0
    for kind, words in (("first", legend[0]), ("second", legend[1]), *((("loss", "slower"),) if losses else ())):
        yield f'<rect class="{kind}" x="{x}" y="4" width="{BAR}" height="{BAR}" rx="2"/>'
        yield f'<text class="small" x="{x + BAR + 5}" y="14">{words}</text>'
        x += 90


def _row(row: Row, y: int, unit: float, digits: int) -> Iterator[str]:
    yield f'<text x="{LEFT + 4}" y="{y + 14}">{row.label}</text>'
    top = y + 19
    for kind, value in (("first", row.first), ("second", row.second)):
        if value is None:
            continue
        kind, width = "loss" if value < 1 else kind, value * unit
        yield f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        words = said(value, digits)
        yield f'<text class="small" x="{LEFT + width + 5:.1f}" y="{top + BAR - 1}">{words}</text>'
        top += BAR + 1


def said(value: float, digits: int = 1) -> str:
    """Return a ratio as the tables have it: two digits after the point near 1, none from 10 on."""
    places = 0 if value >= 10 else max(digits, 2 if value < 1.5 else 1)
    return f"{value:.{places}f}"


if __name__ == "__main__":
    for name in PICTURES:
        path = FOLDER / f"results_{name}.svg"
        path.write_text(draw(name))
        print(path)
