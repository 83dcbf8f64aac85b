"""Linear layers with int8 weights, for decoding on a CPU.

Each row of the weights, and each row of the input, is quantised to integers from -127 to 127 with its own scale:
symmetric quantisation by the greatest magnitude. Products and sums of the integers are exact. So the result of a row
depends neither on other rows nor on the order of the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows: x is about ``q * scale``.

    Args:
        x: (rows, n), fp32.

    Returns:
        q: int8 (rows, n), rounded to nearest, ties to even; the greatest magnitude of a row becomes 127.
        scale: fp32 (rows,): that magnitude over 127. NaN for a row that is not finite; 0 for a row whose magnitude over
            127 is too small to divide by (below 4e-37). In both cases q = 0.
    """
    greatest = x.abs().amax(dim=1)
    factor = torch.tensor(127.0) / greatest  # a division of a Python number by a tensor would round twice
    usable = greatest.isfinite() & factor.isfinite()
    q = (x * factor[:, None]).round().where(usable[:, None], 0).to(torch.int8)
    return q, (greatest / 127).where(usable, 0).where(greatest.isfinite(), torch.nan)


def int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias``, with both factors quantised by :func:`quantize_rows`.

    Args:
        x: (..., in), fp32.
        weight: (out, in), fp32.
        bias: (out,), fp32, or None.

    Returns:
        (..., out), fp32: the integers' sum times the product of the two scales, plus bias, each rounded once. An output
        is NaN where its weights or its row are not finite.
    """
    rows, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    outputs, output_scale = quantize_rows(weight)
    sums = (rows.double() @ outputs.double().T).float()  # exact in fp64
    out = sums * (row_scale[:, None] * output_scale)
    out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], weight.shape[0])
