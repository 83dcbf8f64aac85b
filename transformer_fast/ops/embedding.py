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
from .argument_types import check_int, check_number
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
    if direct := eager.native():
        result = direct.embed(ids, weight, table, scale, offset, padding_idx, dropout_p, seed)
        if result is not None:
            return result
    _check_ids_and_weight(ids, weight)
    offset, offsets = _split_offset("embed", offset, "ids", ids, ids.shape[:-1])
    if table is not None:
        _check_table("embed", table, "weight", weight, offset, ids.shape[-1])
    _check_options("embed", offset, dropout_p)
    check_number("embed", "scale", scale)
    if padding_idx is not None:
        check_int("embed", "padding_idx", padding_idx)
        vocabulary = weight.shape[0]
        if not -vocabulary <= padding_idx < vocabulary:
            raise ValueError(
                f"embed: padding_idx must lie in [{-vocabulary}, {vocabulary}) for weight {tuple(weight.shape)}, "
                f"got {padding_idx}"
            )
        padding_idx %= vocabulary
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
    op = implementation("embed", backend)
    return op(ids, weight, table, scale, offset, offsets, padding_idx, dropout_p, seed, _deterministic())


def eager_embed(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor | None:
    """Compute ``weight[ids]`` as :func:`embed` does, for plain CPU tensors in eager mode; None for any other call."""
    direct = eager.native()
    return direct.embed(ids, weight, None, 1.0, 0, padding_idx, 0.0, None) if direct else None


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
    seed = seeds.draw_seed(x.device) if dropout_p != 0.0 and isinstance(x, Tensor) else None
    if direct := eager.native():
        result = direct.add_positional(x, table, offset, dropout_p, seed)
        if result is not None:
            return result
    if not isinstance(x, Tensor):
        raise TypeError(f"add_positional: x must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"add_positional: x must be a float tensor, got {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"add_positional: x must be (..., length, d), got shape {tuple(x.shape)}")
    offset, offsets = _split_offset("add_positional", offset, "x", x, x.shape[:-2])
    _check_table("add_positional", table, "x", x, offset, x.shape[-2])
    _check_options("add_positional", offset, dropout_p)
    if dropout_p == 0.0 and offsets is None and x.dtype == table.dtype:  # one pass in plain PyTorch already
        return (x + table[offset : offset + x.shape[-2]]).contiguous()
    backend = backends.resolve("add_positional", x.device, x.dtype)
    if backend == "reference":
        return reference.embedding.add_positional(x, table, offset if offsets is None else offsets, dropout_p, seed)
    return implementation("add_positional", backend)(x, table, offset, offsets, dropout_p, seed)


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
    plain = eager.is_plain(table) and not backends.in_transform()
    if not plain or backends.choose("embedding", table.device, table.dtype)[0] == "reference":
        return reference.embedding.positional_table(length, d_model)
    torch.ops.transformer_fast.fill_positional_table(table)
    return table


def _check_ids_and_weight(ids: Tensor, weight: Tensor) -> None:
    for name, t in (("ids", ids), ("weight", weight)):
        if not isinstance(t, Tensor):
            raise TypeError(f"embed: {name} must be a tensor, got {type(t).__name__}")
    if ids.dtype != torch.int64 and ids.dtype != torch.int32:
        raise TypeError(f"embed: ids must be int64 or int32, got {ids.dtype}")
    if not weight.is_floating_point():
        raise TypeError(f"embed: weight must be a float tensor, got {weight.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"embed: weight must be (vocabulary, d), got shape {tuple(weight.shape)}")
    if ids.device != weight.device:
        raise ValueError(f"embed: weight is on {weight.device} but ids on {ids.device}")


def _check_table(op: str, table: Tensor, name: str, x: Tensor, offset: int, length: int) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(f"{op}: table must be a tensor, got {type(table).__name__}")
    if table.dtype != torch.float32 and table.dtype != x.dtype:
        raise TypeError(f"{op}: table must be float32 or the dtype of {name}, {x.dtype}; got {table.dtype}")
    if table.dim() != 2 or table.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: table must be (positions, d) with the d = {x.shape[-1]} of {name}, got shape {tuple(table.shape)}"
        )
    if table.device != x.device:
        raise ValueError(f"{op}: {name} is on {x.device} but table on {table.device}")
    if table.shape[0] < offset + length:
        raise ValueError(
            f"{op}: table is too short: offset {offset} + length {length} needs {offset + length} positions, "
            f"it has {table.shape[0]}"
        )


def _split_offset(
    op: str, offset: int | Tensor, name: str, x: Tensor, sequences: torch.Size
) -> tuple[int, Tensor | None]:
    """Split an offset into an int and a tensor with one additional offset per sequence, or None."""
    refuse_torchscript(op)
    if not isinstance(offset, Tensor):
        check_int(op, "offset", offset, "an int or a tensor")
        return offset, None
    if offset.dtype != torch.int64 and offset.dtype != torch.int32:
        raise TypeError(f"{op}: an offset tensor must be int64 or int32, got {offset.dtype}")
    if offset.shape != sequences:
        raise ValueError(
            f"{op}: an offset tensor must hold one number for each sequence, {tuple(sequences)} for {name} "
            f"{tuple(x.shape)}, got shape {tuple(offset.shape)}"
        )
    if offset.device != x.device:
        raise ValueError(f"{op}: {name} is on {x.device} but offset on {offset.device}")
    return 0, offset


def _check_options(op: str, offset: int, dropout_p: float) -> None:
    if offset < 0:
        raise ValueError(f"{op}: offset must be at least 0, got {offset}")
    check_number(op, "dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{op}: dropout_p must lie in [0, 1], got {dropout_p}")


def _deterministic() -> bool:
    return configs.EMBEDDING_GRADIENT == "sorted" or torch.are_deterministic_algorithms_enabled()


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
