"""Linear layers with int8 weights, for decoding on a CPU.

Each row of the weights, and each row of the input, is quantised to integers from -127 to 127 with its own scale:
symmetric quantisation by the greatest magnitude. Products and sums of the integers are exact. So the result of a row
depends neither on other rows nor on the order of the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rational approximations x P(x^2) / Q(x^2) of erf and tanh to a few ulps, highest power first, from Eigen
# (unsupported/Eigen/src/SpecialFunctions and Eigen/src/Core/MathFunctionsImpl.h).
ERF = (
    (
        *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
        *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
    ),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02),
)
TANH = (
    (
        *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
        *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
    ),
    (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)


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


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """``F.gelu`` in fp32, to about two ulps of x: the activation of the kernel, with the same bits.

    Args:
        x: fp32, any shape.
        approximate: "none", or "tanh" for the tanh in place of erf.

    Returns:
        fp32, the shape of x.
    """
    if approximate == "tanh":
        return _gate(x, (x * x * 0.044715 * x + x) * 0.797884561, 9.0, *TANH)
    return _gate(x, x * 0.707106781, 4.0, *ERF)


def _gate(x: Tensor, u: Tensor, most: float, over: tuple[float, ...], under: tuple[float, ...]) -> Tensor:
    """x (1 + f(u)) / 2 for an odd rational function f, constant beyond ``most``."""
    u = u.clamp(-most, most)
    square = u * u
    return x * (u * _polynomial(square, over) / _polynomial(square, under) * 0.5 + 0.5)


def _polynomial(x: Tensor, terms: tuple[float, ...]) -> Tensor:
    p = torch.full_like(x, terms[0])
    for term in terms[1:]:
        p = p * x + term
    return p
