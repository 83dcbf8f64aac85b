"""Picture of docs/index.md: questions about a program, and the line that answers each.

python benchmarks/which_way_picture.py
"""

from __future__ import annotations

from headline import ROOT, svg

PICTURE = ROOT / "docs" / "images" / "which_way.svg"
WAYS = (
    (("Hugging Face, torch.nn,", "a tutorial's model?"), ("tfast.accelerate(model,", "      packed=True)")),
    (("Code that calls torch's SDPA?",), ("with tfast.functional():",)),
    (("Attention of your own:", "q, k and v are there?"), ("tfast.attention(q, k, v, mask,", "      dropout_p=0.1)")),
    (("A class of your own that a", "fast one replaces?"), ("tfast.register(MyAttention,", "      Fast, check=...)")),
    (("No model yet?",), ("tfast.Transformer(...,", "      packed=True)")),
    (("Also: DDP, FSDP, Trainer or", "torch.compile around it?"), ("the same line, before", "the wrapper")),
    (("Also: a GPU?",), ("the same lines, with triton", "installed")),
)  # fmt: skip
"""Question, and what to write, in lines of text. Arrows lead from one question to the next until "Also"."""
WIDTH, LEFT, RIGHT, BOX, LINE, GAP = 480, 206, 232, 44, 16, 18
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .code { font: 12px ui-monospace, monospace; white-space: pre }
  .small { font-size: 11px; fill: #57606a }
  .question { fill: #f6f8fa; stroke: #8c959f } .answer { fill: #dafbe1; stroke: #2da44e }
  .arrow { stroke: #57606a; fill: none } .head { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #8b949e }
    .question { fill: #161b22; stroke: #6e7681 } .answer { fill: #12261e; stroke: #3fb950 }
    .arrow { stroke: #8b949e } .head { fill: #8b949e }
  }
"""


def draw() -> str:
    """Return the picture as SVG, for light and dark pages."""
    parts, y, right = [], 1, WIDTH - RIGHT - 1
    for number, (question, answer) in enumerate(WAYS):
        middle = y + BOX // 2
        parts.append(f'<rect class="question" x="1" y="{y}" width="{LEFT}" height="{BOX}" rx="6"/>')
        parts += _lines("", 10, middle, question)
        parts.append(f'<path class="arrow" d="M{LEFT + 1} {middle}H{right - 6}"/>')
        parts.append(f'<path class="head" d="M{right - 7} {middle - 4}l7 4l-7 4z"/>')
        parts.append(f'<text class="small" x="{LEFT + 7}" y="{middle - 5}">yes</text>')
        parts.append(f'<rect class="answer" x="{right}" y="{y}" width="{RIGHT}" height="{BOX}" rx="6"/>')
        parts += _lines("code" if "(" in answer[0] else "", right + 8, middle, answer)
        y += BOX
        if number + 1 < len(WAYS):
            if not WAYS[number + 1][0][0].startswith("Also"):
                parts.append(f'<path class="arrow" d="M24 {y}v{GAP - 6}"/>')
                parts.append(f'<path class="head" d="M20 {y + GAP - 7}l4 7l4 -7z"/>')
                parts.append(f'<text class="small" x="34" y="{y + GAP - 5}">no</text>')
            y += GAP
    return svg(parts, y + 1, STYLE, WIDTH)


def _lines(kind: str, x: int, middle: int, lines: tuple[str, ...]) -> list[str]:
    top = middle + 5 - (len(lines) - 1) * LINE // 2
    return [
        f'<text class="{kind}" x="{x}" y="{top + n * LINE}" xml:space="preserve">{line}</text>'
        for n, line in enumerate(lines)
    ]


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE)
