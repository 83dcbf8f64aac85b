"""Flattened batches: rows of several sequences without padding, as transformers' ``DataCollatorWithFlattening`` makes.

``cu_seq_lens_q`` tells the attention of every layer where the sequences begin, as it tells FlashAttention. Positions
that start again tell it the mask functions; those of transformers read them for decoders only.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..masks import AttentionMask
from ..masks.arguments import parts_beside
from ..tensor_cache import get_or_compute

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


def apart(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a mask function of transformers that keep the sequences of a flattened batch apart.

    transformers does so for decoders without a cache. Here a sequence begins wherever the ``position_ids`` that the
    model was given return to the first position of their row, for any model without a padding mask. Other steps between
    positions mean nothing. On a GPU the question waits for the device, as transformers' own does.
    """
    from transformers import masking_utils

    rows, queries = kwargs.get("batch_size"), kwargs.get("q_length")
    if kwargs.get("attention_mask") is not None or kwargs.get("kv_length") != queries:
        return kwargs
    positions = _given_to_running_model("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != queries:
        return kwargs
    if positions.shape[0] != rows and positions.shape[0] != 1:
        return kwargs
    if positions.device.type == "cpu":  # a write through NumPy is not counted
        numbers = _numbers(positions)
    else:
        numbers = get_or_compute(positions, ("flattened",), (), lambda: _numbers(positions))
    if numbers is None or split(kwargs["mask_function"])[1] is not None:
        return kwargs
    positions, numbers = (t.expand(rows, -1) for t in (positions, numbers))
    pattern = masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(numbers), _by_position(kwargs["mask_function"], positions)
    )
    return kwargs | {"mask_function": pattern, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


def _numbers(positions: Tensor) -> Tensor | None:
    """Sequence number per token, int64 (B, L); None for rows of one sequence, and for positions that never rise."""
    begins = positions.diff(dim=1) != 1
    returns = positions[:, 1:] == positions[:, :1]
    if not bool(begins.any()) or bool(begins.all()) or bool((begins & ~returns).any()):
        return None
    return nn.functional.pad(begins.cumsum(1), (1, 0))


def _by_position(mask_function: Any, positions: Tensor) -> Any:
    """Mask function of the positions of a query and a key instead of their places in the row."""

    def by_position(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, positions[batch, query], positions[batch, key])

    by_position.within = mask_function  # type: ignore[attr-defined]
    return by_position


def _given_to_running_model(name: str) -> Any:
    """Keyword argument of the innermost model of transformers that runs; None if it was not given, and for a mask of
    cross-attention, whose keys have no positions."""
    from transformers import PreTrainedModel

    frame, model = sys._getframe(1), None
    while frame is not None:
        if frame.f_locals.get("encoder_hidden_states") is not None and _makes_a_mask(frame):
            return None
        caller = frame.f_locals.get("self")
        if isinstance(caller, PreTrainedModel):
            if model is not None and caller is not model:
                break
            model = caller
            given = frame.f_locals.get("kwargs")
            if isinstance(given, dict) and given.get(name) is not None:
                return given[name]
        frame = frame.f_back
    return None


def _makes_a_mask(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "transformers.masking_utils"


def split(pattern: Any) -> tuple[list[Any], Tensor | None]:
    """Split a mask function of transformers into functions of the distance, and sequence numbers per token (B, L).

    transformers joins a mask with the sequences that it has found in ``position_ids``; within a sequence, a function of
    the distance is the same for positions and for places in the row.
    """
    if not inspect.isfunction(pattern) or pattern.__module__ != "transformers.masking_utils":
        return [getattr(pattern, "within", pattern)], None
    inner = inspect.getclosurevars(pattern).nonlocals
    match pattern.__qualname__.partition(".")[0]:
        case "packed_sequence_mask_function":
            return [], inner["packed_sequence_mask"]
        case "remap_positions_for_packed_sequence":
            return [inner["mask_function"]], None
        case "and_masks":
            parts = [split(part) for part in inner["mask_functions"]]
            numbers = [ids for _, ids in parts if ids is not None]
            if len(numbers) == 1:
                return [part for some, _ in parts for part in some], numbers[0]
    return [pattern], None
