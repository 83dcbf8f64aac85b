"""Output layers that run on tokens alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...huggingface.heads import logits_of_tokens
from ...huggingface.logits import TokensHead
from ...layers.linear import Linear
from ..output_layer import OutputLayer
from ..registered import registered_class


@functools.cache
def tokens_head(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Class for an output layer whose logits may be those of tokens; None for a class that is not linear, or one that
    this function has made."""
    if kind not in (nn.Linear, Linear, OutputLayer):
        return None
    made = registered_class(kind, (TokensHead, kind), (tokens_head,), _forward(kind.forward))
    made.skips_logits = kind is OutputLayer  # type: ignore[attr-defined]
    return made


def _forward(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return logits_of_tokens(plain(self, *args, **kwargs))

    return forward
