"""The attention and the masks of ``attn_implementation="transformer_fast"`` in Hugging Face transformers.

Grouped heads are read in place, attention dropout is drawn inside the kernel, and with ``output_attentions=True`` a
separate kernel computes the weights. A query with every key blocked (left padding) attends uniformly, as "eager"
computes; in a model that was "sdpa" before ``accelerate`` it gets zeros, as there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .. import backends
from ..layers.attention import module_attention
from ..layers.padded_calls import StaysPaddedError
from ..masks import AttentionMask
from . import interface
from .interface import NAME, NAMES, registered
from .masks import LazyMask, bounds_of
from .tokens import BOUNDARIES, Boundaries, Bounds, flat, is_full, is_packable, mask_within

_UNSUPPORTED = {
    "sinks": "a sink for each query",
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by blocks",
    "cache": "a paged cache",
    "head_mask": "masks of whole heads",
}
"""Arguments of attention that the kernels lack."""


def register(name: str = NAME) -> None:
    """Register ``attn_implementation=name`` with transformers (4.53 or later); repeated calls are allowed.

    A model that asks for a mask under this name, but whose layers do not call transformers' attention interface, is
    refused then. transformers itself checks only "sdpa" and its other own names.

    Raises:
        ImportError: if transformers is missing or older.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "integrations.transformers needs Hugging Face transformers 4.53 or later: pip install -U transformers"
        ) from error
    for key, forward, mask in (
        (name, attention_forward, attention_mask),
        (NAMES["eager"], eager_forward, eager_attention_mask),
        (NAMES["sdpa"], sdpa_forward, sdpa_attention_mask),
    ):
        AttentionInterface.register(key, forward)
        AttentionMaskInterface.register(key, mask)
        registered.add(key)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | AttentionMask | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    empty_rows: str = "uniform",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with the signature of transformers' attention interface.

    Args:
        module: the layer; its ``is_causal`` is the default of ``is_causal``.
        query: (B, H, Lq, D).
        key, value: (B, Hkv, Lk, D) with ``H % Hkv == 0``.
        attention_mask: None; or broadcastable to (B, H, Lq, Lk), bool (True = kept) or float (added to the scores).
        dropout: probability, on the weights.
        scaling: factor of the scores; ``1 / sqrt(D)`` by default.
        is_causal: look-ahead mask; used without ``attention_mask`` and with more than one query.
        position_bias: float, added to the scores; or relative positions as a part of a mask.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)`` before biases are added.
        s_aux: (H,), attention sinks.
        cu_seq_lens_q, max_length_q: int32 (B + 1,) and an int, where the sequences of a flattened batch begin, and the
            length of the longest; each sequence attends to itself (:mod:`.tokens`).
        empty_rows: what a query with every key blocked gets, as in :func:`~transformer_fast.attention`.
        boundaries: sequences of a stack that computes tokens alone; other masks are not read then.

    Returns:
        (B, Lq, H, D), and with ``output_attentions=True`` the weights (B, H, Lq, Lk) after dropout.

    Raises:
        NotImplementedError: for features that the kernels lack (sparse attention by indices, masks of whole heads,
            paged caches), for an argument that only the model's own eager attention has, and for a flattened batch of a
            model with cross-attention.
        ValueError: for sequences that do not fit the tokens.
    """
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    boundaries: Boundaries | None = kwargs.get(BOUNDARIES)
    if boundaries is not None:
        options["sliding_window"] = kwargs.get("sliding_window")
        return boundaries.attend(module, query, key, value, position_bias, **options), None
    if not torch.compiler.is_compiling() and flat() is not None:
        raise StaysPaddedError(f"a {type(module).__name__} does not get the boundaries of the sequences")
    for option, what in _UNSUPPORTED.items():
        if kwargs.get(option) is not None:
            layer = type(module).__name__
            raise NotImplementedError(f'{layer}: attn_implementation="{NAME}" has no {what} ({option}=); use "eager"')
    for option in interface.own_arguments(type(module)):
        if kwargs.get(option) is not None:
            layer = type(module).__name__
            raise NotImplementedError(
                f'{layer}: attn_implementation="{NAME}" has no such argument ({option}=); use "eager"'
            )
    requested = "dropped" if kwargs.get("output_attentions") or weights_are_captured() else False
    sequences = Bounds.of(module, query, key, kwargs)
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    mask, bias = _mask_and_bias(attention_mask, query.shape[2], key.shape[2])
    if sequences is not None and _is_of_boundaries(attention_mask) and interface.supports_flash(type(module.config)):
        mask, bias = mask_within(_looks_back(module, is_causal), kwargs.get("sliding_window")), None
    elif attention_mask is None and query.shape[2] > 1 and _looks_back(module, is_causal):
        mask = AttentionMask.causal()
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    options["empty_rows"] = empty_rows
    if sequences is not None:
        mask = mask or AttentionMask()
        if bias is None and not requested and is_packable(mask):
            return sequences.attend(query, key, value, mask, **options), None
        mask = mask & sequences.documents(query.shape[2])
    result = module_attention(query, key, value, mask, bias=bias, return_weights=requested, **options)
    out, weights = result if requested else (result, None)
    return out.transpose(1, 2).contiguous(), weights


def weights_are_captured(what: str = "attentions") -> bool:
    """Return True if transformers records the weights of this call, or the hidden states of its layers. Layers such as
    GPT-2's do not pass ``output_attentions`` on; transformers captures the weights that the layer returns."""
    capturing = sys.modules.get("transformers.utils.output_capturing")  # since transformers 5
    if capturing is None or torch.compiler.is_compiling():
        return False
    return any(what in key for key in capturing._active_collector.get() or ())


def _is_left_to_transformers() -> bool:
    """Return True inside of transforms of torch.func and in forward-mode differentiation."""
    return backends.in_transform() or forward_ad._current_level >= 0


def eager_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in place of "eager": without a mask every key is kept, and any mask is added to the scores.

    Arguments, result and errors are those of :func:`attention_forward`.
    """
    if _is_left_to_transformers() and (theirs := interface.eager_attention(type(module))) is not None:
        return theirs(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = attention_mask.to(query.dtype)
    elif _gives_empty_rows_gradients(attention_mask, query, key):
        attention_mask = attention_mask.dense()  # type: ignore[union-attr]
    if kwargs.get("cu_seq_lens_q") is None:
        kwargs["is_causal"] = False
    return attention_forward(module, query, key, value, attention_mask, **kwargs)


def sdpa_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention in place of "sdpa": a query with every key blocked gets zeros, and attends uniformly where there is a
    ``position_bias``, since transformers then blocks with the least finite number.

    Arguments, result and errors are those of :func:`attention_forward`.
    """
    if _is_left_to_transformers():
        return sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    return attention_forward(*args, **kwargs, empty_rows="zero" if kwargs.get("position_bias") is None else "uniform")


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Mask function of ``attn_implementation="transformer_fast"``: the mask of "eager", also where it is not needed.

    Graphs get the bool mask of "sdpa", or None, if all models of the config support that.

    Raises:
        NotImplementedError: if the calling model does not use transformers' attention interface.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    recorded = torch.compiler.is_compiling()
    if recorded and interface.supports_sdpa(type(kwargs.get("config"))):
        return sdpa_mask(*args, **kwargs)
    if not recorded and kwargs.get("config") is not None:
        interface.check(kwargs["config"])
    return _mask_as_by(eager_mask, args, kwargs, is_always_made=True)


def eager_attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Mask function in place of that of "eager"."""
    from transformers.masking_utils import eager_mask

    return _mask_as_by(eager_mask, args, kwargs)


def sdpa_attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Mask function in place of that of "sdpa"."""
    from transformers.masking_utils import sdpa_mask

    return _mask_as_by(sdpa_mask, args, kwargs)


class _IsNeeded(Exception):
    """Answer of a mask function that computes its mask: it is not None."""


def _is_left_out(theirs: Callable[..., Tensor | None], kwargs: dict[str, Any]) -> bool:
    """Return True if a mask function of transformers gives None, without computing the mask."""

    def pattern(*indices: Any) -> Any:
        raise _IsNeeded

    try:
        return theirs(**kwargs | {"mask_function": pattern}) is None
    except _IsNeeded:
        return False


def _mask_as_by(
    theirs: Callable[..., Tensor | None], args: Any, kwargs: dict[str, Any], *, is_always_made: bool = False
) -> Tensor | None:
    """Mask of a mask function of transformers; a :class:`LazyMask` if it need not be computed now.

    Padding, look-ahead and sliding windows stay in normal form, which the kernels read. For other patterns the normal
    form is the bool mask.
    """
    from transformers.masking_utils import sdpa_mask

    if torch.compiler.is_compiling() or args:
        return theirs(*args, **kwargs)
    if flat() is not None:
        return None
    shape = tuple(kwargs.get(name) for name in ("batch_size", "q_length", "kv_length"))
    mask, padding = _normal_form(**kwargs)
    if is_always_made:
        kwargs = kwargs | {"allow_is_bidirectional_skip": False}
    may_be_left_out = kwargs.get("allow_is_bidirectional_skip") or theirs is sdpa_mask
    if mask is not None and mask.key_keep_mask is not None and (shape[1] == shape[2] or mask.causal_offset is None):
        may_be_left_out = False  # a query sees each key, so the padding must be in the mask
    if mask is not None:
        if may_be_left_out and _is_left_out(theirs, kwargs):
            return None
    elif theirs is sdpa_mask:
        return sdpa_mask(**kwargs)
    else:
        keep = sdpa_mask(**kwargs | {"allow_is_causal_skip": False})
        if keep is None:
            return None
        padding = None
        mask, shape = AttentionMask.keep(keep), (keep.shape[0], *keep.shape[2:])
    dtype = torch.bool if theirs is sdpa_mask else kwargs.get("dtype", torch.float32)
    lazy = LazyMask(mask, (shape[0], 1, *shape[1:]), torch.device(kwargs.get("device", "cpu")), dtype)
    lazy.keep = padding
    return lazy


def _normal_form(
    *,
    batch_size: int | None = None,
    q_length: int | None = None,
    kv_length: int | None = None,
    q_offset: int | Tensor | None = None,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> tuple[AttentionMask | None, Tensor | None]:
    """Mask in normal form, from the arguments of transformers' mask functions, and its padding, bool (B, Lk); None for
    a mask that has no such form, and without padding."""
    if not all(type(n) is int for n in (batch_size, q_length, kv_length, q_offset, kv_offset)):
        return None, None
    # transformers sets these arguments for a pattern of its own to which nothing was added.
    is_plain = options.get("allow_is_causal_skip") or options.get("allow_is_bidirectional_skip")
    size = local_size if is_plain and not options.get("use_vmap") else None
    mask = bounds_of(mask_function, q_offset - kv_offset, size)
    if mask is None:
        return None, None
    if attention_mask is None:
        return mask, None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < kv_offset + kv_length:
        return None, None
    keys = attention_mask.to(torch.bool)
    if kv_offset or keys.shape[1] != kv_length:
        keys = keys[:, kv_offset : kv_offset + kv_length]
    if is_full(keys):
        return mask, None
    return mask & AttentionMask.keep(keys[:, None, None]), keys


def _is_of_boundaries(mask: Tensor | None) -> bool:
    """Return True for no mask, and for a mask of transformers without padding: boundaries then say what is seen."""
    return mask is None or (isinstance(mask, LazyMask) and mask.keep is None)


def _looks_back(module: nn.Module, is_causal: bool | None) -> bool:
    """Return True if a layer without a mask is causal."""
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def _gives_empty_rows_gradients(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """Return True for a call whose queries with every key blocked pass gradients on to queries and keys: "eager" adds
    its mask, and the softmax of a row of equal large numbers has the gradient of the scores below."""
    if not isinstance(mask, LazyMask) or not torch.is_grad_enabled():
        return False
    return (query.requires_grad or key.requires_grad) and mask.has_empty_rows()


def _mask_and_bias(mask: Tensor | None, Lq: int, Lk: int) -> tuple[AttentionMask | None, Tensor | None]:
    if mask is None:
        return None, None
    if isinstance(mask, LazyMask) and mask.shape[2:] == (Lq, Lk) and (normal := mask.mask).additive_bias is None:
        return normal, None
    mask = mask[..., :Lk]  # a static cache may be longer than its content
    if mask.is_floating_point():
        return None, mask
    if mask.shape[2] > 1 and mask.stride(2) == 0:  # the bias is equal for all queries
        mask = mask[:, :, :1]
    return AttentionMask.keep(mask), None
