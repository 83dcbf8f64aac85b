"""``attention_mask_of``: a ``BlockMask`` of FlexAttention as an ``AttentionMask``.

A block mask holds a function. It is evaluated for every query and key, some rows at a time, and what is found is
compared with the forms of ``AttentionMask`` that it could be. A form is taken where it allows exactly the same keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..masks import AttentionMask
from ..masks.checks import may_be_keep

MAX_DENSE = 2**28
"""The largest dense mask, in entries (bytes): B * H * Lq * Lk. Up to here the function is evaluated once."""
_AT_A_TIME = 2**18


def attention_mask_of(block_mask: Any) -> AttentionMask:
    """The ``AttentionMask`` that allows the keys of a ``torch.nn.attention.flex_attention.BlockMask``.

    Found in this order: all keys; a look-ahead, a sliding window or both (``causal``, ``window``); these with one
    length per batch entry (``lengths``), with padding anywhere (``keep`` of (B, 1, 1, Lk)), or with packed documents
    (``documents``); one length per query, as of a prefix that all see (``lengths`` of (B, Lq)), with a window or
    without; anything else as a dense ``keep``. The heads must agree, except in the last form.

    The cost is that of looking at all B * H * Lq * Lk entries, beyond ``MAX_DENSE`` several times. Do it once for a
    mask, not in every call. A key in no block of the block mask is not allowed, and one in a full block is, as in
    FlexAttention's kernels. Tensors that the function captures are read now.

    Args:
        block_mask: (B, H, Lq, Lk); of B and H each may be 1, for all.

    Raises:
        TypeError: for anything but a BlockMask.
        ValueError: for one without a batch or head dimension; for one that is none of these forms and has more than
            ``MAX_DENSE`` entries.
        RuntimeError: torch's own, for a sliced block mask, which has no function.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"attention_mask_of: expected a BlockMask, got {type(block_mask).__name__}")
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
        found = _first_equal(facts.simple_forms(), rows) or _first_equal(facts.document_forms(rows), rows)
        if found is not None:
            return found
    if entries > MAX_DENSE:
        raise ValueError(
            f"attention_mask_of: a BlockMask {block_mask.shape} that is no look-ahead, window, lengths, padding, "
            f"documents or prefix becomes a dense mask, of at most {MAX_DENSE} entries; this one has {entries}"
        )
    return AttentionMask.keep(torch.cat([allowed[:, : 1 if facts.heads_agree else H] for _, allowed in rows], 2))


class _Rows:
    """The allowed keys of a block mask, some queries at a time: pairs of the first query and bool (B, H, n, Lk).

    Args:
        kept: keep them after the first time.
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
    """The blocks that a list has, bool (B, H, rows, columns).

    Args:
        number: int (B, H, rows), how many ``indices`` (B, H, rows, columns) count.
    """
    columns = -(-mask.shape[3] // mask.BLOCK_SIZE[1])
    listed = torch.arange(indices.shape[3], device=indices.device) < number[..., None]
    target = torch.where(listed, indices, columns).clamp(max=columns).long()
    found = torch.zeros(*number.shape, columns + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(3, target, torch.ones_like(target, dtype=torch.bool))[..., :columns]


class _Facts:
    """The tightest bounds of the allowed keys. A form that can be the mask, with these bounds in it, is the mask.

    Attributes:
        heads_agree: every head allows the same keys.
        lower, upper: least and greatest key minus query; None as long as no key is allowed.
        seen: bool (B, Lk), keys that a query sees.
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
        """Take in rows (B, H, n, Lk) from query ``first`` on."""
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
        """No bound, each bound, both."""
        if self.lower is None:
            return [AttentionMask()]
        upper, lower = AttentionMask(causal_offset=self.upper), AttentionMask(window_offset=self.lower)
        return [AttentionMask(), upper, lower, upper & lower]

    def simple_forms(self) -> list[AttentionMask]:
        """Forms that the mask may have, the cheapest first, without documents."""
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
        """Documents, as small as they can be: queries and keys of one document are those that some chain connects.

        The least key of a chain is its id. Rows in order carry it on, as a query sees the key before it or its own.
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
    """The first form that allows exactly the keys of the first head; None if none does."""
    for first, allowed in rows:
        expected = allowed[:, :1]
        forms = [form for form in forms if bool((_dense_rows(form, first, expected) == expected).all())]
        if not forms:
            return None
    return forms[0] if forms else None


def _dense_rows(form: AttentionMask, first: int, like: Tensor) -> Tensor:
    """Keep mask of a form for the queries from ``first`` on, broadcastable to ``like`` (B, 1, n, Lk)."""
    n, Lk = like.shape[2:]
    end = first + n
    parts: dict[str, Any] = {}
    if form.causal_offset is not None:
        parts["causal_offset"] = form.causal_offset + first
    if form.window_offset is not None:
        parts["window_offset"] = form.window_offset + first
    if form.key_lengths is not None and form.key_lengths.dim() == 2:
        parts["key_lengths"] = form.key_lengths[:, first:end]
    if form.document_ids is not None:
        parts["document_ids"] = form.document_ids[0][:, first:end], form.document_ids[1]
    return dataclasses.replace(form, **parts).dense(n, Lk, like.device)
