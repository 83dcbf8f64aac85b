"""The faces of the d2l textbook's attention, blocks and stacks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layers.norm import active_dropout
from ..layers.torch_modules import Embedding
from ..masks import AttentionMask
from .attention_faces import remember
from .embedding_faces import D2lPositionalFace, embedded
from .faces import AddNormFace, Face, Weights, children, is_dropout, own_parameters, parameters_of, takes

Lengths = Tensor | AttentionMask | None


def lengths_mask(valid_lens: Lengths, keys: int) -> AttentionMask | None:
    """Lengths (B,) or (B, Lq); longer than there are keys means all of them."""
    if valid_lens is None or isinstance(valid_lens, AttentionMask):
        return valid_lens
    return AttentionMask.lengths(valid_lens.to(torch.int64).clamp(0, keys))


def some_lengths(queries: int, keys: int) -> Iterable[Tensor | None]:
    """In the forms that the modules take."""
    return None, torch.tensor([2, keys + 3]), torch.randint(1, keys + 1, (2, queries))


class D2lAttentionFace(Face):
    """Scaled dot product of (B, L, d) with valid lengths; the weights of the last call in ``attention_weights``."""

    face_skips = ("dropout",)
    attention_weights, face_leaves = Weights(), ("attention_weights",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {"dropout"} or own_parameters(module) or module._buffers:
            return False
        names = [name for name, _ in parameters_of(type(module)) or ()]
        return len(names) == 4 and names[3] == "valid_lens" and is_dropout(module.dropout)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        q, k, v = torch.randn(2, 5, 6), torch.randn(2, 4, 6), torch.randn(2, 4, 7)
        yield from ((q, k, v, lengths) for lengths in some_lengths(5, 4))

    def face_fused(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Lengths = None) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        return self.face_heads(q, k, v, lengths_mask(valid_lens, k.shape[2])).squeeze(1)

    def face_heads(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None) -> Tensor:
        """The same with heads, (B, H, L, d)."""
        remember(self, q, k, v, mask)
        return ops.attention(q, k, v, mask, dropout_p=active_dropout(self.dropout))

    @staticmethod
    def face_shaped(weights: Tensor) -> Tensor:
        """(B * H, Lq, Lk), as this module leaves them."""
        return weights.flatten(0, 1)


class D2lHeadsFace(Face):
    """``W_q``, ``W_k``, ``W_v``, ``W_o`` around ``attention``, whose heads were folded into the batch."""

    face_linears = ("W_q", "W_k", "W_v", "W_o")

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {*cls.face_linears, "attention"} or own_parameters(module):
            return False
        if not isinstance(module.num_heads, int) or not isinstance(module.attention, D2lAttentionFace):
            return False
        return all(isinstance(getattr(module, name), nn.Linear) for name in cls.face_linears)

    def _face_skipped(self) -> list[nn.Module]:
        return [self.attention, self.attention.dropout]

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        linears = (getattr(module, name) for name in cls.face_linears[:3])
        q, k, v = (torch.randn(2, n, linear.in_features) for n, linear in zip((5, 4, 4), linears))
        yield from ((q, k, v, lengths) for lengths in some_lengths(5, 4))

    def face_fused(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Lengths) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        )
        heads = self.attention.face_heads(q, k, v, lengths_mask(valid_lens, k.shape[2]))
        return self.W_o(heads.transpose(1, 2).flatten(-2))


class D2lEncoderBlockFace(Face):
    """Attention, ``addnorm1``, ``ffn``, ``addnorm2``: (X, valid_lens)."""

    face_attentions = ("attention",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        norms = tuple(f"addnorm{n}" for n in range(1, 2 + len(cls.face_attentions)))
        if children(module) != {*cls.face_attentions, *norms, "ffn"} or own_parameters(module):
            return False
        heads = (isinstance(getattr(module, name), D2lHeadsFace) for name in cls.face_attentions)
        return all(heads) and all(isinstance(getattr(module, name), AddNormFace) for name in norms) and takes(module, 2)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        X = torch.randn(2, 5, module.attention.W_q.in_features)
        yield from ((X, lengths) for lengths in some_lengths(5, 5))

    def face_fused(self, X: Tensor, valid_lens: Lengths) -> Tensor:
        Y = self.addnorm1(X, self.attention(X, X, X, lengths_mask(valid_lens, X.shape[1])))
        return self.addnorm2(Y, self.ffn(Y))


class D2lDecoderBlockFace(D2lEncoderBlockFace):
    """The decoder's block, (X, state): in training a look-ahead without a tensor of lengths 1 to T."""

    face_attentions = ("attention1", "attention2")

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        d, before = module.attention1.W_q.in_features, [None] * module.i
        X, memory, seen = torch.randn(2, 5, d), torch.randn(2, 4, d), torch.randn(2, 3, d)
        for lengths, known in zip(some_lengths(5, 4), (None, None, seen)):
            yield X, [memory, lengths, [*before, known]]

    def face_fused(self, X: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
        memory, seen = state[0], state[2][self.i]
        known = X if seen is None else torch.cat((seen, X), dim=1)
        state[2][self.i] = known
        Y = self.addnorm1(X, self.attention1(X, known, known, AttentionMask.causal() if self.training else None))
        Z = self.addnorm2(Y, self.attention2(Y, memory, memory, lengths_mask(state[1], memory.shape[1])))
        return self.addnorm3(Z, self.ffn(Z)), state


class D2lEncoderFace(Face):
    """``dropout(embedding * sqrt(num_hiddens) + P)`` in one pass, then the blocks; weights are left to be looked at."""

    face_skips = ("embedding", "pos_encoding")
    face_others: tuple[str, ...] = ()
    face_block: type[D2lEncoderBlockFace] = D2lEncoderBlockFace
    attention_weights, face_leaves = Weights(), ("attention_weights",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {*cls.face_skips, "blks", *cls.face_others} or own_parameters(module):
            return False
        attentions = cls.face_block.face_attentions
        exact = (isinstance(m, cls.face_block) and m.face_attentions == attentions for m in module.blks)
        if not isinstance(module.embedding, Embedding) or not isinstance(module.pos_encoding, D2lPositionalFace):
            return False
        return module.num_hiddens == module.embedding.embedding_dim and all(exact)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        ids = torch.randint(0, module.embedding.weight.shape[0], (2, 5))
        yield from ((ids, lengths) for lengths in some_lengths(5, 5))

    def face_embedded(self, ids: Tensor, offset: int = 0) -> Tensor | None:
        """What enters the first block; None where the fused op does not serve."""
        positions = self.pos_encoding
        return embedded(ids, self.embedding, positions.P[0], math.sqrt(self.num_hiddens), positions.dropout, offset)

    def face_fused(self, ids: Tensor, valid_lens: Lengths, *args: Any) -> Tensor:
        X = self.face_embedded(ids)
        if X is None:
            return super(Face, self).forward(ids, valid_lens, *args)
        mask = lengths_mask(valid_lens, ids.shape[1])
        for block in self.blks:
            X = block(X, mask)
        leave(self, lambda self: [block.attention.attention.attention_weights for block in self.blks])
        return X


def leave(module: nn.Module, weights: Any) -> None:
    if not torch.compiler.is_compiling():
        module.__dict__["_recall"] = weights


class D2lDecoderFace(D2lEncoderFace):
    """The decoder: (ids, state) -> logits and state. Every call starts at position 0, as the chapter writes it."""

    face_others = ("dense",)
    face_block = D2lDecoderBlockFace
    face_counts_on = False
    attention_weights = _attention_weights = Weights()
    face_leaves = ("attention_weights", "_attention_weights")

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        d, count = module.num_hiddens, len(module.blks)
        ids = torch.randint(0, module.embedding.weight.shape[0], (2, 5))
        memory, seen = torch.randn(2, 4, d), torch.randn(2, 3, d)
        for lengths, known in zip(some_lengths(5, 4), (None, None, seen)):
            yield ids, [memory, lengths, [known] * count]

    def face_fused(self, ids: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
        seen = state[2][0] if self.face_counts_on and state[2] else None
        X = self.face_embedded(ids, 0 if seen is None else seen.shape[1])
        if X is None:
            return super(Face, self).forward(ids, state)
        for block in self.blks:
            X, state = block(X, state)
        leave(self, lambda self: [
            [getattr(block, name).attention.attention_weights for block in self.blks]
            for name in ("attention1", "attention2")
        ])  # fmt: skip
        return self.dense(X), state


class D2lCountingDecoderFace(D2lDecoderFace):
    """The same where positions count on from the state."""

    face_counts_on = True
