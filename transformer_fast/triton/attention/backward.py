"""Masked attention, backward: recomputes the weights from the logsumexp, tile by tile.

Method: T. Dao, "FlashAttention-2", 2023, section 3.1.2, as two kernels. The first kernel (:mod:`.backward_q`) computes
    the gradient of q, and delta (one number per row). The second kernel (:mod:`.backward_kv`) reads delta and computes
    the gradients of k and v. One program computes each sum, in a fixed order, so two runs agree bit for bit.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...attention_params import AttentionParams
from ..launch_cache import run_kept
from ..launcher import Launch, architecture_of, blocks_of, empties_like, widen_bf16_if_interpreted
from .backward_kv import grad_kv_kernel
from .backward_q import grad_q_kernel
from .launches import MAP_TENSORS, contiguous, is_empty, kernel_views, tile_launch
from .steps import FLAG_ROWS
from .tiles import changes_scores, positive_scale


def row_buffers(q: Tensor, logsumexp: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor, Tensor | None]:
    """Buffers that the grad_q kernel fills for the grad_kv kernel: delta, flags of rows without keys, sums of weights.

    `logsumexp` is (B, H, Lq), or (H, Tq) of a packed batch.
    """
    rows, a_flag = logsumexp.shape[-1], FLAG_ROWS.value
    if params.packed is None:
        flags = logsumexp.numel() // rows * blocks_of(rows, a_flag)
    else:
        flags = logsumexp.shape[0] * (rows // a_flag + params.packed.cu_seqlens_q.shape[0] - 1)
    empty_flags = torch.empty(flags, dtype=torch.int32, device=logsumexp.device)
    # Corrections below the precision of 16-bit types are skipped.
    if q.dtype == torch.float32 or changes_scores(params):
        delta, sums = empties_like(logsumexp, logsumexp)
        return delta, empty_flags, sums
    return torch.empty_like(logsumexp), empty_flags, None


def backward_launches(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...], params: AttentionParams,
    arch: str | None = None,
) -> list[Launch]:  # fmt: skip
    """The two kernel launches of :func:`attention_backward`, which communicate by :func:`row_buffers`.

    Args:
        inputs: grad_out, q, k, v, out, logsumexp, grad_logsumexp, kept_bits.
        outputs: the gradients of q, k and v, and the buffers.
        params: as given to the launcher.
        arch: architecture class; None for that of q's GPU.
    """
    grad_out, q, k, v, out, logsumexp, grad_logsumexp, kept_bits = inputs
    grad_q, grad_k, grad_v, delta, empty_flags, sums = outputs
    q, scale, _ = positive_scale(q, params.scale)
    params, stored = replace(params, scale=scale), k
    grad_out, q, out, k, v = kernel_views(params, (grad_out, q, out), (k, v))
    grad_q, grad_k, grad_v = kernel_views(params, (grad_q,), (grad_k, grad_v), written=True)
    arch = architecture_of(q) if arch is None else arch
    tensors = {"grad_out": grad_out, "q": q, "k": k, "v": v}
    rows = {"logsumexp": logsumexp, "delta": delta, "sums": sums, "empty_flags": empty_flags}
    return [
        tile_launch(
            "grad_q", grad_q_kernel, q, k, arch, tensors | {"out": out, "grad_q": grad_q},
            rows | {"grad_logsumexp": contiguous(grad_logsumexp)}, params, stored, kept_bits,
        ),
        tile_launch(
            "grad_kv", grad_kv_kernel, q, k, arch, tensors | {"grad_k": grad_k, "grad_v": grad_v}, rows, params,
            stored, kept_bits,
        ),
    ]  # fmt: skip


@widen_bf16_if_interpreted(results=3)
def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, params: AttentionParams,
    grad_logsumexp: Tensor | None = None, kept_bits: Tensor | None = None, call: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of :func:`~.forward.attention_forward` by Triton.

    Args:
        grad_out: the gradient of out; any strides.
        q, k, v, params: as given to the forward launcher.
        out, logsumexp: as it returned them.
        grad_logsumexp: fp32, the gradient of logsumexp, or None. The gradient of a row without keys is ignored.
        kept_bits: result of the forward launcher; None makes the kernels draw the dropout again.
        call: see :func:`..launch_cache.run_kept`.

    Returns:
        Gradients of q, k and v, in their shapes and dtypes. Bitwise equal from run to run.
    """
    gradients = empties_like(q, k, v)
    if is_empty(q, k, params):
        return tuple(t.zero_() for t in gradients)
    inputs = grad_out, q, k, v, out, logsumexp, grad_logsumexp, kept_bits
    outputs = (*gradients, *row_buffers(q, logsumexp, params))
    run_kept(call, outputs, lambda: backward_launches(inputs, outputs, params), MAP_TENSORS)
    # The kernels read q times the sign of the scale.
    grad_q, grad_k, grad_v = gradients
    return (grad_q if params.scale > 0 else grad_q * (-1.0 if params.scale < 0 else 0.0)), grad_k, grad_v
