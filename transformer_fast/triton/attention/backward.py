"""Masked attention, backward: weights are computed again from the logsumexp, tile by tile.

Method: T. Dao, "FlashAttention-2", 2023, section 3.1.2, as three kernels: delta (one number a row), the gradient of q
(both in :mod:`.backward_q`), and the gradients of k and v (:mod:`.backward_kv`).
Every sum has one owner and one order: two runs agree bit for bit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...attention_params import AttentionParams
from ..launcher import Launch, architecture_of, blocks_of, empties_like, widen_bf16_if_interpreted
from .backward_kv import DELTA_ROWS, grad_kv_kernel
from .backward_q import delta_kernel, grad_q_kernel
from .launches import kernel_views, packed_view, run_call, tile_launch
from .tiles import changes_scores, padded_head_dim, positive_scale, tensor_arguments, within_reach


def row_buffers(q: Tensor, logsumexp: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the kernels of one call leave for each other: delta, which tiles of rows have empty ones, sums of weights.

    `logsumexp` is (B, H, Lq), or (H, Tq) of a packed batch.
    """
    rows = logsumexp.shape[-1]
    tiles = blocks_of(rows, DELTA_ROWS) * (logsumexp.numel() // rows)
    empty_tiles = torch.empty(tiles, dtype=torch.int32, device=logsumexp.device)
    # What 16-bit types cannot show is not corrected.
    if q.dtype == torch.float32 or changes_scores(params):
        delta, sums = empties_like(logsumexp, logsumexp)
        return delta, empty_tiles, sums
    return torch.empty_like(logsumexp), empty_tiles, None


def backward_launches(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...], params: AttentionParams,
    arch: str | None = None,
) -> list[Launch]:  # fmt: skip
    """The three launches from :func:`attention_backward`'s tensors to the gradients, by way of :func:`row_buffers`.

    Args:
        inputs: grad_out, q, k, v, out, logsumexp, grad_logsumexp.
        outputs: the gradients of q, k and v, and the buffers.
        params: as given to the launcher.
        arch: architecture class; None for that of q's GPU.
    """
    grad_out, q, k, v, out, logsumexp, grad_logsumexp = inputs
    grad_q, grad_k, grad_v, delta, empty_tiles, sums = outputs
    q, scale, _ = positive_scale(q, params.scale)
    params = replace(params, scale=scale)
    if params.packed is None:
        all_grad_out, all_out = within_reach(grad_out), within_reach(out)
    else:
        all_grad_out, all_out = (packed_view(t, 1, t.shape[0]) for t in (grad_out, out))
    grad_out, q, k, v = kernel_views(params, (grad_out, q), (k, v))
    grad_q, grad_k, grad_v = kernel_views(params, (grad_q,), (grad_k, grad_v), written=True)
    arch = architecture_of(q) if arch is None else arch
    tensors = {"grad_out": grad_out, "q": q, "k": k, "v": v}
    rows = {"logsumexp": logsumexp, "delta": delta}
    D = q.shape[-1]
    return [
        Launch(
            f"attention delta {str(q.dtype)[6:]} d{padded_head_dim(D)}",
            delta_kernel,
            empty_tiles.shape[0],
            {
                **tensor_arguments(grad_out=all_grad_out, out=all_out), **rows, "grad_logsumexp": grad_logsumexp,
                "empty_tiles": empty_tiles, "heads": all_out.shape[1], "queries": all_out.shape[2],
                "HEAD_DIM": D, "BLOCK_D": padded_head_dim(D), "ROWS": DELTA_ROWS,
            },
            num_warps=4,
            num_stages=1,
            fuse=False,  # lanes that hold one row's sum twice would round it in two ways
        ),
        tile_launch(
            "grad_q", grad_q_kernel, q, k, arch, tensors | {"grad_q": grad_q},
            rows | {"sums": sums, "grad_logsumexp": grad_logsumexp}, params,
        ),
        tile_launch(
            "grad_kv", grad_kv_kernel, q, k, arch, tensors | {"grad_k": grad_k, "grad_v": grad_v},
            rows | {"sums": sums, "empty_tiles": empty_tiles}, params,
        ),
    ]  # fmt: skip


@widen_bf16_if_interpreted(results=3)
def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, params: AttentionParams,
    grad_logsumexp: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of :func:`~.forward.attention_forward` by Triton.

    Args:
        grad_out: the gradient of out; any strides.
        q, k, v, params: as given to the forward launcher.
        out, logsumexp: as it returned them.
        grad_logsumexp: fp32, the gradient of logsumexp, or None. A row without keys takes none.

    Returns:
        Gradients of q, k and v, in their shapes and dtypes. Bitwise equal from run to run.
    """
    gradients = empties_like(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return tuple(t.zero_() for t in gradients)
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if grad_logsumexp is not None:
        grad_logsumexp = grad_logsumexp.contiguous()
    keys = k.shape[2] if params.packed is None else params.packed.max_k
    inputs = grad_out, q, k, v, out, logsumexp, grad_logsumexp
    outputs = (*gradients, *row_buffers(q, logsumexp, params))
    run_call("attention backward", inputs, outputs, keys, params, backward_launches)
    # The kernels had q times the sign of the scale.
    grad_q, grad_k, grad_v = gradients
    return (grad_q if params.scale > 0 else grad_q * (-1.0 if params.scale < 0 else 0.0)), grad_k, grad_v
