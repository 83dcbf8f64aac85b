"""Draws the pictures of docs/explained from the code that they explain.

python benchmarks/explained_pictures.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from headline import ROOT, STYLE, svg
from torch import Tensor

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.explain import EMPTY, FULL, NATIVE_TILE, PARTIAL, tile_classes
from transformer_fast.reference import dropout

FOLDER = ROOT / "docs" / "images"
WIDTH = 720
COLOURS = """
  .full, .c0 { fill: #2da44e } .partial, .c1 { fill: #8bd5a0 } .empty { fill: #d8dee4 } .c2 { fill: #4a90d9 }
  .c3 { fill: #e0a458 } .dropped { fill: #57606a } .box { fill: none; stroke: #57606a }
  .small { font-size: 11px } .mono { font-family: ui-monospace, monospace; font-size: 12px }
  .on { fill: #ffffff } .bad { fill: #d1242f }
  @media (prefers-color-scheme: dark) {
    .full, .c0 { fill: #3fb950 } .partial, .c1 { fill: #1f7a35 } .empty { fill: #30363d } .c2 { fill: #388bfd }
    .c3 { fill: #c69026 } .dropped { fill: #aeb6bf } .box { stroke: #8b949e }
    .on { fill: #0d1117 } .bad { fill: #ff7b72 }
  }
"""
LENGTH = 512
KINDS = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text; its kind is a class of the style."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def cell(kind: str, x: float, y: float, width: float, height: float) -> str:
    """A filled rectangle."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def tiles() -> Iterator[str]:
    """Tiles of three masks by their class, and one tile as it lies in memory on a CPU."""
    ids, causal = torch.arange(LENGTH)[None] // 192, AttentionMask.causal()
    masks = {
        "causal()": causal,
        "lengths([320]) &amp; causal()": causal & AttentionMask.lengths(torch.tensor([320])),
        "documents(ids) &amp; causal()": causal & AttentionMask.documents(ids),
    }
    queries, keys = NATIVE_TILE
    width, height = 50, 25
    for number, (name, mask) in enumerate(masks.items()):
        classes = tile_classes(mask, 1, LENGTH, LENGTH, NATIVE_TILE)[0, 0]
        left = number * 250
        yield text(left, 14, name, "mono")
        for (row, column), kind in grid(classes):
            yield cell(KINDS[kind], left + column * width, 24 + row * height, width - 2, height - 2)
        work = int((classes != EMPTY).sum())
        yield text(
            left, 24 + classes.shape[0] * height + 14, f"{work} of {classes.numel()} tiles are computed", "small"
        )
    y = 24 + LENGTH // queries * height + 34
    for number, (kind, said) in enumerate(
        (("full", "full: no mask"), ("partial", "partial: masked"), ("empty", "empty: not read"))
    ):
        yield cell(kind, number * 150, y, 14, 14)
        yield text(number * 150 + 20, y + 12, said, "small")
    yield text(460, y + 12, f"a tile: {queries} queries x {keys} keys", "small")
    y += 44
    allowed, lanes, shown = AttentionMask.causal().dense(16, 16)[0, 0].T, 8, 16
    yield text(0, y, "A partial tile on a CPU lies transposed (a part of it):", "title")
    for (row, column), kept in grid(allowed):
        yield cell("partial" if kept else "empty", 90 + column * 16 + column // lanes * 6, y + 28 + row * 10, 14, 8)
    yield text(90, y + 22, "one vector", "small")
    yield text(90 + 16 * lanes + 6, y + 22, "of neighbouring queries", "small")
    yield text(0, y + 36, "key 0", "small")
    yield text(0, y + 36 + (shown - 1) * 10, f"key {shown - 1}", "small")
    for line, words in enumerate(
        (
            "A row is a key, a lane is a query.",
            "The maximum and the sum of a query run down",
            "the rows: no lane is added to another lane.",
            "A bound of a query is one number per lane.",
        )
    ):
        yield text(390, y + 56 + line * 24, words)


def grid(table: Tensor) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield ((row, column), value) of a table."""
    for row, values in enumerate(table.tolist()):
        for column, value in enumerate(values):
            yield (row, column), value


def draws() -> Iterator[str]:
    """Calls of Philox that serve a query, and a dropout mask under two tilings."""
    seed, p, rows, columns = torch.tensor([7]), 0.25, 32, 64
    with mock.patch.object(dropout, "_keep", lambda counter, place, half, seed, p: (place, half)):
        place, half = dropout.attention_keep(seed, p, 1, 1, 1, 32)
    yield text(0, 14, "The 32 keys of a group: the colour is the call of Philox, the number its 16 bits", "title")
    for key, (at, h) in enumerate(zip(place.tolist(), half.tolist(), strict=True)):
        number, w = divmod(at, 4)  # a call gives four words
        yield cell(f"c{number}", key * 22, 24, 20, 20)
        yield text(key * 22 + 10, 38, str(2 * w + h), "small", "middle")
        if key % 8 == 0:
            yield text(key * 22, 60, f"key {key}", "small")
    kept = dropout.attention_keep(seed, p, 1, 1, rows, columns)[0, 0]
    for number, (queries, keys) in enumerate(((8, 64), (16, 32))):
        left, size = number * 370, 5
        yield text(left, 92, f"tiles of {queries} queries x {keys} keys", "title")
        yield cell("empty", left, 102, columns * size, rows * size)
        places = [place for place, one in grid(kept) if not one]
        steps = "".join(f"M{left + column * size} {102 + row * size}h4v4h-4z" for row, column in places)
        yield f'<path class="dropped" d="{steps}"/>'
        for row in range(0, rows, queries):
            for column in range(0, columns, keys):
                place = f'x="{left + column * size - 0.5}" y="{102 + row * size - 0.5}"'
                yield f'<rect class="box" {place} width="{keys * size}" height="{queries * size}"/>'
    share = 1 - kept.float().mean().item()
    yield text(0, 102 + rows * 5 + 18, f"marked: dropped, {share:.1%} here with p = {p}; the mask is the same", "small")


def empty_rows() -> Iterator[str]:
    """Weights of a query without keys, by the fill and by the option."""
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[2] = False
    q, k = torch.randn(2, 1, 1, 4, 8, generator=torch.Generator().manual_seed(4))
    scores = (q @ k.transpose(-2, -1) * 8**-0.5)[0, 0]
    with tfast.backend("reference"):
        uniform, zero = (
            tfast.attention(q, k, k, keep, empty_rows=kind, return_weights=True)[1][0, 0]
            for kind in ("uniform", "zero")
        )
    panels = {
        "softmax, -inf filled in": scores.masked_fill(~keep, -torch.inf).softmax(-1),
        'empty_rows="uniform"': uniform,
        'empty_rows="zero"': zero,
    }
    for number, (name, weights) in enumerate(panels.items()):
        left = 50 + number * 235
        yield text(left, 14, name, "mono")
        for (row, column), weight in grid(weights):
            kind = "empty" if weight == 0 else "partial" if row == 2 else "full"
            x, y = left + column * 44, 24 + row * 32
            shown = "NaN" if weight != weight else f"{weight:.2f}" if weight else "0"
            yield cell("bad" if weight != weight else kind, x, y, 42, 30)
            yield text(x + 21, y + 20, shown, "small on" if kind == "full" or weight != weight else "small", "middle")
    for row in range(4):
        yield text(0, 44 + row * 32, f"query {row}", "small")
    yield text(0, 172, "Weights of four queries under a look-ahead mask; query 2 sees no key.", "small")


def constant(name: str) -> int:
    """A constant of csrc/cpu/partials.h."""
    source = (ROOT / "csrc" / "cpu" / "partials.h").read_text()
    return int(re.search(rf"constexpr int64_t {name} = (\d+);", source)[1])


def chunk_rows(rows: int, d: int) -> int:
    """Rows of a chunk, as in csrc/cpu/partials.h."""
    most = constant("kMostChunks")
    return max((rows + most - 1) // most, constant("kChunkElements") // d, 1)


def chunk_sum(values: list[float], ends: list[int]) -> float:
    """Sum in float32: each chunk by itself, then the sums of the chunks in order."""
    parts, first = [], 0
    for end in ends:
        total = torch.tensor(0.0)
        for value in values[first:end]:
            total = total + value
        parts.append(total)
        first = end
    total = torch.tensor(0.0)
    for part in parts:
        total = total + part
    return total.item()


def sums() -> Iterator[str]:
    """A sum over rows on one to three threads: in parts of the threads, and in chunks of the shape."""
    rows, d, left, width = 600, 128, 90, 470
    chunk = chunk_rows(rows, d)
    values = (torch.randint(-(10**6), 10**6, (rows,), generator=torch.Generator().manual_seed(3)) / 10**6).tolist()
    chunks = [*range(chunk, rows, chunk), rows]
    unit, y = width / rows, 14
    for title, by_shape in (("A part per thread: the sum depends on the threads", False),
                            (f"Chunks of {chunk} rows, by the shape {rows} x {d} alone", True)):  # fmt: skip
        yield text(0, y, title, "title")
        for threads in (1, 2, 3):
            y += 26
            own = [(number + 1) * rows // threads for number in range(threads)]
            ends = chunks if by_shape else own
            yield text(0, y + 13, f"{threads} thread{'s' * (threads > 1)}", "small")
            first = 0
            for number, end in enumerate(ends):
                taken = number * threads // len(ends)
                yield cell(f"c{taken + (taken > 0)}", left + first * unit, y, (end - first) * unit - 2, 18)
                first = end
            yield text(left + width + 8, y + 13, f"{chunk_sum(values, ends):.7f}", "mono")
        y += 50
    yield text(0, y - 10, "The colour is the thread. The sums are of the same 600 numbers, in float32.", "small")


PICTURES: dict[str, tuple[Callable[[], Iterator[str]], int]] = {
    "explained_tiles": (tiles, 480),
    "explained_dropout": (draws, 290),
    "explained_empty_rows": (empty_rows, 180),
    "explained_sums": (sums, 270),
}
"""By name, what draws it and its height."""


def draw(name: str) -> str:
    """A picture as SVG, for light and dark pages."""
    parts, height = PICTURES[name]
    return svg(list(parts()), height, STYLE + COLOURS, WIDTH)


if __name__ == "__main__":
    for name in PICTURES:
        path = FOLDER / f"{name}.svg"
        path.write_text(draw(name))
        print(path, path.stat().st_size)
