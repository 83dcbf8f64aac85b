"""The patterns of the d2l textbook's attention, blocks and stacks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...dialects import d2l
from ...dialects.common import LAST_WEIGHTS, leave_weights, merge_heads, project_heads
from ...layers.hooks import SCALED_DOT_PRODUCT
from ...layers.linear import apply_linear
from ...masks import AttentionMask
from ...masks.packing import PackedMask
from ...tracing import is_traced
from .attention import packed_heads, padded_weights
from .base import ANY, DROPOUT, EMBEDDING, LINEAR, Part, Pattern, children, parameters_of, swapped_by
from .embedding import D2L_POSITIONAL, embedded, random_ids
from .norm import AddNorm
from .without_padding import through

Lengths = Tensor | AttentionMask | PackedMask | None
NOT_TOLD = "it has no lengths of its targets"
"""Reason why a decoder keeps padding: its masks are the lengths 1 to T."""


def lengths_mask(valid_lens: Lengths, keys: int) -> AttentionMask | PackedMask | None:
    """AttentionMask of lengths (B,) or (B, Lq); a length above the number of keys means all keys."""
    if valid_lens is None or isinstance(valid_lens, AttentionMask | PackedMask):
        return valid_lens
    return d2l.certain_lengths(valid_lens.to(torch.int64).clamp(0, keys), keys)


def some_lengths(queries: int, keys: int) -> tuple[Tensor | None, ...]:
    """Test lengths in the forms that the modules accept."""
    return None, torch.tensor([2, keys + 3]), torch.randint(1, keys + 1, (2, queries))


def some_states(width: int, blocks: int) -> Iterable[list[Any]]:
    """Test states of a decoder, with and without cached inputs."""
    memory, seen = torch.randn(2, 4, width), torch.randn(2, 3, width)
    return [[memory, lengths, [known] * blocks] for lengths, known in zip(some_lengths(5, 4), (None, None, seen))]


class D2lAttention(Pattern):
    """Scaled dot-product attention of (B, L, d) with valid lengths; ``attention_weights`` holds the last weights."""

    parts = children(dropout=DROPOUT)
    arguments = 4
    weights = ("attention_weights",)
    roles = (SCALED_DOT_PRODUCT,)
    attends = True

    def matches(self, m: Any) -> bool:
        if not super().matches(m) or m._buffers:
            return False
        *_, last = parameters_of(type(m)) or ()
        return last.name == "valid_lens"

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        q, k, v = torch.randn(2, 5, 6), torch.randn(2, 4, 6), torch.randn(2, 4, 7)
        return [(q, k, v, lengths) for lengths in some_lengths(5, 4)]

    def fused_forward(self, m: Any, q: Tensor, k: Tensor, v: Tensor, valid_lens: Lengths = None) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        return d2l.attend(m, q, k, v, lengths_mask(valid_lens, k.shape[2])).squeeze(1)


class D2lHeads(Pattern):
    """``W_q``, ``W_k``, ``W_v``, ``W_o`` around ``attention``, with the heads folded into the batch."""

    parts = children(
        W_q=LINEAR, W_k=LINEAR, W_v=LINEAR, W_o=LINEAR, attention=Part(swapped_by(D2lAttention), fused=True)
    )
    attends = True

    def matches(self, m: Any) -> bool:
        return super().matches(m) and type(m.num_heads) is int

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        q, k, v = (torch.randn(2, n, linear.in_features) for n, linear in zip((5, 4, 4), (m.W_q, m.W_k, m.W_v)))
        return [(q, k, v, lengths) for lengths in some_lengths(5, 4)]

    def fused_forward(self, m: Any, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Lengths) -> Tensor:
        if not isinstance(valid_lens, PackedMask):
            return d2l.MultiHeadAttention.forward(m, queries, keys, values, lengths_mask(valid_lens, keys.shape[1]))
        q, k, v = project_heads((m.W_q, m.W_k, m.W_v), (queries, keys, values), m.num_heads)
        leave_weights(m.attention, lambda q, k: padded_weights(q, k, valid_lens).flatten(0, 1), q, k)
        return apply_linear(m.W_o, merge_heads(packed_heads(q, k, v, valid_lens, m.attention.dropout)))


class D2lBlock(Pattern):
    """Blocks of attentions and ``ffn``, each with an ``addnorm``. Arguments: (X, valid_lens), in the decoder (X,
    state)."""

    arguments = 2

    def __init__(self, name: str, forward: Callable[..., Any], *attentions: str) -> None:
        super().__init__(name)
        self.forward, self.attentions = forward, attentions
        self.padding = NOT_TOLD if len(attentions) > 1 else ""
        # The heads may get a mask instead of lengths, which only their fused forward understands.
        heads, norms = Part(swapped_by(D2lHeads), swapped=True), (f"addnorm{n}" for n in range(1, 2 + len(attentions)))
        self.parts = {**dict.fromkeys(attentions, heads), "ffn": ANY, **dict.fromkeys(norms, Part(swapped_by(AddNorm)))}

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        d = getattr(m, self.attentions[0]).W_q.in_features
        X = torch.randn(2, 5, d)
        return [(X, given) for given in (some_lengths(5, 5) if len(self.attentions) == 1 else some_states(d, m.i + 1))]

    def fused_forward(self, m: Any, X: Tensor, given: Any) -> Any:
        if self.padding:
            return self.forward(m, X, given)
        return through(m, X, (lengths_mask(given, X.shape[1]),), functools.partial(self.forward, m))


def run_decoder_block(m: Any, X: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
    """Compute a decoder block; in training each position sees those up to itself, in evaluation every one."""
    return d2l.DecoderBlock.run(m, X, state, AttentionMask.causal() if m.training else None)


class D2lStack(Pattern):
    """``dropout(embedding * sqrt(num_hiddens) + P)`` in one pass, then the blocks; weights are computed when read."""

    weights = ("attention_weights", "_attention_weights")

    def __init__(self, name: str, block: D2lBlock, **others: Part) -> None:
        super().__init__(name)
        self.parts = {
            "embedding": EMBEDDING,
            "pos_encoding": Part(swapped_by(D2L_POSITIONAL), fused=True),
            "blks": Part(swapped_by(block), swapped=True, many=True),
            **others,
        }

    def matches(self, m: Any) -> bool:
        return super().matches(m) and m.num_hiddens == m.embedding.embedding_dim

    def embedded(self, m: Any, ids: Tensor, offset: int = 0) -> Tensor | None:
        """Input of the first block; None if the fused op cannot compute it."""
        positions = m.pos_encoding
        return embedded(ids, m.embedding, positions.P[0], math.sqrt(m.num_hiddens), positions.dropout, offset)

    def leave_weights(self, m: Any, stack: type) -> None:
        """Store the weights of all blocks, computed as in the dialect's stack."""
        if not (torch.compiler.is_compiling() or is_traced()):
            m.__dict__[LAST_WEIGHTS] = stack.attention_weights.fget


class D2lEncoder(D2lStack):
    """Encoder with arguments (ids, valid_lens)."""

    padding = ""

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        ids = random_ids(m.embedding)
        return [(ids, lengths) for lengths in some_lengths(5, 5)]

    def fused_forward(self, m: Any, ids: Tensor, valid_lens: Lengths, *args: Any) -> Tensor | None:
        if (X := self.embedded(m, ids)) is None:
            return None

        run = functools.partial(d2l.TransformerEncoder.through_blocks, m)
        X = through(m, X, (lengths_mask(valid_lens, ids.shape[1]),), run)
        self.leave_weights(m, d2l.TransformerEncoder)
        return X


class D2lDecoder(D2lStack):
    """Decoder with arguments (ids, state). Each call begins at position 0, as in the textbook's chapter."""

    padding = NOT_TOLD
    counts_on = False

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        ids = random_ids(m.embedding)
        return [(ids, state) for state in some_states(m.num_hiddens, len(m.blks))]

    def fused_forward(self, m: Any, ids: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]] | None:
        seen = state[2][0] if self.counts_on and state[2] else None
        if (X := self.embedded(m, ids, 0 if seen is None else seen.shape[1])) is None:
            return None
        X, state = d2l.TransformerDecoder.through_blocks(m, X, state)
        self.leave_weights(m, d2l.TransformerDecoder)
        return m.dense(X), state


class D2lCountingDecoder(D2lDecoder):
    """Decoder whose positions continue from the state."""

    counts_on = True


PATTERNS = (
    D2lAttention(),
    D2lHeads(),
    ENCODER_BLOCK := D2lBlock("D2lEncoderBlock", d2l.EncoderBlock.forward, "attention"),
    DECODER_BLOCK := D2lBlock("D2lDecoderBlock", run_decoder_block, "attention1", "attention2"),
    D2lEncoder("D2lEncoder", ENCODER_BLOCK),
    D2lDecoder("D2lDecoder", DECODER_BLOCK, dense=ANY),
    D2lCountingDecoder("D2lCountingDecoder", DECODER_BLOCK, dense=ANY),
)
KNOWS = (
    (
        "attention over `valid_lens`; `W_q`, `W_k`, `W_v`, `W_o`; blocks and stacks",
        "d2l",
    ),
)
