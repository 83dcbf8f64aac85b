"""Token embedding with positions and dropout, and the positional table. The ops are in csrc/ops/embedding.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Never

import torch
from torch import Tensor

from .. import backends, reference
from ..tracing import refuse_torchscript
from ..triton import configs
from . import _plain, eager, seeds
from .argument_types import check_int
from .registry import Case, Draw, Op, implementation, register
from .unknown_names import unknown_names


def embed(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None = None,
    *,
    scale: float = 1.0,
    offset: int | Tensor = 0,
    padding_idx: int | None = None,
    dropout_p: float = 0.0,
    **unknown: Never,
) -> Tensor:
    """``dropout(weight[ids] * scale + table[offset : offset + L])`` in one pass (Vaswani et al., "Attention Is All
    You Need", 2017, sections 3.4, 3.5 and 5.4), with no mask and no intermediate stored for the backward.

    Args:
        ids: (..., L) int64 or int32, each in [0, vocabulary); or () for one id.
        weight: (vocabulary, d); float32, float16, bfloat16 (float64 on CPU), at any strides.
        table: (at least offset + L, d) positional encoding, float32 or the dtype of ``weight``; None for none. A
            learned table may require a gradient.
        scale: multiplies the looked-up rows, sqrt(d) in the paper.
        offset: position of the first id, for decoding step by step. A tensor gives one offset per sequence: int64 or
            int32 with the shape of ``ids`` without its last dimension.
        padding_idx: row of ``weight`` that is read like any other row but gets no gradient, as in ``nn.Embedding``.
        dropout_p: probability of dropping an element of the sum, in [0, 1]; kept ones are scaled by ``1 / (1 - p)``.
            ``torch.manual_seed`` governs the draws. Every backend draws the same mask. Pass 0 outside training.

    Returns:
        (..., L, d), or (d,) for one id, contiguous, in the dtype of ``weight``, autocast or not (as ``nn.Embedding``);
        sums are made in float32. Gradients are the same bit for bit on every run, on a GPU too, unless
        ``configs.EMBEDDING_GRADIENT`` asks for atomics.

    Raises:
        TypeError: for non-tensors and for dtypes that do not fit.
        ValueError: for shapes, devices or options that do not fit; the message names them.
        IndexError: on CPU, for an id outside the vocabulary or an offset beyond the table; the message names the value
            and its place. On a GPU the output row is NaN instead and the id contributes no gradient, because a check
            would stall the device.

    Example:
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> tfast.embed(torch.tensor([2, 0]), weight, scale=10.0)
        tensor([[50., 60.],
                [10., 20.]])
    """
    if unknown:
        raise unknown_names(embed, unknown)
    if isinstance(ids, Tensor) and ids.dim() == 0:  # a single id becomes a sequence of length 1
        options = {"scale": scale, "offset": offset, "padding_idx": padding_idx, "dropout_p": dropout_p}
        return embed(ids.unsqueeze(0), weight, table, **options).squeeze(0)  # type: ignore[arg-type]
    seed = seeds.draw_seed(weight.device) if dropout_p != 0.0 and isinstance(weight, Tensor) else None
    offsets = None
    if isinstance(offset, Tensor):
        offset, offsets = 0, offset
    if isinstance(padding_idx, int) and padding_idx < 0 and isinstance(weight, Tensor):
        padding_idx += weight.shape[0] if -weight.shape[0] <= padding_idx else 0
    if door := eager.native():
        result = door.embed(False, ids, weight, table, scale, offset, offsets, padding_idx, dropout_p, seed, True)
        if result is not None:
            return result
    else:
        eager.check("embed", ids, weight, table, scale, offset, offsets, padding_idx, dropout_p, seed, True)
    backend = backends.resolve("embed", weight.device, weight.dtype)
    if backend == "reference":
        return reference.embedding.embed(
            ids,
            weight,
            table,
            scale=scale,
            offset=offset if offsets is None else offsets,
            padding_idx=padding_idx,
            dropout_p=dropout_p,
            seed=seed,
        )
    deterministic = configs.EMBEDDING_GRADIENT == "sorted" or torch.are_deterministic_algorithms_enabled()
    op = implementation("embed", backend)
    return op(ids, weight, table, scale, offset, offsets, padding_idx, dropout_p, seed, deterministic)


def eager_embed(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor | None:
    """Compute ``weight[ids]`` as :func:`embed` does, for a valid call of plain CPU tensors in eager mode; None for any
    other call, so that PyTorch's own module raises its own errors."""
    if not (door := eager.native()):
        return None
    try:
        return door.embed(False, ids, weight, None, 1.0, 0, None, padding_idx, 0.0, None, True)
    except (TypeError, ValueError):
        return None


def add_positional(x: Tensor, table: Tensor, offset: int | Tensor = 0, dropout_p: float = 0.0) -> Tensor:
    """``dropout(x + table[offset : offset + L])`` in one pass.

    Args:
        x: (..., L, d); float32, float16, bfloat16 (float64 on CPU).
        table: (at least offset + L, d), float32 or the dtype of ``x``; the table may require a gradient.
        offset, dropout_p: as for :func:`embed`; an offset tensor is shaped as ``x`` without its last two dimensions.

    Returns:
        (..., L, d), contiguous, in the dtype of ``x``.

    Raises:
        TypeError, ValueError, IndexError: as for :func:`embed`.
    """
    if table is None:
        raise TypeError("add_positional: table must be a tensor, got NoneType")
    seed = seeds.draw_seed(x.device) if dropout_p != 0.0 and isinstance(x, Tensor) else None
    offsets = None
    if isinstance(offset, Tensor):
        offset, offsets = 0, offset
    if door := eager.native():
        result = door.add_positional(False, x, table, offset, offsets, dropout_p, seed)
        if result is not None:
            return result
    else:
        eager.check("add_positional", x, table, offset, offsets, dropout_p, seed)
    refuse_torchscript("add_positional")
    eager.require_tensor("add_positional", x)
    if dropout_p == 0.0 and offsets is None and _is_one_sum(x, table, offset):
        return (x + table[offset : offset + x.shape[-2]]).contiguous()
    backend = backends.resolve("add_positional", x.device, x.dtype)
    if backend == "reference":
        return reference.embedding.add_positional(x, table, offset if offsets is None else offsets, dropout_p, seed)
    return implementation("add_positional", backend)(x, table, offset, offsets, dropout_p, seed)


def _is_one_sum(x: Tensor, table: Tensor, offset: int) -> bool:
    """Return True if plain PyTorch adds a table in one pass, with the op's result."""
    if x.dim() < 2 or table.dim() != 2 or x.dtype != table.dtype or not x.is_floating_point():
        return False
    return offset >= 0 and table.shape[1] == x.shape[-1] and table.shape[0] >= offset + x.shape[-2]


def positional_table(length: int, d_model: int, *, layout: str = "interleaved") -> Tensor:
    """The sinusoidal positional encoding (Vaswani et al., 2017, section 3.5).

    ``PE[pos, 2i] = sin(pos / 10000**(2i / d_model))`` and ``PE[pos, 2i + 1]`` the cosine, computed in fp64.

    Args:
        length, d_model: sizes.
        layout: "interleaved", as above; or "halves": first all sines, then all cosines (Marian, tensor2tensor).

    Returns:
        (length, d_model) float32 on torch's default device; an odd ``d_model`` lacks the last cosine.

    Raises:
        ValueError: for a negative ``length``, a ``d_model`` below 1, or another layout.

    Example:
        >>> tfast.positional_table(2, 4)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    check_int("positional_table", "length", length)
    check_int("positional_table", "d_model", d_model)
    if length < 0 or d_model < 1:
        raise ValueError(f"positional_table: expected length >= 0 and d_model >= 1, got {length} and {d_model}")
    if layout not in ("interleaved", "halves"):
        raise ValueError(f'positional_table: layout must be "interleaved" or "halves", got {layout!r}')
    refuse_torchscript("positional_table")
    if layout == "halves":
        table = positional_table(length, d_model)
        return torch.cat((table[:, ::2], table[:, 1::2]), dim=1)
    table = torch.empty(length, d_model, dtype=torch.float32)
    if table.is_meta:
        return table
    # A model makes the table once, so the plain PyTorch formula is fast enough under tracing and inside torch.func.
    observed = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or backends.in_transform()
    if (
        observed
        or type(table) is not Tensor
        or backends.choose("embedding", table.device, table.dtype)[0] == "reference"
    ):
        return reference.embedding.positional_table(length, d_model)
    torch.ops.transformer_fast.fill_positional_table(table)
    return table


def _cases(draw: Draw) -> Iterator[Case]:
    ids, weight = draw.integers(0, 50, 7, 33), {"weight": draw.normal(50, 100)}
    table = positional_table(64, 100).to(draw.device)
    embedding = partial(embed, ids, table=table, scale=10.0)
    yield Case("embed", "scale + PE", weight, embedding)
    dropping = partial(embedding, dropout_p=0.1, padding_idx=0)
    yield Case("embed", "scale + PE + dropout 0.1, padding_idx 0", weight, dropping)
    yield Case("embed", "an offset for each sequence", weight, partial(embedding, offset=ids[:, 0] // 2))


def _added_cases(draw: Draw) -> Iterator[Case]:
    table = positional_table(64, 100).to(draw.device)
    adding = partial(add_positional, table=table, offset=5, dropout_p=0.1)
    yield Case("add_positional", "offset 5, dropout 0.1", {"x": draw.normal(7, 33, 100)}, adding)


register(Op("embed", "embedding", "native", (_plain.embed,), _cases))
register(Op("add_positional", "embedding", "native", (_plain.add_positional,), _added_cases))
