"""RMSNorm as users write it, in plain PyTorch, which accelerate must recognise or leave."""

from __future__ import annotations

import handwritten as hw
import torch
from form_arguments import ONE, OWN, TWO, D, Forms
from handwritten_texts import encoder
from torch import Tensor, nn


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(dtype)


class T5LayerNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class ScaledRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.scale = eps, nn.Parameter(torch.rand(dim) + 0.5)

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).type_as(x) * self.scale


class RMSNormEpsOutside(ScaledRMSNorm):
    """RMSNorm of the first implementations, with eps outside the root, which changes small rows only."""

    def norm(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class RMSNormOnePlus(ScaledRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).type_as(x) * (1 + self.scale)


def with_rms(m: nn.Module, norm: type[nn.Module] = LlamaRMSNorm) -> nn.Module:
    """Return a model of The Annotated Transformer with RMSNorm instead of its norms."""
    for part in m.modules():
        if isinstance(getattr(part, "norm", None), hw.AnnotatedNorm):
            part.norm = norm(part.norm.a_2.shape[0])
    return m


FORMS: Forms = {
    "Llama's norm": (lambda: LlamaRMSNorm(D), ONE),
    "T5's norm": (lambda: T5LayerNorm(D), ONE),
    "rms norm with a scale": (lambda: ScaledRMSNorm(D), ONE),
    "rms sublayer": (lambda: with_rms(hw.Sublayer(D, 0.1)), TWO),
    "rms sublayer of torch": (lambda: with_rms(hw.Sublayer(D, 0.1), nn.RMSNorm), TWO),
    "post-norm rms sublayer": (lambda: with_rms(hw.PostSublayer(D, 0.1)), TWO),
    "rms encoder": (lambda: with_rms(encoder(3), T5LayerNorm), OWN),
}
