"""Picture of docs/packed.md: a padded batch, its tokens without padding, and the times of a training step of each.

python benchmarks/packed_picture.py
"""

from __future__ import annotations

import records
from headline import BAR, GAP, ROOT, STYLE, TICKS, Bar, drawn, svg

PICTURE = ROOT / "docs" / "images" / "packed.svg"
CASE = "hugging_face: bert-training step"
LENGTHS = (128, 41, 77, 25, 96, 58, 110, 33, 70, 90, 47, 84, 62, 30, 120, 81)
"""Tokens of the sentences that are drawn, 9 x 128 in all."""
LONGEST, CELL, ROW, LEFT, SECOND = 128, 2, 9, 0, 304
COLOURS = """
  .token { fill: #2da44e } .other { fill: #8bd5a0 } .padding { fill: #d8dee4 }
  @media (prefers-color-scheme: dark) { .token { fill: #3fb950 } .other { fill: #1f7a35 } .padding { fill: #30363d } }
"""


def bars() -> list[Bar]:
    """Bars of the picture: times as fast as eager PyTorch, for a step."""
    ratios = records.ratios("cpu-avx2-packed", CASE)
    eager = ratios["before"]
    return [
        Bar("eager PyTorch", 1.0, False),
        Bar("accelerate(model)", eager / ratios["padded"], False),
        Bar("accelerate(model, packed=True)", eager, True),
        Bar("as many rows without padding", eager / ratios["dense"], False),
    ]


def padded(top: int) -> list[str]:
    """Draw one row per sentence."""
    parts = []
    for number, length in enumerate(LENGTHS):
        y, kind = top + number * ROW, "token" if number % 2 else "other"
        parts.append(_cells("padding", LEFT, y, LONGEST))
        parts.append(_cells(kind, LEFT, y, length))
    return parts


def packed(top: int) -> list[str]:
    """Draw the sentences one after the other."""
    parts, start = [], 0
    for number, length in enumerate(LENGTHS):
        kind, end = "token" if number % 2 else "other", start + length
        while start < end:
            row, column = divmod(start, LONGEST)
            count = min(end - start, LONGEST - column)
            parts.append(_cells(kind, SECOND + column * CELL, top + row * ROW, count))
            start += count
    return parts


def _cells(kind: str, x: int, y: int, count: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{count * CELL}" height="{ROW - 2}"/>'


def draw() -> str:
    """The picture as SVG, for light and dark pages."""
    tokens, positions = sum(LENGTHS), LONGEST * len(LENGTHS)
    parts = [
        f'<text class="title" x="{LEFT}" y="16">{len(LENGTHS)} sentences, {positions} positions</text>',
        f'<text class="title" x="{SECOND}" y="16">packed, {tokens} tokens</text>',
        *padded(26),
        *packed(26),
    ]
    y = 26 + len(LENGTHS) * ROW + 26
    parts.append(f'<text class="title" x="{LEFT}" y="{y}">A training step of BERT: times as fast as eager</text>')
    rows = bars()
    parts += drawn(rows, y + 8)
    return svg(parts, y + 8 + len(rows) * (BAR + GAP) + TICKS, STYLE + COLOURS)


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE)
