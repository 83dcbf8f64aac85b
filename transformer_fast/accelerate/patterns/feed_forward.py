"""The patterns of feed-forward networks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...layers.dropout import apply_dropout
from ...layers.feed_forward import linear_relu_dropout
from .base import ANY, DROPOUT, INLINED, LINEAR, Pattern


class FeedForward(Pattern):
    """``second(dropout(relu(first(x))))``."""

    def __init__(self, name: str, first: str, second: str, **others: Any) -> None:
        super().__init__(name)
        self.first, self.second = first, second
        self.parts = {first: LINEAR, second: LINEAR, **others}

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return [(torch.randn(2, 5, getattr(m, self.first).in_features),)]

    def fused_forward(self, m: Any, x: Tensor) -> Tensor:
        return getattr(m, self.second)(linear_relu_dropout(getattr(m, self.first), x, m._modules.get("dropout")))


class ActivatedFeedForward(FeedForward):
    """``second(dropout(activation(first(x))))`` with a module ``activation`` instead of ReLU."""

    def fused_forward(self, m: Any, x: Tensor) -> Tensor:
        inner = m.activation(getattr(m, self.first)(x))
        return getattr(m, self.second)(apply_dropout(m.dropout, inner))


PATTERNS = (
    FeedForward("FeedForward", "linear_1", "linear_2", dropout=DROPOUT),
    ANNOTATED_FEED_FORWARD := FeedForward("AnnotatedFeedForward", "w_1", "w_2", dropout=DROPOUT),
    ActivatedFeedForward("ActivatedFeedForward", "w_1", "w_2", dropout=DROPOUT, activation=ANY),
    FeedForward("D2lFeedForward", "dense1", "dense2", relu=INLINED),
)
KNOWS = (
    (
        "feed-forward network: `linear_1`, `linear_2`; `w_1`, `w_2`; `dense1`, `dense2`",
        "the classic code, The Annotated Transformer, d2l",
    ),
)
