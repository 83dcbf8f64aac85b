"""Forms of calls of torch's dropout in modules, which accelerate must find and redirect."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as imported
from torch.utils.checkpoint import checkpoint


class Calls(nn.Module):
    """Module in which one name is torch's function and an attribute of the module."""

    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.dropout = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=self.dropout, training=self.training)


class FullName(Calls):
    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout
        return nn.functional.dropout(x, dropout, self.training) if dropout > 0 else x


class ByName(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return imported(x, self.dropout, self.training)


class Builtin(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x, self.dropout, train=self.training)


class Inside(Calls):
    def forward(self, x: Tensor) -> Tensor:
        def run(y: Tensor) -> Tensor:
            return imported(y, self.dropout, self.training)

        return checkpoint(run, x, use_reentrant=False)


class Held(Calls):
    def __init__(self) -> None:
        super().__init__()
        self.drop = F.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x, self.dropout, self.training)


def helper(x: Tensor, module: Calls) -> Tensor:
    return F.dropout(x, module.dropout, module.training)


class Helper(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x, self)


FORMS = (Calls, FullName, ByName, Builtin, Inside, Held, Helper)


class Both(nn.Module):
    """Two of torch's functions in one class, one of them in two methods."""

    p = 0.4

    def attend(self, q: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return shared(attended, self.p if self.training else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.attend(x.unflatten(-1, (4, -1)).transpose(0, 1)), self.p, self.training)


def shared(q: Tensor, p: float) -> Tensor:
    return F.scaled_dot_product_attention(F.dropout(q, p), q, q)


class OnlyDropout(Calls):
    """Class that shares a function with one that calls both, and is replaced on its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def other(self, q: Tensor) -> Tensor:
        return shared(q, self.dropout)


class SuperDropout(Both):
    def attend(self, q: Tensor) -> Tensor:
        return q * 2

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(0, 1)
        return F.scaled_dot_product_attention(q, q, q) + super().forward(x)
