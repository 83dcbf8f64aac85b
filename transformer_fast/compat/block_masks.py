"""``attention_mask_of``: convert a ``BlockMask`` of FlexAttention to an ``AttentionMask``.

A block mask holds a function of query and key. The function is evaluated for every query and key, some rows at a time.
The result is compared with the forms of ``AttentionMask``. A form is chosen only if it allows exactly the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..masks import AttentionMask
from ..masks.checks import may_be_keep
from ..masks.parts import of_queries

MAX_DENSE = 2**28
"""Maximum size of a dense mask, in entries (bytes): B * H * Lq * Lk. Up to this size the function is evaluated once."""
_AT_A_TIME = 2**18


def attention_mask_of(block_mask: Any) -> AttentionMask:
    """The ``AttentionMask`` that allows the keys of a ``torch.nn.attention.flex_attention.BlockMask``.

    Forms, in order of the search: all keys; a look-ahead mask, a sliding window or both (``causal``, ``window``); these
    with one length per batch entry (``lengths``), with padding at any position (``keep`` of (B, 1, 1, Lk)), or with
    packed documents (``documents``); one length per query, for instance of a prefix visible to all queries (``lengths``
    of (B, Lq)), with or without a window; else a dense ``keep``. All forms but the dense one need equal heads.

    The conversion evaluates all B * H * Lq * Lk entries, beyond ``MAX_DENSE`` several times. Convert a mask once, not
    in every call. As in FlexAttention's kernels, a key outside all blocks is blocked, and a key in a full block is
    allowed. Tensors that the function captures are read during the conversion.

    Args:
        block_mask: (B, H, Lq, Lk); B and H may be 1, for all.

    Raises:
        TypeError: for anything but a BlockMask.
        ValueError: for a block mask without a batch or head dimension; for a dense form with more than ``MAX_DENSE``
            entries; in a graph of torch.compile or torch.export, which cannot read the mask.
        RuntimeError: torch's own error, for a sliced block mask, which has no function.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"attention_mask_of: expected a BlockMask, got {type(block_mask).__name__}; torch's "
            "create_block_mask(function, B, H, Lq, Lk) makes one"
        )
    if torch.compiler.is_compiling():
        raise ValueError(
            "attention_mask_of: torch.compile and torch.export cannot read a BlockMask; convert it before, and pass "
            "the AttentionMask"
        )
    if len(block_mask.shape) != 4:
        raise ValueError(f"attention_mask_of: expected a BlockMask (B, H, Lq, Lk), got shape {block_mask.shape}")
    B, H, Lq, Lk = block_mask.shape
    entries = B * H * Lq * Lk
    if entries == 0:
        return AttentionMask()
    rows = _Rows(block_mask, kept=entries <= MAX_DENSE)
    facts = _Facts(B, Lq, Lk, block_mask.kv_indices.device)
    for first, allowed in rows:
        facts.add(first, allowed)
    if facts.heads_agree:
        matched = _first_equal(facts.simple_forms(), rows) or _first_equal(facts.document_forms(rows), rows)
        if matched is not None:
            return matched
    if entries > MAX_DENSE:
        raise ValueError(
            f"attention_mask_of: the BlockMask {block_mask.shape} is none of look-ahead, window, lengths, padding, "
            f"documents and prefix, so it becomes a dense mask; expected at most {MAX_DENSE} entries, got {entries}"
        )
    return AttentionMask.keep(torch.cat([allowed[:, : 1 if facts.heads_agree else H] for _, allowed in rows], 2))


class _Rows:
    """Iterator over the allowed keys of a block mask, some queries at a time: pairs of first query and bool (B, H, n,
    Lk).

    Args:
        kept: keep the rows after the first iteration.
    """

    def __init__(self, block_mask: Any, kept: bool) -> None:
        self.block_mask = block_mask
        self.kept: list[tuple[int, Tensor]] | None = [] if kept else None

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        if not self.kept:
            if self.kept is None:
                return self._computed()
            self.kept.extend(self._computed())
        return iter(self.kept)

    def _computed(self) -> Iterator[tuple[int, Tensor]]:
        from torch.nn.attention.flex_attention import create_mask

        mask = self.block_mask
        B, H, Lq, Lk = mask.shape
        device, function = mask.kv_indices.device, mask.mask_mod
        in_block = _blocks(mask.kv_num_blocks, mask.kv_indices, mask)
        in_full_block = None
        if mask.full_kv_num_blocks is not None:
            in_full_block = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices, mask)
        columns = torch.arange(Lk, device=device) // mask.BLOCK_SIZE[1]
        step = max(1, _AT_A_TIME // (B * H * Lk))
        for first in range(0, Lq, step):
            n = min(step, Lq - first)

            def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, by: int = first) -> Tensor:
                return function(b, h, q + by, kv)

            lines = torch.arange(first, first + n, device=device) // mask.BLOCK_SIZE[0]
            allowed = create_mask(shifted, B, H, n, Lk, device).bool() & in_block[:, :, lines][..., columns]
            if in_full_block is not None:
                allowed = allowed | in_full_block[:, :, lines][..., columns]
            yield first, allowed


def _blocks(number: Tensor, indices: Tensor, mask: Any) -> Tensor:
    """Convert a list of blocks to bool (B, H, rows, columns).

    Args:
        number: int (B, H, rows), number of valid ``indices`` (B, H, rows, columns).
    """
    columns = -(-mask.shape[3] // mask.BLOCK_SIZE[1])
    listed = torch.arange(indices.shape[3], device=indices.device) < number[..., None]
    target = torch.where(listed, indices, columns).clamp(max=columns).long()
    blocks = torch.zeros(*number.shape, columns + 1, dtype=torch.bool, device=indices.device)
    return blocks.scatter_(3, target, torch.ones_like(target, dtype=torch.bool))[..., :columns]


class _Facts:
    """Tightest bounds of the allowed keys. If the mask has a given form, then with these bounds.

    Attributes:
        heads_agree: every head allows the same keys.
        lower, upper: least and greatest key minus query; None while no key is allowed.
        seen: bool (B, Lk), keys that at least one query sees.
        ends: int64 (B, Lq), one past the last key that each query sees.
    """

    def __init__(self, B: int, Lq: int, Lk: int, device: torch.device) -> None:
        self.Lq, self.Lk = Lq, Lk
        self.heads_agree = True
        self.lower: int | None = None
        self.upper: int | None = None
        self.seen = torch.zeros(B, Lk, dtype=torch.bool, device=device)
        self.ends = torch.zeros(B, Lq, dtype=torch.int64, device=device)

    def add(self, first: int, allowed: Tensor) -> None:
        """Update the bounds with rows (B, H, n, Lk) from query ``first`` on."""
        if self.heads_agree and not bool((allowed == allowed[:, :1]).all()):
            self.heads_agree = False
        if not self.heads_agree:
            return
        rows = allowed[:, 0]
        key, query = torch.arange(self.Lk, device=rows.device), torch.arange(rows.shape[1], device=rows.device) + first
        start = torch.where(rows, key, self.Lk).amin(-1)
        end = torch.where(rows, key + 1, 0).amax(-1)
        self.seen |= rows.any(1)
        self.ends[:, first : first + rows.shape[1]] = end
        some = end > 0
        if bool(some.any()):
            lower, upper = int((start - query)[some].min()), int((end - 1 - query)[some].max())
            self.lower = lower if self.lower is None else min(lower, self.lower)
            self.upper = upper if self.upper is None else max(upper, self.upper)

    def bands(self) -> list[AttentionMask]:
        """Masks of no bound, of each bound, and of both bounds."""
        if self.lower is None:
            return [AttentionMask()]
        upper, lower = AttentionMask(causal_offset=self.upper), AttentionMask(window_offset=self.lower)
        return [AttentionMask(), upper, lower, upper & lower]

    def simple_forms(self) -> list[AttentionMask]:
        """Candidate forms without documents, cheapest first."""
        sets, longest = [AttentionMask()], self.ends.amax(1)
        if int(longest.min()) < self.Lk:
            sets.append(AttentionMask.lengths(longest.to(torch.int32)))
        if not bool(self.seen.all()):
            sets.append(AttentionMask.keep(self.seen[:, None, None]))
        forms = [keys & band for keys in sets for band in self.bands()]
        if not may_be_keep(self.ends, self.Lk):
            per_query = AttentionMask.lengths(self.ends.to(torch.int32))
            forms += [per_query & band for band in self.bands() if band.causal_offset is None]
        return forms

    def document_forms(self, rows: _Rows) -> list[AttentionMask]:
        """Candidate forms with the smallest possible documents: a document is a connected set of queries and keys.

        The id of a document is its least key. One pass over the rows in order finds all ids, because each query sees
        its own key or the key before.
        """
        B = self.seen.shape[0]
        ids = torch.arange(self.Lk, dtype=torch.int32, device=self.seen.device).expand(B, -1).clone()
        of_queries = torch.full((B, self.Lq), -1, dtype=torch.int32, device=self.seen.device)
        for first, allowed in rows:
            for i, row in enumerate(allowed[:, 0].unbind(1), first):
                least = torch.where(row, ids, self.Lk).amin(-1)
                of_queries[:, i] = torch.where(least < self.Lk, least, -1)
                ids = torch.where(row, least[:, None], ids)
        documents = AttentionMask.documents(of_queries, ids)
        return [documents & band for band in self.bands()]


def _first_equal(forms: list[AttentionMask], rows: _Rows) -> AttentionMask | None:
    """First form that allows exactly the keys of the first head; None if none does."""
    for first, allowed in rows:
        expected = allowed[:, :1]
        forms = [form for form in forms if _is_dense(form, first, expected)]
        if not forms:
            return None
    return forms[0] if forms else None


def _is_dense(form: AttentionMask, first: int, expected: Tensor) -> bool:
    """Return True if a form allows the expected keys, bool (B, 1, n, Lk), to the queries from ``first`` on."""
    n, Lk = expected.shape[2:]
    return bool((of_queries(form, first, first + n).dense(n, Lk, expected.device) == expected).all())
