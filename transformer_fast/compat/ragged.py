"""Bottom-right aligned attention of packed sequences: the last query of a sequence is at its last key.

``attention_packed(bottom_right=True)`` computes this alignment. Two kinds of calls use a padded batch whose sequences
end together: calls with one set of ALiBi slopes per sequence, and calls that return the weights after dropout.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from ..masks import AttentionMask
from ..masks.checks import is_int, kind_of
from ..masks.packing import Packing, take, unpack
from ..ops.attention_checks import can_read_values
from ..ops.attention_decode import attention_decode
from ..ops.attention_packed import attention_packed
from .bounds import check_dimensions, check_integers, mask_of, with_logsumexp
from .flash_attention import with_weights


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Boundaries of the sequences of a packed batch.

    Attributes:
        starts: int32 (B + 1,), rising from 0 to the number of tokens.
        longest: upper bound of the sequence lengths, an int.
        used: int32 (B,), number of tokens in use per sequence, counted from its first token; None for all.
    """

    starts: Tensor
    longest: int
    used: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Number of tokens per sequence, int32 (B,)."""
        return self.starts[1:] - self.starts[:-1]


@dataclasses.dataclass(frozen=True)
class Call:
    """Converted options of a call.

    Attributes:
        op: the public name, for the messages.
        bounds: number of visible keys to the left and right of a query's own key; None is no bound.
        alibi_slopes: float (H,) or (B, H), or None.
        dropout_p: as for ``attention``.
        options: ``scale`` and ``softcap`` of ``attention``.
    """

    op: str
    bounds: tuple[int | None, int | None]
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def by_position(self, longest_query: int) -> bool:
        """Return True if the result depends on the alignment of queries and keys."""
        left, right = self.bounds
        if left is None and self.alibi_slopes is None and right is not None and longest_query <= 1:
            return False  # the only query is at the last key
        return self.bounds != (None, None) or self.alibi_slopes is not None


def sequences(op: str, names: tuple[str, str], starts: Any, longest: Any, total: int | None) -> Sequences:
    """The sequences of a packed batch.

    Args:
        op: the public name, for the messages.
        names: argument names of ``starts`` and ``longest`` in the public function.
        total: number of tokens; None for paged keys.

    Raises:
        TypeError: for starts that are not an int32 tensor, or a longest that is not an int.
        ValueError: for starts of another shape; on a CPU, also unless they rise from 0 to the number of tokens, or for
            a sequence beyond ``longest``.
    """
    of_starts, of_longest = names
    if not isinstance(starts, Tensor) or starts.dtype != torch.int32:
        raise TypeError(f"{op}: {of_starts} must be an int32 tensor (B + 1,), got {kind_of(starts)}")
    if starts.dim() != 1 or starts.shape[0] == 0:
        raise ValueError(f"{op}: {of_starts} must be (B + 1,), got shape {tuple(starts.shape)}")
    if isinstance(longest, Tensor):
        longest = int(longest)
    if not is_int(longest):
        raise TypeError(f"{op}: {of_longest} must be an int, got {type(longest).__name__}")
    if can_read_values(starts):
        host = starts.tolist()
        lengths = [end - start for start, end in itertools.pairwise(host)]
        if host[0] != 0 or (total is not None and host[-1] != total) or min(lengths, default=0) < 0:
            to = "" if total is None else f" to {total}, the number of tokens"
            raise ValueError(f"{op}: {of_starts} must rise from 0{to}, got {host}")
        if max(lengths, default=0) > longest:
            raise ValueError(
                f"{op}: {of_longest} is {longest}, but a sequence of {of_starts} has {max(lengths)} tokens"
            )
    return Sequences(starts, longest)


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, call: Call, more: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of each sequence to its own keys, the last query at the last key.

    Args:
        q: (Tq, H, D).
        k, v: (Tk, Hkv, D).
        more: also return the logsumexp, and with dropout the weights.

    Returns:
        out (Tq, H, D), 0 for a query that sees no key; logsumexp (H, Tq), -inf for a query that sees no key; and the
        weights (B, H, max_seqlen_q, max_seqlen_k) before dropout, negative where a weight is dropped. None for values
        that are not requested.
    """
    _check_batch(call.op, q, queries.starts, keys.starts)
    slopes = call.alibi_slopes
    dropped = more and call.dropout_p > 0.0  # the weights are requested
    if dropped or (slopes is not None and slopes.dim() != 1):
        return _padded_attention(q, k, v, queries, keys, call, more)
    options: dict[str, Any] = call.options | {"dropout_p": call.dropout_p, "empty_rows": "zero"}
    options |= {"max_seqlen_q": queries.longest, "max_seqlen_k": keys.longest, "seqused_k": keys.used}
    if call.by_position(queries.longest):
        # With one tensor of starts, queries and keys are equally many, so both alignments agree.
        same = queries.starts is keys.starts and keys.used is None
        options |= {"mask": mask_of(call.bounds, slopes), "bottom_right": not same}
    results = attention_packed(q, k, v, queries.starts, keys.starts, return_logsumexp=more, **options)
    return *with_logsumexp(results, more), None


def _padded_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, call: Call, more: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """:func:`ragged_attention` by a left-padded batch, which computes B * max_seqlen_q * max_seqlen_k scores."""
    of_q, of_k = _ending_together(queries, q), _ending_together(keys, k)
    q, k, v = (_padded(t, packing) for t, packing in ((q, of_q), (k, of_k), (v, of_k)))
    mask = mask_of(call.bounds, call.alibi_slopes, keys.longest - queries.longest)
    if not of_k.is_full:
        key = torch.arange(keys.longest, device=k.device)
        mask = mask & AttentionMask.keep((key >= keys.longest - keys.lengths[:, None])[:, None, None])
    options = call.options | {"empty_rows": "zero"}
    out, logsumexp, weights = with_weights(q, k, v, mask, call.dropout_p, options, more)
    if weights is not None:
        weights = _starting_together(_starting_together(weights, queries, 2), keys, 3)
    return *_packed_again(out, logsumexp, of_q), weights


def _packed_again(out: Tensor, logsumexp: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor | None]:
    """Pack the output (B, H, L, D) of a padded batch to (T, H, D), and its logsumexp (B, H, L) to (H, T)."""
    if logsumexp is not None:
        logsumexp = take(logsumexp.transpose(1, 2), packing).t().contiguous()
    return take(out.transpose(1, 2), packing), logsumexp


def _ending_together(of: Sequences, tokens: Tensor) -> Packing:
    """Packing of a left-padded batch (B, longest, ...), in which each sequence ends at the last position."""
    token = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
    ends = of.starts[1:].contiguous()
    if torch.compiler.is_compiling():  # ONNX has no searchsorted
        sequence = (token.unsqueeze(1) >= ends).sum(1)
    else:
        sequence = torch.searchsorted(ends, token, right=True)
    indices = (sequence + 1) * of.longest - ends.index_select(0, sequence) + token
    return Packing(of.starts, indices, ends.shape[0], of.longest, of.longest, tokens.shape[0])


def _padded(tokens: Tensor, packing: Packing) -> Tensor:
    """Pad tokens (T, H, D) to (B, H, L, D), with zeros."""
    return unpack(tokens, packing).transpose(1, 2)


def _starting_together(x: Tensor, of: Sequences, dim: int) -> Tensor:
    """Move the padding of x (B, ...) along ``dim`` behind the sequences, as zeros."""
    position = torch.arange(of.longest, device=x.device)
    lengths = of.lengths[:, None].long()
    source = (position + of.longest - lengths).clamp(max=max(of.longest - 1, 0))
    shape = [x.shape[0], *(1 for _ in x.shape[1:])]
    shape[dim] = of.longest
    moved = x.gather(dim, source.view(shape).expand_as(x))
    return moved.masked_fill((position >= lengths).view(shape), 0.0)


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequences, lengths: Tensor, pages: Tensor, call: Call, more: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of packed queries to keys in pages, the last query of each sequence at its last key. No gradient.

    Args:
        q: (Tq, H, D).
        k, v: (pages, page_size, Hkv, D).
        lengths: int (B,), number of keys per sequence.
        pages: int32 (B, max_pages), pages per sequence, in order.
        more: also return the logsumexp.

    Returns:
        out (Tq, H, D), and logsumexp (H, Tq) or None.

    Raises:
        TypeError, ValueError: for pages of another dtype, rank or device.
        RuntimeError: for a gradient.
    """
    check_integers(call.op, "block_table", pages, "(B, max_pages)", q.device)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise RuntimeError(f"{call.op}: there is no gradient with block_table; call it under torch.no_grad()")
    _check_batch(call.op, q, queries.starts)
    of_q = _ending_together(queries, q)
    options: dict[str, Any] = call.options | {"page_table": pages, "causal": False, "return_logsumexp": more}
    options["mask"] = mask_of(call.bounds, call.alibi_slopes)
    results = attention_decode(_padded(q, of_q), k, v, lengths, **options)
    return _packed_again(*with_logsumexp(results, more), of_q)


def _check_batch(op: str, q: Tensor, *starts: Tensor) -> None:
    """Raise unless all starts have the same number of sequences and are on the device of the queries."""
    for each in starts:
        if each.device != q.device:
            raise ValueError(f"{op}: the starts of sequences must be on q's device {q.device}, got {each.device}")
        if each.shape != starts[0].shape:
            got = f"{starts[0].shape[0] - 1} and {each.shape[0] - 1}"
            raise ValueError(f"{op}: there must be as many sequences of keys as of queries, got {got}")


def check_token_layout(op: str, names: tuple[str, str, str], q: Any, k: Any, v: Any, in_pages: bool) -> None:
    """Raise unless the queries are (Tq, H, D), and keys and values are (Tk, Hkv, D) or paged."""
    layout = "(pages, page_size, Hkv, D)" if in_pages else "(Tk, Hkv, D)"
    check_dimensions(op, dict(zip(names, ("(Tq, H, D)", layout, layout), strict=True)), q, k, v)
    if k.shape[:-1] != v.shape[:-1]:
        _, key, value = names
        raise ValueError(
            f"{op}: {key} and {value} must have the same {layout} except D, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
