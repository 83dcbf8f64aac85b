"""``AttentionMask``: one normal form for the masks of all libraries.

A mask says which keys a query may attend to, and what is added to their scores. A mask consists of parts. A key is
allowed only if every part allows the key:

============= ====================== ===========================================================================
part          shape                  key ``j`` is allowed for query ``i`` of head ``h``, batch ``b``
============= ====================== ===========================================================================
``keep``      (B|1, H|1, Lq|1, Lk|1) where ``keep[b, h, i, j]`` is True
``key_keep``  (B|1, H|1, 1, Lk)      where ``key_keep[b, h, 0, j]`` is True (padding)
``lengths``   (B,) or (B, Lq)        where ``j < lengths[b]`` or ``j < lengths[b, i]``
``causal``    an offset              where ``j <= i + causal``
``window``    an offset              where ``j >= i + window``
``intervals`` (B|1, H|1, Lq|1)       where ``begin[b, h, i] <= j < end[b, h, i]``
``documents`` (B|1, Lq), (B|1, Lk)   where ``query_ids[b, i] == key_ids[b, j]``
``bias``      (B|1, H|1, Lq|1, Lk|1) where ``bias[b, h, i, j]``, added to the score, is not -inf
``alibi``     (H,) or (B, H)         everywhere; ``-slopes[b, h] * |i + offset - j|`` is added to the score
``relative``  (buckets, H)           everywhere; ``weight[bucket(j - i - offset), h]`` is added to the score
============= ====================== ===========================================================================

Masks combine with ``&``. The parts stay separate, so combining masks never builds a tensor of size (Lq, Lk). With ``|``
a key is allowed if one of several masks allows it; such a union is one more part.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from . import checks
from .checks import check_dense, check_float, check_integers, checked_offset
from .definition import either, inside, visible
from .distance import Alibi, DistanceBias, Relative, along_diagonals, distance_table
from .parts import alternatives, combined, moved, tensors_of, written


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttentionMask:
    """Mask of the keys that each query may attend to. Make one with a constructor below; combine masks with ``&``.

    Example:
        >>> mask = tfast.AttentionMask.lengths(torch.tensor([2, 1])) & tfast.AttentionMask.causal()
        >>> mask
        lengths(int64 (2,)) & causal()
        >>> mask.dense(2, 2)[0, 0]  # first sentence: a row per query, a column per key
        tensor([[ True, False],
                [ True,  True]])
    """

    # The parts; None or () for a part that the mask does not have.
    keep_mask: Tensor | None = None
    key_keep_mask: Tensor | None = None
    key_lengths: Tensor | None = None
    causal_offset: int | None = None
    additive_bias: Tensor | None = None
    window_offset: int | None = None
    document_ids: tuple[Tensor, Tensor] | None = None
    distance_biases: tuple[DistanceBias, ...] = ()
    first_keys: Tensor | None = None
    end_keys: Tensor | None = None
    unions: tuple[tuple[AttentionMask, ...], ...] = ()
    has_clear_lengths: bool | None = None
    """True for lengths that were combined, of which none may be a keep mask; no part."""

    @classmethod
    def keep(cls, mask: Tensor) -> AttentionMask:
        """A keep mask: bool or integer, nonzero = kept, broadcastable to (B, H, Lq, Lk).

        Missing axes are added in front, by rank: two dimensions are (Lq, Lk), whatever their sizes.

        Raises:
            TypeError: for a float mask, which could also be an additive bias or a blocked mask; for a sparse one.
            ValueError: for more than four dimensions, or none. For three dimensions, unless the first is 1: the first
                could be the batch or the heads.

        Example:
            >>> ids = torch.tensor([[4, 7, 2], [3, 8, 0]])  # 0 = padding
            >>> tfast.AttentionMask.keep((ids != 0)[:, None, None])  # (B, 1, 1, Lk)
            keep(bool (2, 1, 1, 3))
        """
        mask = checks.boolean(mask)
        if mask.dim() == 3:
            checks.check_leading(mask)
        mask = checks.four_dimensions(mask)
        if mask.shape[2] == 1:
            return cls(key_keep_mask=mask)
        return cls(keep_mask=mask)

    @classmethod
    def blocked(cls, mask: Tensor) -> AttentionMask:
        """A blocked mask: nonzero = blocked, broadcastable to (B, H, Lq, Lk).

        Bool, integer, or the float mask of 0s and 1s that TensorFlow's tutorial adds times -1e9.
        A float is read by value: anything but 0 blocks. Shapes and errors as for ``keep``.

        Example:
            >>> padding = torch.tensor([[0.0, 0.0, 1.0]])  # TensorFlow's: 1.0 = blocked
            >>> tfast.AttentionMask.blocked(padding).dense(1, 3)
            tensor([[[[ True,  True, False]]]])
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"blocked mask: expected a tensor, got {type(mask).__name__}")
        check_dense("blocked mask", mask)
        return cls.keep(mask == 0)

    @classmethod
    def lengths(cls, lengths: Tensor) -> AttentionMask:
        """Valid lengths: integer (B,), or (B, Lq) for one per query; keys at or past the length are blocked.

        The values are read when the mask is used. On a CPU, a length outside [0, Lk] raises a ValueError; on a GPU it
        is clamped. Lengths (B, Lq) that are all 0 or 1, with several queries and keys, raise a ValueError on a CPU,
        because they may be a keep mask.

        Raises:
            TypeError: for anything but a dense integer tensor.
            ValueError: for another rank.

        Example:
            >>> mask = tfast.AttentionMask.lengths(torch.tensor([3, 1]))
            >>> mask.dense(1, 3)[:, 0, 0]  # a row per sentence
            tensor([[ True,  True,  True],
                    [ True, False, False]])
        """
        check_integers("lengths", lengths, "(B,) or (B, Lq)", (1, 2))
        return cls(key_lengths=lengths)

    @classmethod
    def causal(cls, offset: int = 0) -> AttentionMask:
        """The look-ahead mask: query ``i`` sees keys ``j <= i + offset``. A cache of n keys decodes with offset n.

        Example:
            >>> tfast.AttentionMask.causal(1).dense(2, 3)[0, 0]  # two queries behind a cache of one key
            tensor([[ True,  True, False],
                    [ True,  True,  True]])
        """
        return cls(causal_offset=checked_offset("causal offset", offset))

    @classmethod
    def window(cls, left: int | None, right: int | None = 0, offset: int = 0) -> AttentionMask:
        """A sliding window: query ``i`` sees keys ``i + offset - left <= j <= i + offset + right``; None is no bound.

        By default, as in Mistral, a query sees no later key. Keys outside are not read; no tensor Lq x Lk is made.

        Raises:
            TypeError: for a bound that is not an int.
            ValueError: for bounds that exclude every key.

        Example:
            >>> tfast.AttentionMask.window(1).dense(3, 3)[0, 0].int()  # a query's own key, and the one before
            tensor([[1, 0, 0],
                    [1, 1, 0],
                    [0, 1, 1]], dtype=torch.int32)
        """
        offset = checked_offset("window offset", offset)
        first = None if left is None else offset - checked_offset("window left", left)
        last = None if right is None else offset + checked_offset("window right", right)
        if left is not None and right is not None and left + right < 0:
            raise ValueError(f"window: expected left + right of at least 0, got {left} and {right}, which keep no key")
        return cls(causal_offset=last, window_offset=first)

    @classmethod
    def prefix(cls, lengths: Tensor, offset: int = 0) -> AttentionMask:
        """A prefix language model: ``lengths(lengths) | causal(offset)``, with any lengths.

        The tokens of the prefix see each other; those behind it see the prefix and, as with ``causal``, no later key. A
        length past Lk is Lk, one below 0 is 0. No tensor of size Lq x Lk is made. Combine with ``lengths`` for padding.

        Args:
            lengths: integer (B,), number of keys in each prefix; or (1,) for all sequences.
            offset: position of the first query among the keys.

        Raises:
            TypeError: for lengths that are not an integer tensor, or an offset that is not an int.
            ValueError: for another shape.

        Example:
            >>> AttentionMask = tfast.AttentionMask
            >>> AttentionMask.prefix(torch.tensor([2])).dense(3, 3)[0, 0].int()
            tensor([[1, 1, 0],
                    [1, 1, 0],
                    [1, 1, 1]], dtype=torch.int32)
        """
        check_integers("prefix: lengths", lengths, "(B,)", (1,))
        return cls(end_keys=lengths[:, None, None]) | cls(causal_offset=checked_offset("prefix offset", offset))

    @classmethod
    def intervals(cls, begin: Tensor | None, end: Tensor | None) -> AttentionMask:
        """Keys from ``begin`` to before ``end``, for each query; None is no bound.

        A bound outside [0, Lk] is that of the first or the last key. Ends (Lq,) and (B, Lq) reach the kernels as they
        are; begins, and bounds per head, as a keep mask of a byte per query and key.

        Args:
            begin, end: integer (Lq,), (B, Lq) or (B, H, Lq); sizes of 1 broadcast.

        Raises:
            TypeError: for bounds that are not integer tensors.
            ValueError: for another rank.

        Example:
            >>> begin, end = torch.tensor([0, 0, 1]), torch.tensor([2, 3, 2])
            >>> tfast.AttentionMask.intervals(begin, end).dense(3, 3)[0, 0].int()
            tensor([[1, 1, 0],
                    [1, 1, 1],
                    [0, 1, 0]], dtype=torch.int32)
        """
        return cls(first_keys=checks.interval_bound("begin", begin), end_keys=checks.interval_bound("end", end))

    @classmethod
    def documents(cls, query_ids: Tensor, key_ids: Tensor | None = None) -> AttentionMask:
        """Documents packed side by side: query ``i`` sees key ``j`` where ``query_ids[b, i] == key_ids[b, j]``.

        Tiles of keys that share no document with a tile of queries are not read, and no tensor of size Lq x Lk is made.
        The tokens of a document may be scattered, but only contiguous documents save work.

        Args:
            query_ids: integer (B, Lq), or (1, Lq) for all sequences.
            key_ids: integer (B, Lk), or (1, Lk) for all sequences; ``query_ids`` by default.

        Raises:
            TypeError: for ids that are not integer tensors.
            ValueError: for other shapes.

        Example:
            >>> ids = torch.tensor([[0, 0, 1]])  # a text of two tokens, then one of one
            >>> tfast.AttentionMask.documents(ids).dense(3, 3)[0, 0].int()
            tensor([[1, 1, 0],
                    [1, 1, 0],
                    [0, 0, 1]], dtype=torch.int32)
        """
        ids = (query_ids, query_ids if key_ids is None else key_ids)
        for name, t in zip(("query_ids", "key_ids"), ids, strict=True):
            check_integers(f"documents: {name}", t, "(B, L)", (2,))
        return cls(document_ids=ids)

    @classmethod
    def alibi(cls, slopes: Tensor, offset: int = 0) -> AttentionMask:
        """ALiBi: ``-slope * |i + offset - j|`` is added to the score of query ``i`` and key ``j``.

        Args:
            slopes: float (H,), or (B, H); they may require a gradient.
            offset: position of the first query among the keys: a cache of n keys decodes with offset n.

        Raises:
            TypeError: for slopes that are not a float tensor, or an offset that is not an int.
            ValueError: for another shape.

        Example:
            >>> mask = tfast.AttentionMask.alibi(torch.tensor([0.5, 0.25]))  # a slope per head
            >>> mask.added(1, 3)[0, :, 0]  # of the first query, a row per head
            tensor([[-0.0000, -0.5000, -1.0000],
                    [-0.0000, -0.2500, -0.5000]])
        """
        check_float("alibi: slopes", slopes, "(H,) or (B, H)", (1, 2))
        return cls(distance_biases=(Alibi(slopes, checked_offset("alibi offset", offset)),))

    @classmethod
    def relative(
        cls, weight: Tensor, max_distance: int = 128, bidirectional: bool = True, offset: int = 0
    ) -> AttentionMask:
        """T5's relative positions: the weight of the bucket of ``j - (i + offset)`` is added to the score.

        Args:
            weight: float (buckets, H); it may require a gradient, which is summed in a fixed order.
            max_distance: from here on all distances share the last bucket.
            bidirectional: half of the buckets are for keys after the query, as in an encoder; if False (a decoder),
                keys after the query count as distance 0.
            offset: position of the first query among the keys.

        Raises:
            TypeError: for a weight that is not a float tensor, or other arguments that are not ints.
            ValueError: for another shape, or fewer buckets than the distances near the query need.

        Example:
            >>> weight = torch.tensor([[0.0], [1.0], [2.0], [3.0]])  # 4 buckets, 1 head
            >>> tfast.AttentionMask.relative(weight, max_distance=3).added(2, 2)[0, 0]
            tensor([[0., 3.],
                    [1., 0.]])
        """
        check_float("relative: weight", weight, "(buckets, H)", (2,))
        max_distance = checked_offset("relative max_distance", max_distance)
        checks.check_buckets(weight, max_distance, bidirectional)
        return cls(distance_biases=(Relative(weight, max_distance, bidirectional, checked_offset("offset", offset)),))

    @classmethod
    def bias(cls, bias: Tensor) -> AttentionMask:
        """A float tensor, learned or not, added to the scaled scores, broadcastable to (B, H, Lq, Lk); -inf blocks.

        Raises:
            TypeError: for anything but a dense float tensor.
            ValueError: for more than four dimensions, or none.

        Example:
            >>> q = torch.randn(2, 4, 5, 8)
            >>> bias = torch.zeros(4, 5, 5, requires_grad=True)  # (H, Lq, Lk)
            >>> tfast.attention(q, q, q, tfast.AttentionMask.bias(bias)).sum().backward()
            >>> bias.grad.shape
            torch.Size([4, 5, 5])
        """
        if not isinstance(bias, Tensor) or not bias.is_floating_point():
            got = checks.kind_of(bias)
            raise TypeError(f"bias must be a float tensor added to the scores, got {got}; a mask goes in mask=")
        check_dense("bias", bias)
        return cls(additive_bias=checks.four_dimensions(bias))

    def __and__(self, other: AttentionMask) -> AttentionMask:
        """Keys that both masks allow; biases add up.

        Raises:
            TypeError: for a tensor, whose meaning is ambiguous; the message lists the constructors to choose from.
        """
        if not isinstance(other, AttentionMask):
            raise checks.not_a_mask(other)
        return AttentionMask(**combined(self, other))

    def __or__(self, other: AttentionMask) -> AttentionMask:
        """Keys that one of the masks allows, or both. A union whose masks all begin at key 0 reaches the kernels as
        lengths per query, another one as a keep mask of a byte per query and key.

        Raises:
            TypeError: for a tensor, as ``&`` does.
            ValueError: for a mask with a bias; add the bias to the union with ``&``.

        Example:
            >>> first = tfast.AttentionMask.lengths(torch.tensor([1]))  # all see key 0
            >>> (first | tfast.AttentionMask.window(0)).dense(3, 3)[0, 0].int()
            tensor([[1, 0, 0],
                    [1, 1, 0],
                    [1, 0, 1]], dtype=torch.int32)
        """
        if not isinstance(other, AttentionMask):
            raise checks.not_a_mask(other, "|")
        for mask in (self, other):
            if mask.additive_bias is not None or mask.distance_biases:
                raise ValueError(f"a union has no bias, got {mask}; add the bias to the union: (a | b) & bias")
        return AttentionMask(unions=(tuple(one for mask in (self, other) for one in alternatives(mask, PARTS)),))

    def __ror__(self, other: object) -> AttentionMask:
        """Raise for ``tensor | mask`` the error of ``mask | tensor``."""
        raise checks.not_a_mask(other, "|")

    def __invert__(self) -> AttentionMask:
        """Raise: no form holds the keys that a mask hides."""
        raise checks.no_complement(self)

    def __repr__(self) -> str:
        """Constructors that make the mask: ``lengths(int64 (2,)) & causal()``, with tensors by dtype and shape."""
        return written(**{name: getattr(self, name) for name in PARTS})

    def __rand__(self, other: object) -> AttentionMask:
        """Raise for ``tensor & mask`` the error of ``mask & tensor``."""
        raise checks.not_a_mask(other)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the mask, by name: parts that are tensors, and tensors inside other parts."""
        return tensors_of(self, PARTS)

    def to(self, device: torch.device | str) -> AttentionMask:
        """The same mask with its tensors on ``device``."""
        return moved(self, device)

    def dense(self, Lq: int, Lk: int, device: torch.device | str | None = None) -> Tensor:
        """The full mask as one bool keep tensor, broadcastable to (B, H, Lq, Lk), for tests and pictures."""
        allowed = self.visible(Lq, Lk, next((t.device for t in self.tensors().values()), device))
        return allowed if self.additive_bias is None else allowed & (self.additive_bias != float("-inf"))

    @property
    def has_ranges(self) -> bool:
        """True for a mask with parts that reach the kernels as lengths or as a keep mask."""
        return self.first_keys is not None or self.end_keys is not None or len(self.unions) > 0

    def visible(self, Lq: int, Lk: int, device: torch.device | str | None, shift: int | Tensor = 0) -> Tensor:
        """The parts without biases by their :func:`~.definition.visible`, with its ``device`` and ``shift``."""
        ids = dict(zip(("query_ids", "key_ids"), self.document_ids or (), strict=False))
        others = [either([mask.visible(Lq, Lk, device, shift) for mask in union]) for union in self.unions]
        if self.first_keys is not None or self.end_keys is not None:
            others.append(inside(self.first_keys, self.end_keys, Lk))
        return visible(
            Lq, Lk, device, keep=self.keep_mask, key_keep=self.key_keep_mask, lengths=self.key_lengths,
            causal=self.causal_offset, window=self.window_offset, others=others, shift=shift, **ids,
        )  # fmt: skip

    def added(self, Lq: int, Lk: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Sum of all biases as one tensor, broadcastable to (B, H, Lq, Lk), for tests and pictures."""
        table = self.table(Lq, Lk, dtype)
        if table is None:
            return self.additive_bias
        by_distance = along_diagonals(table, Lq, Lk, Lq - 1)
        return by_distance if self.additive_bias is None else self.additive_bias + by_distance

    def table(self, Lq: int, Lk: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Sum of ALiBi and relative positions, by distance: (B|1, H, Lq + Lk - 1), entry ``Lq - 1 + j - i`` for query
        i and key j."""
        return distance_table(self.distance_biases, Lq, Lk, Lq - 1, dtype)


PARTS = tuple(field.name for field in dataclasses.fields(AttentionMask) if field.name != "has_clear_lengths")
"""Names of the parts that a mask may have, in the order of its fields."""
