"""Masked attention, backward: weights are computed again from the logsumexp, tile by tile.

Method: T. Dao, "FlashAttention-2", 2023, section 3.1.2, as three kernels: delta (one number a row), the gradient of q
(both in :mod:`.backward_q`), and the gradients of k and v (:mod:`.backward_kv`).
Every sum has one owner and one order: two runs agree bit for bit.
"""

import torch
from torch import Tensor

from ..launcher import Launch, architecture_of, blocks_of, empties_like, widen_bf16_if_interpreted
from .backward_kv import DELTA_ROWS, grad_kv_kernel
from .backward_q import delta_kernel, grad_q_kernel
from .launches import (
    Packed,
    Plan,
    packed_mask,
    packed_view,
    planned,
    run_call,
    tile_launch,
)
from .tiles import padded_head_dim, positive_scale, tensor_arguments, within_reach


def delta_arguments(grad_out: Tensor, out: Tensor) -> dict[str, object]:
    """The arguments of the delta kernel that are no tensors."""
    _, H, Lq, D = out.shape
    arguments = {
        "heads": H,
        "queries": Lq,
        "HEAD_DIM": D,
        "BLOCK_D": padded_head_dim(out.shape[-1]),
        "ROWS": DELTA_ROWS,
    }
    strides = tensor_arguments(grad_out=grad_out, out=out)
    return arguments | {name: value for name, value in strides.items() if not isinstance(value, Tensor)}


def row_buffers(grad_rows: Tensor, logsumexp: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the kernels of one call leave for each other: delta, which tiles of rows have empty ones, sums of weights.

    `grad_rows` is grad_out as (B, H, Lq, D), or (1, H, Tq, D) of a packed batch.
    """
    B, H, Lq, _ = grad_rows.shape
    empty_tiles = torch.empty(blocks_of(Lq, DELTA_ROWS) * B * H, dtype=torch.int32, device=grad_rows.device)
    # What 16-bit types cannot show is not corrected.
    if grad_rows.dtype == torch.float32 or bias is not None:
        delta, sums = empties_like(logsumexp, logsumexp)
        return delta, empty_tiles, sums
    return torch.empty_like(logsumexp), empty_tiles, None


def backward_launches(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, logsumexp: Tensor, rows: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor], buffers: tuple[Tensor, Tensor, Tensor | None], arch: str,
    mask: dict[str, object], grad_logsumexp: Tensor | None = None, packed: Packed | None = None,
) -> list[Launch]:  # fmt: skip
    """The three launches that fill `gradients` by way of :func:`row_buffers`. `mask` is what
    :func:`attention_backward` is given; `rows` are all rows of grad_out and out as (B, H, Lq, D), or (1, H, Tq, D) of
    a packed batch."""
    grad_q, grad_k, grad_v = gradients
    whole, out = rows
    delta, empty_tiles, sums = buffers
    grid = empty_tiles.shape[0]
    inputs = {"grad_out": grad_out, "q": q, "k": k, "v": v}
    statistics = {"logsumexp": logsumexp, "delta": delta}
    plan = planned(
        ("delta", q.dtype, whole.shape, whole.stride(), out.stride()),
        lambda: Plan(
            f"attention delta {str(q.dtype)[6:]} d{padded_head_dim(q.shape[-1])}", grid, delta_arguments(whole, out)
        ),
    )
    return [
        Launch(
            plan.name,
            delta_kernel,
            plan.grid,
            {
                **plan.arguments, **statistics, "grad_out": whole, "out": out, "grad_logsumexp": grad_logsumexp,
                "empty_tiles": empty_tiles,
            },
            num_warps=4,
            num_stages=1,
        ),
        tile_launch(
            "grad_q", grad_q_kernel, q, k, arch, inputs | {"grad_q": grad_q},
            statistics | {"sums": sums, "grad_logsumexp": grad_logsumexp}, mask, packed,
        ),
        tile_launch(
            "grad_kv", grad_kv_kernel, q, k, arch, inputs | {"grad_k": grad_k, "grad_v": grad_v},
            statistics | {"sums": sums, "empty_tiles": empty_tiles}, mask, packed,
        ),
    ]  # fmt: skip


@widen_bf16_if_interpreted(results=3)
def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    keep: Tensor | None,
    key_keep: Tensor | None,
    lengths: Tensor | None,
    bias: Tensor | None,
    causal: int | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | int | None,
    zero_empty_rows: bool,
    grad_logsumexp: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`~.forward.attention_forward` by Triton.

    Args:
        grad_out: (B, H, Lq, D), the gradient of out; any strides.
        q, k, v and the rest: as given to the forward launcher.
        out, logsumexp: as it returned them.
        grad_logsumexp: (B, H, Lq) fp32, the gradient of logsumexp, or None. A row without keys takes none.

    Returns:
        Gradients of q (B, H, Lq, D), k and v (B, Hkv, Lk, D), in their dtypes. Bitwise equal from run to run.
    """
    gradients = empties_like(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return tuple(t.zero_() for t in gradients)
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if grad_logsumexp is not None:
        grad_logsumexp = grad_logsumexp.contiguous()
    mask = {
        "keep": keep, "key_keep": key_keep, "lengths": lengths, "bias": bias, "causal": causal, "scale": scale,
        "dropout_p": dropout_p, "seed": seed, "zero_empty_rows": zero_empty_rows,
    }  # fmt: skip
    inputs = grad_out, q, k, v, out, logsumexp, grad_logsumexp
    outputs = (*gradients, *row_buffers(grad_out, logsumexp, bias))
    run_call(("attention backward",), inputs, outputs, k.shape[2], mask, None, _backward_call)
    return _signed(gradients, scale)


def _backward_call(inputs, outputs, mask: dict[str, object], packed: Packed | None) -> list[Launch]:
    grad_out, q, k, v, out, logsumexp, grad_logsumexp = inputs
    grad_out, q, k, v = map(within_reach, (grad_out, q, k, v))
    q, scale, _ = positive_scale(q, mask["scale"])
    tensors = grad_out, q, k, v, logsumexp, (grad_out, out), outputs[:3], outputs[3:]
    return backward_launches(*tensors, architecture_of(q), mask | {"scale": scale}, grad_logsumexp)


def _signed(gradients: tuple[Tensor, Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, where the kernels had q times the sign of the scale."""
    grad_q, grad_k, grad_v = gradients
    return (grad_q if scale > 0 else grad_q * (-1.0 if scale < 0 else 0.0)), grad_k, grad_v


@widen_bf16_if_interpreted(results=3)
def attention_packed_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | int | None,
    zero_empty_rows: bool,
    grad_logsumexp: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`~.forward.attention_packed_forward` by the kernels of :func:`attention_backward`.

    Args:
        grad_out: (Tq, H, D), the gradient of out; any strides.
        q, k, v and the rest: as given to the forward launcher.
        out, logsumexp: as it returned them.
        grad_logsumexp: (H, Tq) fp32, the gradient of logsumexp, or None.

    Returns:
        Gradients of q (Tq, H, D), k and v (Tk, Hkv, D), in their dtypes. Bitwise equal from run to run.
    """
    gradients = empties_like(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return tuple(t.zero_() for t in gradients)
    B, total = cu_seqlens_q.shape[0] - 1, q.shape[0]
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if grad_logsumexp is not None:
        grad_logsumexp = grad_logsumexp.contiguous()
    mask = packed_mask(causal, scale, dropout_p, seed, zero_empty_rows)

    def launches(inputs, outputs, mask: dict[str, object], packed: Packed | None) -> list[Launch]:
        grad_out, q, k, v, out, logsumexp, grad_logsumexp = inputs
        q, scale, _ = positive_scale(q, mask["scale"])
        mask = mask | {"scale": scale}
        rows = packed_view(grad_out, 1, total), packed_view(out, 1, total)
        grad_out, q, grad_q = (packed_view(t, B, max_q) for t in (grad_out, q, outputs[0]))
        k, v, grad_k, grad_v = (packed_view(t, B, max_k) for t in (k, v, *outputs[1:3]))
        tensors = grad_out, q, k, v, logsumexp, rows, (grad_q, grad_k, grad_v), outputs[3:]
        return backward_launches(*tensors, architecture_of(q), mask, grad_logsumexp, packed)

    inputs = grad_out, q, k, v, out, logsumexp, grad_logsumexp
    outputs = (*gradients, *row_buffers(grad_out.transpose(0, 1).unsqueeze(0), logsumexp, None))
    packed = Packed(cu_seqlens_q, cu_seqlens_k, total)
    name = "attention packed backward", max_q, max_k
    run_call(name, inputs, outputs, max_k, mask, packed, launches)
    return _signed(gradients, scale)
