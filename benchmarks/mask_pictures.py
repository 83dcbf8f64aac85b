"""Draws the pictures of docs/masks.md, for light and dark pages: the passed tensor, cell by cell, and the visible keys.

:class:`transformer_fast.AttentionMask` computes the right-hand side.

python benchmarks/mask_pictures.py
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from headline import ROOT
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from transformer_fast import AttentionMask, attention
from transformer_fast.cli.plots import INK, QUIET, WEIGHTS, cell_text, new_figure
from transformer_fast.dialects import tensorflow

FOLDER = ROOT / "docs" / "images"
SEEN, HINT = ListedColormap(["white", "#0b4f8a"]), ListedColormap(["white", "#d6e6f5"])
RULE = "#cbd2da"
"""Colours: of a visible key; of a passed value that allows a key; of the lines between cells."""

LENGTHS = torch.tensor([5, 3])
"""The batch in every picture: two sentences of five and three tokens, padded to five."""
KEEP = torch.arange(5) < LENGTHS[:, None]
CELL = 0.34
ON_PALE, ON_DARK = "#23262c", "#fefefe"
"""Colours of numbers in cells that have one colour on light and dark pages."""
VARIABLES = {
    INK: ("ink", "#e6edf3"),
    QUIET: ("quiet", "#9198a1"),
    "#ffffff": ("paper", "#161b22"),
    "#0b4f8a": ("seen", "#58a6ff"),
    "#d6e6f5": ("hint", "#1f3a5f"),
    RULE: ("rule", "#3d444d"),
}
"""Colours of a light page: their names in the pictures, and their values on a dark page."""


class Given(NamedTuple):
    """A passed tensor: name, values as (rows, columns), a mask of the values that allow a key, and axes."""

    name: str
    values: Tensor
    allows: Tensor
    rows: str = ""
    columns: str = "key"


class Line(NamedTuple):
    """One line of a picture: title, passed tensors, and by name the visible keys, (queries, keys)."""

    title: str
    given: Sequence[Given]
    seen: Sequence[tuple[str, Tensor]]


def draw(folder: Path) -> list[Path]:
    """Draw one picture for each dialect, and one of a query without keys, into ``folder``; returns the paths."""
    pictures = [_lines(folder / f"mask_{name}.svg", lines()) for name, lines in DIALECTS.items()]
    return [*pictures, _bias_picture(folder / "mask_distance.svg"), _empty_row_picture(folder / "mask_empty_row.svg")]


def _keep_masks() -> list[Line]:
    dense = KEEP[:, None] & torch.ones(5, 5, dtype=torch.bool).tril()
    padding = AttentionMask.keep(KEEP[:, None, None])
    return [
        Line(
            "padding: (B, 1, Lk), in dialects.bert (B, 1, 1, Lk), True = keep",
            [Given("keep", KEEP, KEEP, "sentence")],
            _sentences(padding),
        ),
        Line(
            "padding and look-ahead: (B, Lq, Lk), in dialects.bert (B, 1, Lq, Lk)",
            _each("keep", dense, dense),
            _sentences(AttentionMask.keep(dense[:, None])),
        ),
    ]


def _blocked_masks() -> list[Line]:
    ids = torch.where(KEEP, 7, 0)
    padding, combined, _ = tensorflow.create_masks(ids, ids)
    return [
        Line(
            "create_padding_mask(ids): (B, 1, 1, Lk), 1.0 = blocked",
            [Given("mask", padding[:, 0, 0], padding[:, 0, 0] == 0, "sentence")],
            _sentences(AttentionMask.blocked(padding)),
        ),
        Line(
            "create_masks(inp, tar)[1]: (B, 1, Lq, Lk), 1.0 = blocked",
            _each("mask", combined[:, 0], combined[:, 0] == 0),
            _sentences(AttentionMask.blocked(combined)),
        ),
    ]


def _valid_lengths() -> list[Line]:
    one, each = LENGTHS[:, None], torch.minimum(torch.arange(1, 6), LENGTHS[:, None])
    return [
        Line(
            "one length a sentence: (B,)",
            [Given("valid_lens", one, torch.ones_like(one), "sentence", "")],
            _sentences(AttentionMask.lengths(LENGTHS)),
        ),
        Line(
            "one length a query: (B, Lq)",
            [Given("valid_lens", each, torch.ones_like(each), "sentence", "query")],
            _sentences(AttentionMask.lengths(each)),
        ),
    ]


def _torch_masks() -> list[Line]:
    above = torch.ones(5, 5, dtype=torch.bool).triu(1)
    added = torch.zeros(5, 5).masked_fill(above, -torch.inf)
    causal = [("", AttentionMask.causal().dense(5, 5)[0, 0])]
    return [
        Line(
            "nn.MultiheadAttention: key_padding_mask (B, Lk), True = blocked",
            [Given("key_padding_mask", ~KEEP, KEEP, "sentence")],
            _sentences(AttentionMask.blocked(~KEEP[:, None, None])),
        ),
        Line(
            "nn.MultiheadAttention: bool attn_mask (Lq, Lk), True = blocked",
            [Given("attn_mask", above, ~above, "query")],
            causal,
        ),
        Line(
            "scaled_dot_product_attention: bool attn_mask (Lq, Lk), True = kept",
            [Given("attn_mask", ~above, ~above, "query")],
            causal,
        ),
        Line(
            "both: float attn_mask (Lq, Lk), added to the scores",
            [Given("attn_mask", added, added == 0, "query")],
            causal,
        ),
    ]


def _look_ahead() -> list[Line]:
    shapes = {"causal()": (0, 5), "causal(), 3 queries": (0, 3), "causal(3), 2 queries": (3, 2)}
    seen = [(name, AttentionMask.causal(offset).dense(Lq, 5)[0, 0]) for name, (offset, Lq) in shapes.items()]
    return [Line("the future is out of sight; causal(3): two new tokens after a cache of three", [], seen)]


def _window() -> list[Line]:
    masks = {
        "window(1)": AttentionMask.window(1),
        "window(1, 1)": AttentionMask.window(1, 1),
        "window(2, None)": AttentionMask.window(2, None),
    }
    seen = [(name, mask.dense(5, 5)[0, 0]) for name, mask in masks.items()]
    return [Line("keys near the query: so many to the left, so many to the right; None is no bound", [], seen)]


def _prefix() -> list[Line]:
    lengths = torch.tensor([3, 2])
    return [
        Line(
            "a prefix of three tokens, and one of two; what follows sees no later key",
            [Given("lengths", lengths[:, None], torch.ones(2, 1), "sentence", "")],
            _sentences(AttentionMask.prefix(lengths)),
        )
    ]


def _documents() -> list[Line]:
    ids = torch.tensor([[0, 0, 0, 1, 1]])
    mask = AttentionMask.documents(ids)
    seen = {"documents(ids)": mask, "documents(ids) & causal()": mask & AttentionMask.causal()}
    return [
        Line(
            "two documents in one row: a query sees the keys of its own",
            [Given("ids", ids, torch.ones_like(ids), "")],
            [(name, m.dense(5, 5)[0, 0]) for name, m in seen.items()],
        )
    ]


def _unions() -> list[Line]:
    order, answers = torch.arange(5), torch.tensor([[0, 1, 1, 2, 2]])
    begin, end = torch.tensor([0, 0, 1, 1, 3]), torch.tensor([2, 3, 4, 5, 5])
    intervals = AttentionMask.intervals(begin, end)
    global_token = AttentionMask.lengths(torch.tensor([1])) | AttentionMask.window(1, 1)
    question = AttentionMask.causal() & (AttentionMask.lengths(torch.tensor([1])) | AttentionMask.documents(answers))
    dilated = AttentionMask.window(4) & AttentionMask.documents((order % 2)[None])
    given = torch.stack([begin, end])
    return [
        Line(
            "an interval of keys per query: begin and end",
            [Given("begin, end", given, torch.ones_like(given), "", "query")],
            [("intervals(begin, end)", intervals.dense(5, 5)[0, 0])],
        ),
        Line(
            "two unions: a token that all see, and neighbours; two answers to one question. Then every second key",
            [],
            [
                (name, mask.dense(5, 5)[0, 0])
                for name, mask in {"global token": global_token, "answers": question, "dilated": dilated}.items()
            ],
        ),
    ]


DIALECTS: dict[str, Callable[[], list[Line]]] = {
    "keep": _keep_masks,
    "blocked": _blocked_masks,
    "lengths": _valid_lengths,
    "torch": _torch_masks,
    "look_ahead": _look_ahead,
    "window": _window,
    "prefix": _prefix,
    "documents": _documents,
    "unions": _unions,
}


def _each(name: str, values: Tensor, allows: Tensor) -> list[Given]:
    """Split (B, Lq, Lk) to one table per sentence."""
    tables = enumerate(zip(values, allows, strict=True))
    return [Given(f"{name}[{b}]", table, allowed, "query") for b, (table, allowed) in tables]


def _sentences(mask: AttentionMask) -> list[tuple[str, Tensor]]:
    """Titles and masks of the two sentences: the keys that each query sees."""
    return [(f"sentence {b}", seen) for b, seen in enumerate(mask.dense(5, 5).expand(2, 1, 5, 5)[:, 0])]


def _lines(path: Path, lines: list[Line]) -> Path:
    # Panels are placed in units of cells, so that cells have the same size in all pictures.
    left, gap, arrow, title, head = 1.3, 1.9, 2.0, 1.5, 2.1
    given_width = max(sum(given.values.shape[1] + gap for given in line.given) for line in lines)
    given_width += arrow if given_width else 0.0
    across = left + given_width + max(sum(seen.shape[1] + gap for _, seen in line.seen) for line in lines)
    heights = [
        title + head + max(len(table) for table in (*(g.values for g in line.given), *(s for _, s in line.seen)))
        for line in lines
    ]
    total = sum(heights) + 0.6
    figure = new_figure(CELL * across, CELL * total, layout="none")

    def panel(x: float, y: float, table: Tensor) -> Axes:
        rows, columns = table.shape
        return figure.add_axes((x / across, 1 - (y + rows) / total, columns / across, rows / total))

    def write(x: float, y: float, text: str, color: str, size: int) -> None:
        figure.text(x / across, 1 - y / total, text, color=color, fontsize=size, va="center")

    top = 0.0
    for line, height in zip(lines, heights, strict=True):
        write(0.35, top + title / 2 + 0.2, line.title, INK, 11)
        x, y = left, top + title + head
        for given in line.given:
            axes = panel(x, y, given.values)
            for row, values in enumerate(given.values.tolist()):
                for column, value in enumerate(values):
                    cell_text(axes, row, column, _short(value), INK, size=8)
            _cells(axes, given.allows, HINT, given.rows, given.columns, given.name)
            x += given.values.shape[1] + gap
        if line.given:
            x = left + given_width
            write(x - arrow - 0.6, y + 1, "\u2192", QUIET, 22)
            write(left, top + title + 0.15, "what you pass", QUIET, 8)
            write(x, top + title + 0.15, "blue: the keys that each query sees", QUIET, 8)
        first, _ = line.seen[0]
        for name, seen in line.seen:
            _cells(panel(x, y, seen), seen, SEEN, "query" if name == first else "", "key", name)
            x += seen.shape[1] + gap
        top += height
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG whose colours are those of the page: light, or dark by a media query."""
    shown = io.StringIO()
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(shown, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = shown.getvalue()
    for colour, (name, _) in VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    light = "; ".join(f"--{name}: {colour}" for colour, (name, _) in VARIABLES.items())
    dark = "; ".join(f"--{name}: {colour}" for name, colour in VARIABLES.values())
    style = f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    text = re.sub(r"(<svg [^>]*>)", rf"\1\n{style}", text[text.index("<svg") :], count=1)
    path.write_text(_shortened(text))
    return path


def _shortened(text: str) -> str:
    """The same picture in a third of the text: a path on one line, a cell by its corners, and no names of fonts."""
    text = re.sub(r" *<metadata>.*?</metadata>\n", "", text, flags=re.DOTALL)
    text = re.sub(r' clip-path="[^"]*"', "", text)  # no cell is outside of its axes
    text = re.sub(r"font-family: [^;\"]*?([\w-]+)(?=[;\"])", r"font-family: \1", text)  # the last one, a kind
    text = re.sub(r" *\n([LQCz])", r"\1", text)
    cell = r'd="M (\S+) (\S+)L (\S+) \2L \3 (\S+)L \1 \4L \1 \2z?\s*"'
    return re.sub(cell, r'd="M\1 \2H\3V\4H\1z"', text)


def _short(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "T" if value else "F"
    if isinstance(value, float):
        return f"{value:.1f}".replace("-inf", "\u2212\u221e")
    return str(value)


def _cells(axes: Axes, table: Tensor, colors: Colormap, rows: str, columns: str, title: str) -> None:
    """Draw values from 0 to 1 as cells with lines between them, and name the axes; an unnamed axis has no column
    numbers."""
    height, width = table.shape
    edges = [n - 0.5 for n in range(width + 1)], [n - 0.5 for n in range(height + 1)]
    axes.pcolormesh(*edges, table.numpy(), cmap=colors, vmin=0, vmax=1, edgecolors=RULE, linewidth=0.8)
    axes.set_ylim(height - 0.5, -0.5)
    axes.set_xticks(range(width), range(width) if columns else [""] * width)
    axes.set_yticks(range(height), range(height))
    axes.tick_params(which="both", length=0, labelsize=7, labelcolor=QUIET, pad=1)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(columns, color=QUIET, fontsize=8, labelpad=2.5)
    axes.set_ylabel(rows, color=QUIET, fontsize=8, labelpad=4)
    axes.set_title(title, color=INK, fontsize=8, pad=6, family="monospace")
    axes.spines[:].set_color(RULE)


def _bias_picture(path: Path) -> Path:
    """Draw the biases of ALiBi and of relative positions, smaller ones darker."""
    weight = -torch.tensor([[0.0], [0.4], [0.8], [1.2], [0.0], [0.2], [0.6], [1.0]])  # 4 buckets on either side
    masks = {
        "alibi(0.5)": AttentionMask.alibi(torch.tensor([0.5])),
        "alibi(0.5) & causal()": AttentionMask.alibi(torch.tensor([0.5])) & AttentionMask.causal(),
        "relative(weight, 4)": AttentionMask.relative(weight, 4),
    }
    figure = new_figure(8.2, 3.1, layout="none")
    place = {"left": 0.05, "right": 0.99, "top": 0.8, "bottom": 0.03, "wspace": 0.15}
    panels = figure.subplots(1, 3, gridspec_kw=place)
    for axes, (name, mask) in zip(panels, masks.items(), strict=True):
        added = (mask.added(5, 5)[0, 0] + 0.0).masked_fill(~mask.dense(5, 5)[0, 0].expand(5, 5), -torch.inf)
        for (row, column), value in np.ndenumerate(added.numpy()):
            cell_text(axes, row, column, _short(float(value)), ON_PALE if value > -1.2 else ON_DARK, size=8)
        shade = (added.clamp(min=-2.5) / -2.5).clamp(0, 1)
        _cells(axes, shade, colormaps[WEIGHTS], "query" if axes is panels[0] else "", "key", name)
        axes.set_aspect("equal")
    return _save(figure, path)


def _empty_row_picture(path: Path) -> Path:
    """Draw a keep mask that leaves query 2 no key, and the query's weights in both modes of ``empty_rows``."""
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    keep[2] = False
    q, k = torch.randn(2, 1, 1, 5, 8, generator=torch.Generator().manual_seed(4))
    figure = new_figure(8.2, 3.1, layout="none")
    place = {"left": 0.05, "right": 0.99, "top": 0.8, "bottom": 0.03, "wspace": 0.15}
    panels = figure.subplots(1, 3, gridspec_kw=place)
    _cells(panels[0], keep, SEEN, "query", "key", "query 2 sees no key")
    for axes, empty_rows in zip(panels[1:], ("uniform", "zero"), strict=True):
        weights = attention(q, k, k, keep, empty_rows=empty_rows, return_weights=True)[1][0, 0]
        for (row, column), weight in np.ndenumerate(weights.numpy()):
            shown = f"{weight:.2f}".lstrip("0") if weight else "0"
            color = ON_DARK if weight > 0.5 else ON_PALE
            cell_text(axes, row, column, shown, color, size=8)
        _cells(axes, weights, colormaps[WEIGHTS], "", "key", f'empty_rows="{empty_rows}"')
    for axes in panels:
        axes.set_aspect("equal")
    return _save(figure, path)


if __name__ == "__main__":
    for path in draw(FOLDER):
        print(path)
