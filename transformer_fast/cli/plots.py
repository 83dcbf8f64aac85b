"""Two pictures: the cross-attention of a translation, and the positional encoding.

Needs matplotlib (`pip install 'transformer_fast[plots]'`); figures are drawn without a display.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase, SubFigure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from torch import Tensor, nn

from .. import ops

if TYPE_CHECKING:
    from ..translation.translator import AnyTokenizer  # needs sentencepiece, which pictures do not

INK, QUIET = "#22252b", "#6b7280"
WEIGHTS = "Blues"  # lightness shows the value: 0 is white, 1 is black
SIGNED = "RdBu_r"  # white at zero
PICTURED = 80
"""Maximum number of pieces per sentence in a picture; 800 pieces would exhaust the memory."""
CURVES = ("#0b4f8a", "#7fb2e5", "#b3450d", "#f2a65a")  # sine dark and cosine light, a hue for each frequency
DARK = {INK: "#e6edf3", QUIET: "#9198a1", "#0b4f8a": "#1f6feb", "#b3450d": "#db6d28"}
"""Colours of a dark picture, by those of a light one."""


@torch.inference_mode()
def cross_attention(model: nn.Module, src: Tensor, trg: Tensor) -> list[Tensor]:
    """Compute the cross-attention weights of each target position, without dropout.

    model: a `transformer_fast.Transformer`. src (1, S) and trg (1, T): ids, nothing padded; trg begins with BOS.
    Returns one tensor (heads, T, S) for each decoder layer; row t belongs to the token predicted after trg[t].
    """
    if src.shape[0] != 1 or trg.shape[0] != 1:
        raise ValueError(
            f"expected one sentence, src (1, S) and trg (1, T), got {tuple(src.shape)}, {tuple(trg.shape)}"
        )
    weights: list[Tensor] = []

    def record(attend: nn.Module, inputs: tuple) -> None:
        q, k, v = (
            linear(x).unflatten(-1, (attend.h, attend.d_k)).transpose(1, 2)
            for linear, x in zip((attend.q_linear, attend.k_linear, attend.v_linear), inputs, strict=False)
        )
        _, own_weights = ops.attention(q, k, v, return_weights=True)
        weights.append(own_weights[0].float().cpu())

    hooks = [layer.attn_2.register_forward_pre_hook(record) for layer in model.decoder.layers]
    training = model.training
    model.eval()
    try:
        look_ahead = torch.ones(1, trg.shape[1], trg.shape[1], dtype=torch.bool, device=trg.device).tril()
        model.decoder(trg, model.encoder(src, None), None, look_ahead)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return weights


def attention_picture(
    path: str | os.PathLike[str],
    model: nn.Module,
    tokenizer: AnyTokenizer,
    source: str,
    translation: Sequence[int],
    dark: bool = False,
) -> Path:
    """Draw the cross-attention of one translation: its heads' mean, large, and every head of every layer, small.

    source: the sentence. translation: its target ids, without BOS and EOS. dark: draw on a dark ground. Returns the
    path of the PNG.
    Raises ValueError for more than `PICTURED` pieces of either.
    """
    device = next(model.parameters()).device
    src_ids = tokenizer.encode_source([source])[0]
    trg_ids = [tokenizer.bos, *translation]
    if max(len(src_ids), len(trg_ids)) > PICTURED:
        raise ValueError(
            f"the sentence has {len(src_ids):,} pieces and its translation {len(trg_ids):,}; expected at most "
            f"{PICTURED} each, which a picture can show"
        )
    layers = cross_attention(model, torch.tensor([src_ids], device=device), torch.tensor([trg_ids], device=device))
    read = _labels(tokenizer.source_pieces(src_ids[:-1]))
    written = _labels(tokenizer.pieces(translation))
    sharpest = min(layers, key=_entropy)
    number = next(index for index, layer in enumerate(layers, start=1) if layer is sharpest)

    heads = layers[0].shape[0]
    width, height = max(4.5, 0.42 * len(read)), max(4.0, 0.34 * len(written))
    figure = new_figure(1.55 * width + 2.4, height + 2.4)
    title = f"{source}  \u2192  {tokenizer.decode([translation])[0]}"
    figure.suptitle(textwrap.fill(title, int(10 * figure.get_figwidth())), color=INK, fontsize=14)
    left, right = figure.subfigures(1, 2, width_ratios=(2, 1))
    left.suptitle(f"what each piece reads (layer {number}, mean of {heads} heads)", color=QUIET)
    _alignment(left, sharpest.mean(dim=0), read, written)
    right.suptitle("every head", color=QUIET)
    _heads(right, layers)
    return save(figure, path, dark)


def _alignment(figure: SubFigure, weights: Tensor, read: list[str], written: list[str]) -> None:
    axes = figure.subplots()
    image = _weights(axes, weights)
    axes.set_xticks(range(len(read)), read, rotation=50, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(written)), written)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    # Thin lines between rows and columns help to find the weight of a piece.
    axes.set_xticks([x + 0.5 for x in range(len(read) - 1)], minor=True)
    axes.set_yticks([y + 0.5 for y in range(len(written) - 1)], minor=True)
    axes.grid(which="minor", color="#e5e7eb", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    for (row, column), weight in np.ndenumerate(weights.numpy()):
        if weight >= 0.1:
            cell_text(axes, row, column, f"{weight:.1f}".lstrip("0"), "white" if weight > 0.5 else INK)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.set_label("attention weight", color=QUIET)


def _heads(figure: SubFigure, layers: list[Tensor]) -> None:
    grid = figure.subplots(layers[0].shape[0], len(layers), squeeze=False)
    for column, layer in enumerate(layers):
        for row, weights in enumerate(layer):
            axes = grid[row][column]
            _weights(axes, weights)
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(f"head {row + 1}", color=QUIET)
            if row == 0:
                axes.set_title(f"layer {column + 1}", color=QUIET, fontsize=10)


def positional_picture(path: str | os.PathLike[str], dark: bool = False) -> Path:
    """Draw the positional encoding: dimensions 4 to 7 of d = 20 over 100 positions as curves, and the table of
    d = 128 as a heat map, its sines and cosines apart. dark: draw on a dark ground. Returns the path of the PNG."""
    figure = new_figure(11, 7.6)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    _curves(top)
    _heat_maps(bottom)
    return save(figure, path, dark)


def _curves(figure: SubFigure) -> None:
    figure.suptitle("Positional encoding, d = 20: a sine and a cosine of each frequency", color=INK)
    axes = figure.subplots()
    table = ops.positional_table(100, 20)
    for dimension, color in zip(range(4, 8), CURVES, strict=True):
        name = f"dim {dimension}, {'cosine' if dimension % 2 else 'sine'}"
        axes.plot(table[:, dimension].numpy(), color=color, linewidth=2.2, label=name)
    axes.set_xlim(0, 99)
    axes.set_ylim(-1.08, 1.08)
    axes.set_yticks([-1, 0, 1])
    axes.grid(axis="y", color="#e5e7eb")
    axes.set_xlabel("position", color=QUIET)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _heat_maps(figure: SubFigure) -> None:
    figure.suptitle("The whole table, d = 128: the first dimensions turn fast, the last hardly at all", color=INK)
    table = ops.positional_table(200, 128)
    both = figure.subplots(1, 2, sharey=True)
    for parity, axes in enumerate(both):
        image = axes.imshow(
            table[:, parity::2].T.numpy(),
            cmap=SIGNED,
            vmin=-1,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, 199.5, 128, 0),
        )
        axes.set_title("cosines (odd dimensions)" if parity else "sines (even dimensions)", color=QUIET, fontsize=10)
        axes.set_xlabel("position", color=QUIET)
        axes.tick_params(length=0)
    both[0].set_ylabel("dimension", color=QUIET)
    both[0].set_yticks([0, 32, 64, 96, 127])
    bar = figure.colorbar(image, ax=both, pad=0.01, ticks=[-1, 0, 1])
    bar.outline.set_visible(False)


def new_figure(width: float, height: float, layout: str = "constrained") -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def cell_text(axes: Axes, row: int, column: int, text: str, color: str, size: int = 9) -> None:
    """Write into the middle of a cell."""
    axes.text(column, row, text, ha="center", va="center", fontsize=size, color=color)


def _entropy(weights: Tensor) -> float:
    """Entropy of the heads' mean, averaged over target positions; low means sharp."""
    mean = weights.mean(dim=0)
    return torch.special.entr(mean).sum(dim=-1).mean().item()


def _labels(pieces: Sequence[str]) -> list[str]:
    """Labels of pieces: a low dot marks a new word, and the end of the sentence has a name."""
    return [*(piece.replace("\u2581", "\u00b7") for piece in pieces), "end"]


def _weights(axes: Axes, weights: Tensor) -> AxesImage:
    return axes.imshow(weights.numpy(), cmap=WEIGHTS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")


def save(figure: Figure, path: str | os.PathLike[str], dark: bool = False) -> Path:
    """Write a figure as PNG, on a light or a dark ground; its folder is made where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if dark:
        _darken(figure)
    figure.savefig(path, dpi=144)
    return path


def _darken(figure: Figure) -> None:
    """Turn a figure dark: ground, words and lines. Heat maps and the numbers in their cells stay as they are."""
    ground, words, rule = "#0d1117", DARK[QUIET], "#30363d"
    in_cells = {id(text) for axes in figure.axes if axes.images for text in axes.texts}
    for part in figure.findobj(FigureBase):
        part.set_facecolor(ground)
    for axes in figure.axes:
        axes.set_facecolor(ground)
        axes.tick_params(which="both", labelcolor=words)
        for line in (*axes.get_xgridlines(), *axes.get_ygridlines()):
            line.set_color(rule)
        for spine in axes.spines.values():
            spine.set_edgecolor(rule)
        for line in axes.lines:
            line.set_color(DARK.get(str(line.get_color()), line.get_color()))
        for line in axes.get_legend().get_lines() if axes.get_legend() else ():
            line.set_color(DARK.get(str(line.get_color()), line.get_color()))
    for text in figure.findobj(Text):
        if id(text) not in in_cells:
            text.set_color(DARK.get(str(text.get_color()), words))
