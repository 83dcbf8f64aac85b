"""Draws the README's picture from the records: how many times as fast as eager PyTorch attention and a whole step are.

python benchmarks/headline.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import records

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "headline.svg"
WIDTH, LEFT, BAR, GAP, SCALE_END, TICKS = 560, 240, 18, 6, 34, 16
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 }
  .peer { fill: #9aa4af } .ours { fill: #2da44e }
  .axis { stroke: #d0d7de } .tick { font-size: 11px; fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .peer { fill: #6e7681 } .ours { fill: #3fb950 }
    .axis { stroke: #30363d } .tick { fill: #8b949e }
  }
"""


class Bar(NamedTuple):
    """Bar of the picture: times as fast as eager PyTorch."""

    label: str
    times: float
    ours: bool


def groups() -> dict[str, list[Bar]]:
    """Return the parts of the picture: titles, and bars from the slowest peer to ours without padding."""
    attention = records.ratios("cpu", "attention: sentences-b64h8kmax-p0.1-float32-train")
    step = records.ratios("cpu-model", "training_step: base-b16-l64")
    return {
        "Attention in training, with padding and dropout": bars(attention, "sdpa math", "PyTorch's SDPA"),
        "Training step, the paper's base model": bars(step, "nn.Transformer", "nn.Transformer"),
    }


def bars(ratios: dict[str, float], peer: str, label: str) -> list[Bar]:
    eager = ratios["eager"]
    return [
        Bar("eager PyTorch", 1.0, False),
        Bar(label, eager / ratios[peer], False),
        Bar("transformer_fast", eager, True),
        Bar("transformer_fast, packed", eager / ratios["ours packed"], True),
    ]


def draw() -> str:
    """The picture as SVG, for light and dark pages. Each group has its own scale."""
    y, parts = 0, []
    for title, rows in groups().items():
        y += 24
        parts.append(f'<text class="title" x="0" y="{y}">{title}: times as fast as eager</text>')
        parts += drawn(rows, y + 8)
        y += 8 + len(rows) * (BAR + GAP) + TICKS + GAP
    return svg(parts, y, STYLE)


def drawn(rows: list[Bar], y: int) -> list[str]:
    """Return the bars of a group, the first at y, with the group's scale and, below, its axis."""
    most = max(row.times for row in rows)
    unit = (WIDTH - LEFT - SCALE_END) / most
    parts = axis(LEFT, unit, most, y - 2, y + len(rows) * (BAR + GAP))
    for row in rows:
        kind, middle, width = "ours" if row.ours else "peer", y + BAR - 5, row.times * unit
        parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{row.label}</text>')
        parts.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>')
        parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{middle}">{said(row.times)}</text>')
        y += BAR + GAP
    return parts


def axis(left: float, unit: float, most: float, top: int, bottom: int) -> list[str]:
    """Return lines at 0 and at up to five round numbers up to ``most``, with the numbers below ``bottom``."""
    step = next(step for step in (0.5, 1, 2, 5, 10, 20) if most / step <= 5.5)
    parts = []
    for number in range(int(most / step) + 1):
        x = f"{left + number * step * unit:.1f}"
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 12}" text-anchor="middle">{number * step:g}</text>')
    return parts


def svg(parts: list[str], height: int, style: str, width: int = WIDTH) -> str:
    """A picture of these parts."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{style}</style>", *parts, "</svg>", ""]
    )


def said(times: float) -> str:
    """Return a ratio with two digits, as the README shows it."""
    return f"{times:.0f}" if times >= 10 else f"{times:.1f}"


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE)
