"""Flattened batches: rows of several sequences without padding, as transformers' ``DataCollatorWithFlattening`` makes.

``cu_seq_lens_q`` tells the attention of every layer where the sequences begin, as it tells FlashAttention. Positions
alone tell nothing here; those of a decoder, transformers itself reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..masks import AttentionMask
from ..masks.arguments import parts_beside

_STARTS = "cu_seq_lens_q"
_PACKED_PARTS = "causal_offset", "window_offset", "document_ids", "distance_biases"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Sequences of the queries and keys of one call, from the arguments of transformers' attention interface.

    Attributes:
        starts: int32 (B + 1,), the first token of each sequence and the end of the last one.
        most: length of the longest sequence; None if the caller did not say.
    """

    starts: Tensor
    most: int | None

    @staticmethod
    def of(module: nn.Module, query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bounds | None:
        """Bounds that the caller gave; None if there are none.

        Raises:
            NotImplementedError: for cross-attention, whose queries and keys belong to different sequences.
            TypeError: for bounds that are no integer tensor (B + 1,).
            ValueError: for bounds that do not fit the tokens. On a GPU the values are not read.
        """
        starts, keys = given.get(_STARTS), given.get("cu_seq_lens_k")
        if starts is None and keys is None:
            return None
        layer, config = type(module).__name__, getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
            raise NotImplementedError(
                f"{layer}: {_STARTS} says where the sequences of one row begin, but a model with cross-attention has a "
                "row for the encoder and one for the decoder; pad the batch, and leave the padding out by "
                "accelerate(model, packed=True)"
            )
        if not isinstance(starts, Tensor) or starts.is_floating_point() or starts.dim() != 1:
            what = f"{starts.dtype} {tuple(starts.shape)}" if isinstance(starts, Tensor) else type(starts).__name__
            raise TypeError(f"{layer}: {_STARTS} must be an integer tensor (B + 1,), got {what}")
        tokens = query.shape[2]
        fits = query.shape[0] == key.shape[0] == 1 and key.shape[2] == tokens
        if starts.device.type == "cpu" and not torch.compiler.is_compiling():
            fits = fits and _rises(starts, tokens) and (keys is None or keys is starts or torch.equal(keys, starts))
        if not fits:
            raise ValueError(
                f"{layer}: {_STARTS} and cu_seq_lens_k must be equal and rise from 0 to the number of tokens of a row, "
                f"as DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them; got {starts.numel()} bounds "
                f"for {query.shape[0]} rows of {tokens} tokens and {key.shape[2]} keys"
            )
        most = given.get("max_length_q")
        if isinstance(most, Tensor):
            most = None if torch.compiler.is_compiling() else int(most)
        return Bounds(starts.to(torch.int32), most)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, keys: Bounds, **options: Any
    ) -> Tensor:
        """Attention (1, Tq, H, D) of each of these sequences to that of the keys.

        Args:
            query, key, value: (1, H, Tq, D) and (1, Hkv, Tk, D).
            mask: parts that :func:`transformer_fast.attention_packed` takes; offsets count within each sequence.
            keys: sequences of the keys.
            options: scale, softcap, sinks and others of :func:`transformer_fast.attention_packed`.
        """
        tokens = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
        lengths = {"max_q": self.most, "max_k": keys.most}
        return ops.attention_packed(*tokens, self.starts, keys.starts, mask=mask, **lengths, **options).unsqueeze(0)

    def documents(self, tokens: int) -> AttentionMask:
        """The sequences as a part of a mask."""
        places = torch.arange(tokens, device=self.starts.device, dtype=torch.int32)
        return AttentionMask.documents(torch.searchsorted(self.starts[1:].contiguous(), places, right=True)[None])


def is_packable(mask: AttentionMask) -> bool:
    """Return True if a packed batch can have this mask."""
    return not parts_beside(mask, *_PACKED_PARTS)


def _rises(starts: Tensor, end: int) -> bool:
    values = starts.tolist()
    return values[:1] == [0] and values[-1:] == [end] and values == sorted(values)


def mask_within(is_causal: bool, window: int | None) -> AttentionMask | None:
    """Mask within each sequence, as FlashAttention's arguments say it: look-ahead and sliding window; None for none."""
    if window is not None:
        return AttentionMask.window(window - 1, 0 if is_causal else window - 1)
    return AttentionMask.causal() if is_causal else None
