"""Stacks of transformers that compute tokens alone, by the way in which their models are written."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..layers.padded_calls import StaysPaddedError
from ..masks.packing import take
from .blocks import Fast
from .door import Stack, at_tokens
from .tokens import Boundaries, flat


class _WithEmbedding(Stack):
    """A stack that makes its masks itself. A mask of four dimensions it takes as it is, and reads nothing of it."""

    inputs = ("input_ids", "inputs_embeds")
    makes_masks = True

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        theirs, own = vars(sys.modules["transformers.masking_utils"]), vars(sys.modules[self._former.kind.__module__])
        if any(name in own and own[name] is not theirs.get(name) for name in _MASKS):
            raise StaysPaddedError("a function that makes its masks was replaced")

    def _changes(self, given: dict[str, Any], boundaries: Boundaries) -> dict[str, Any]:
        return super()._changes(given, boundaries) | {"attention_mask": _no_mask(boundaries.own.cu_seqlens.device)}


_MASKS = (
    "create_causal_mask", "create_bidirectional_mask", "create_sliding_window_causal_mask",
    "create_bidirectional_sliding_window_mask", "create_masks_for_generate",
)  # fmt: skip
"""Functions of transformers that make masks."""


@functools.cache
def _no_mask(device: torch.device) -> Tensor:
    """Mask (1, 1, 1, 1) that hides nothing."""
    with torch.inference_mode(False):
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


class Encoder(Stack):
    """Layers of an encoder like BERT's, which get hidden states."""

    unread = ("position_ids", "token_type_ids")

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        if getattr(self.settings, "chunk_size_feed_forward", 0):
            raise StaysPaddedError("its feed-forward network computes chunks (chunk_size_feed_forward)")

    def attentions(self) -> Iterator[tuple[Any, Any]]:
        """Attention to the own tokens and to the source, of each layer of a decoder."""
        return ((layer.attention.self, layer.crossattention.self) for layer in self.layer)


class EncoderOfDistilBert(Encoder):
    """DistilBERT's layers, whose stack holds no config."""

    @property
    def settings(self) -> Any:
        """Config of the layers."""
        return self.layer[0].attention.config


class Model(_WithEmbedding):
    """A model with its embedding, and with positions as an argument, like GPT-2's and Llama's."""

    inputs = ("input_ids", "inputs_embeds", "token_type_ids")

    def config_is_causal(self) -> bool:
        return True

    def counts_distances(self) -> bool:
        return getattr(self.config, "sliding_window", None) is not None

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        ropes = getattr(self.config, "rope_parameters", None) or {}
        ropes = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
        if any(rope.get("rope_type") in ("dynamic", "longrope") for rope in ropes):
            raise StaysPaddedError("its rotary positions depend on the length of the batch")
        kinds = getattr(self.config, "layer_types", None)
        for number, layer in enumerate(self._modules.get("layers", ())):
            own = (layer._modules.get("self_attn") or layer._modules.get("attn") or layer).__dict__
            if "sliding_window" in own and kinds is not None and own["sliding_window"] != self.window(kinds[number]):
                raise StaysPaddedError("the sliding window of its config was changed")

    def window(self, kind: str) -> int | None:
        """Sliding window of the layers of a kind, as their attention holds it."""
        return self.config.sliding_window if kind == "sliding_attention" else None

    def makes_cache(self, given: dict[str, Any]) -> bool:
        return _uses_cache(self, given)

    def _changes(self, given: dict[str, Any], boundaries: Boundaries) -> dict[str, Any]:
        own, positions = boundaries.own, given.get("position_ids")
        places = own.positions[None] if positions is None else at_tokens("position_ids", positions, own)
        return super()._changes(given, boundaries) | {"position_ids": places}


class CountedPositions(Model):
    """A :class:`Model` whose positions count the tokens before, like OPT's."""

    def _changes(self, given: dict[str, Any], boundaries: Boundaries) -> dict[str, Any]:
        if given.get("position_ids") is None and (mask := given.get("attention_mask")) is not None:
            given = given | {"position_ids": (mask.cumsum(1) * mask - 1).long()}
        return super()._changes(given, boundaries)


class BidirectionalModel(Model):
    """A :class:`Model` whose tokens see all tokens, like ModernBERT's."""

    def window(self, kind: str) -> int | None:
        """Sliding window of the layers of a kind, as their attention holds it."""
        return None if (size := super().window(kind)) is None else size + 1

    def config_is_causal(self) -> bool:
        return False

    def makes_cache(self, given: dict[str, Any]) -> bool:
        return False


class TextStack(_WithEmbedding):
    """Encoder or decoder with its embedding, whose positions are a module, like BART's."""

    def makes_cache(self, given: dict[str, Any]) -> bool:
        return _uses_cache(self, given)

    def config_is_causal(self) -> bool:
        return "encoder_hidden_states" in self._former.names

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        if not isinstance(self.embed_positions, PositionTable | PositionTableOfIds):
            raise StaysPaddedError("its table of positions is not known")

    def attentions(self) -> Iterator[tuple[Any, Any]]:
        """Attention to the own tokens and to the source, of each layer of a decoder."""
        return ((layer.self_attn, layer.encoder_attn) for layer in self.layers)


class StackOfDistances(_WithEmbedding):
    """Encoder or decoder whose attention adds a bias for each distance, like T5's."""

    def config_is_causal(self) -> bool:
        return bool(self.config.is_decoder)

    def counts_distances(self) -> bool:
        return True

    def makes_cache(self, given: dict[str, Any]) -> bool:
        return self.config_is_causal() and _uses_cache(self, given)

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        if self.training and any(getattr(m, "gradient_checkpointing", False) for m in self.block):
            raise StaysPaddedError("its gradient checkpointing passes on a position bias")
        if any(block._compiled_call_impl is not None for block in self.block):
            raise StaysPaddedError("its layers are compiled, and pass on a position bias")

    def attentions(self) -> Iterator[tuple[Any, Any]]:
        """Attention to the own tokens and to the source, of each layer of a decoder."""
        return ((block.layer[0].SelfAttention, block.layer[1].EncDecAttention) for block in self.block)


class PositionTable(Fast):
    """Table of positions that takes ``position_ids``, like BART's; inside of a :class:`TextStack` those of the
    tokens."""

    def compute(self, first: Any = None, *args: Any, **kwargs: Any) -> Tensor | None:
        stack = flat()
        if stack is None:
            return None
        found = self._former.forward(self, first, position_ids=stack.own.positions)
        return found if found.dim() == 3 else found.unsqueeze(0)


class PositionTableOfIds(Fast):
    """Table of positions that counts the ids that are not padding, like M2M-100's."""

    def compute(self, *args: Any, **kwargs: Any) -> Tensor | None:
        stack = flat()
        if stack is None:
            return None
        ids, embeds = stack.given.get("input_ids"), stack.given.get("inputs_embeds")
        return take(self._former.forward(self, ids, embeds), stack.own).unsqueeze(0)


def _uses_cache(stack: Stack, given: dict[str, Any]) -> bool:
    """Return True if the arguments, or else the config, ask for a cache."""
    use = given.get("use_cache")
    return bool("use_cache" in stack._former.names and (stack.settings.use_cache if use is None else use))
