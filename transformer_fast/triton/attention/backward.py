"""Masked attention, backward: recomputes the weights from the logsumexp, tile by tile.

Method: T. Dao, "FlashAttention-2", 2023, section 3.1.2, in several kernels. The first kernel (:mod:`.backward_q`)
computes the gradient of q, and delta (one number per row). The others read delta: :mod:`.backward_kv` computes the
gradients of k and v, :mod:`.grad_bias` and :mod:`.grad_distance_bias` those of the biases. One program computes each
sum, in a fixed order, so two runs agree bit for bit.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention_params import AttentionParams
from ..launch_cache import run_kept
from ..launcher import Launch, architecture_of, blocks_of, contiguous, empties_like, widen_bf16_if_interpreted
from .backward_kv import grad_kv_kernel
from .backward_q import grad_q_kernel
from .dropout_bits import check_words
from .grad_bias import grad_bias_launch, part_sums
from .grad_distance_bias import diagonal_sums, distance_gradient, grad_distance_bias_launch
from .launches import MAP_TENSORS, is_empty, kernel_views, tile_launch
from .steps import FLAG_ROWS
from .tile_map import bits_arguments
from .tiles import changes_scores, mask_arguments, positive_scale, sequence_arguments, tensor_arguments


def row_buffers(q: Tensor, logsumexp: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor, Tensor | None]:
    """Buffers that the grad_q kernel fills for the others: delta, flags of rows without keys, sums of weights.

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
    """The kernel launches of :func:`attention_backward`; the first fills :func:`row_buffers` for the others.

    Args:
        inputs: grad_out, q, k, v, out, logsumexp, grad_logsumexp, dropout_bits.
        outputs: the gradients of q, k and v, buffers of the gradients of bias and distance bias, and the row buffers.
            None for the gradients that are not needed; not for that of q.
        params: as given to the launcher.
        arch: architecture class; None for that of q's GPU.
    """
    grad_out, q, k, v, out, logsumexp, grad_logsumexp, dropout_bits = inputs
    grad_q, grad_k, grad_v, bias_sums, distance_sums, delta, empty_flags, sums = outputs
    q, scale = positive_scale(q, params.scale)
    params, stored = replace(params, scale=scale), k
    grad_out, q, out, k, v = kernel_views(params, (grad_out, q, out), (k, v))
    (grad_q,) = kernel_views(params, (grad_q,), (), written=True)
    arch = architecture_of(q) if arch is None else arch
    tensors = {"grad_out": grad_out, "q": q, "k": k, "v": v}
    rows = {"logsumexp": logsumexp, "delta": delta, "sums": sums, "empty_flags": empty_flags}
    launches = [
        tile_launch(
            "grad_q", grad_q_kernel, q, k, arch, tensors | {"out": out, "grad_q": grad_q},
            rows | {"grad_logsumexp": contiguous(grad_logsumexp)}, params, stored, dropout_bits,
        )
    ]  # fmt: skip
    if grad_k is not None and grad_v is not None:
        grad_k, grad_v = kernel_views(params, (), (grad_k, grad_v), written=True)
        written = {"grad_k": grad_k, "grad_v": grad_v}
        launches.append(
            tile_launch("grad_kv", grad_kv_kernel, q, k, arch, tensors | written, rows, params, stored, dropout_bits)
        )
    if bias_sums is not None or distance_sums is not None:
        arguments = tensor_arguments(**tensors) | mask_arguments(q, k, params) | rows
        arguments |= bits_arguments(params.keep, params.key_keep) | sequence_arguments(params, logsumexp, stored)
    if bias_sums is not None and bias_sums.numel() > 0:
        launches.append(grad_bias_launch(q, k, arguments, bias_sums, params))
    if distance_sums is not None:
        launches.append(grad_distance_bias_launch(q, arguments, distance_sums, params))
    return launches


class Needs(NamedTuple):
    """Needed gradients besides that of q: of k and v, of the bias, and of the bias by distance."""

    keys: bool = True
    bias: bool = False
    distance_bias: bool = False


def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, params: AttentionParams,
    grad_logsumexp: Tensor | None = None, dropout_bits: Tensor | None = None, needs: tuple[bool, ...] = Needs(),
    call: Any = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of :func:`~.forward.attention_forward` by Triton.

    Args:
        grad_out: the gradient of out; any strides.
        q, k, v, params: as given to the forward launcher; a bias of shape (B|1, H|1, Lq|1, Lk|1), or packed
            (H|1, pairs).
        out, logsumexp: as it returned them.
        grad_logsumexp: fp32, the gradient of logsumexp, or None. The gradient of a row without keys is ignored.
        dropout_bits: result of the forward launcher; None makes the kernels draw the dropout again.
        needs: :class:`Needs`.
        call: see :func:`..launch_cache.run_kept`.

    Returns:
        Gradients of q, k, v, bias and distance bias, in their shapes and dtypes; None for those that are not needed.
        The last two are contiguous, summed in fp32, and 0 where the bias is -inf and from rows without keys. Bitwise
        equal from run to run.
    """
    *gradients, bias, distance_bias = _attention_backward(
        grad_out, q, k, v, out, logsumexp, params, grad_logsumexp, dropout_bits, Needs(*needs), call
    )
    return *gradients, None if bias is None else bias.to(params.bias.dtype), distance_bias


@widen_bf16_if_interpreted(results=3)
def _attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, params: AttentionParams,
    grad_logsumexp: Tensor | None, dropout_bits: Tensor | None, needs: Needs, call: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if dropout_bits is not None:
        check_words("dropout_bits", dropout_bits.numel(), q, k, params, architecture_of(q))
    grad_q, grad_k, grad_v = empties_like(q, k, v) if needs.keys else (torch.empty_like(q), None, None)
    bias = params.bias if needs.bias else None
    distance_bias = params.distance_bias if needs.distance_bias else None
    if is_empty(q, k, params):
        learned = (None if t is None else t.new_zeros(t.shape) for t in (bias, distance_bias))
        return *(None if t is None else t.zero_() for t in (grad_q, grad_k, grad_v)), *learned
    bias_sums = None if bias is None else part_sums(*kernel_views(params, (q,), (k,)), params)
    distance_sums = None if distance_bias is None else diagonal_sums(q, k, params)
    inputs = grad_out, q, k, v, out, logsumexp, grad_logsumexp, dropout_bits
    outputs = grad_q, grad_k, grad_v, bias_sums, distance_sums, *row_buffers(q, logsumexp, params)
    run_kept(call, outputs, lambda: backward_launches(inputs, outputs, params), MAP_TENSORS)
    # The kernels read q times the sign of the scale.
    if params.scale <= 0:
        grad_q = grad_q * (-1.0 if params.scale < 0 else 0.0)
    if bias_sums is not None:
        bias = bias_sums[0] if len(bias_sums) == 1 else bias_sums.sum(0)
    if distance_sums is not None:
        distance_bias = distance_gradient(distance_sums, q, k, params)
    return grad_q, grad_k, grad_v, bias, distance_bias
