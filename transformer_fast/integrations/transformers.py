"""Hugging Face transformers: ``attn_implementation="transformer_fast"``.

>>> tfast.integrations.transformers.register()
>>> model = AutoModel.from_pretrained(name, attn_implementation="transformer_fast")

Grouped heads are read in place, attention dropout is drawn inside the kernel, and with ``output_attentions=True`` a
separate kernel computes the weights. A query with every key blocked (left padding) attends uniformly, as "eager"
computes.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layers.padded_calls import GAPS, StaysPaddedError
from ..masks import AttentionMask
from ..tracing import is_traced, sizes
from . import dispatch, unpadded
from .lazy_bias import LazyBias
from .lazy_mask import LazyMask, PackedLazyMask, bounds_of

NAME = "transformer_fast"
SPARSE = {
    "sinks": "a sink for each query",
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by blocks",
}
"""Arguments that some models always pass to attention and that the kernels lack."""
_UNSUPPORTED = {**SPARSE, "cache": "a paged cache", "head_mask": "masks of whole heads"}
_registered: set[str] = set()


def register(name: str = NAME) -> None:
    """Register ``attn_implementation=name`` with transformers (4.53 or later); repeated calls are allowed.

    After that, a model whose layers do not call transformers' attention interface is refused if it is made with this
    name or gets the name later. ``PreTrainedModel.__init__``, ``post_init`` and ``set_attn_implementation`` are
    extended by this check, because transformers checks only "sdpa" and its other own names.

    Raises:
        ImportError: if transformers is missing or older.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise ImportError(
            "integrations.transformers needs Hugging Face transformers 4.53 or later: pip install -U transformers"
        ) from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    if not _registered:
        _check_models_of(PreTrainedModel)
    _registered.add(name)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
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
        position_bias: float, added to the scores.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)`` before biases are added.
        s_aux: (H,), attention sinks.

    Returns:
        (B, Lq, H, D), and with ``output_attentions=True`` the weights (B, H, Lq, Lk) after dropout.

    Raises:
        NotImplementedError: for features that the kernels lack (sparse attention by indices, masks of whole heads,
            paged caches), and for an argument that only the model's own eager attention has.
    """
    for option, what in _UNSUPPORTED.items():
        if kwargs.get(option) is not None:
            layer = type(module).__name__
            raise NotImplementedError(f'{layer}: attn_implementation="{NAME}" has no {what} ({option}=); use "eager"')
    for option in getattr(type(module), dispatch.OWN_ARGUMENTS, ()):
        if kwargs.get(option) is not None:
            layer = type(module).__name__
            raise NotImplementedError(
                f'{layer}: attn_implementation="{NAME}" has no such argument ({option}=); use "eager"'
            )
    wanted = "dropped" if kwargs.get("output_attentions") or weights_are_captured() else False
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    if isinstance(attention_mask, PackedLazyMask) and not wanted:
        packed_mask = _packed_mask(attention_mask, position_bias)
        if packed_mask is not None:
            tokens = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
            queries, keys = attention_mask.packed.queries, attention_mask.packed.keys
            lengths = {"max_q": queries.max_length, "max_k": keys.max_length}
            bounds = queries.cu_seqlens, keys.cu_seqlens
            out = ops.attention_packed(*tokens, *bounds, mask=packed_mask, **lengths, **options)
            return out.unsqueeze(0), None
    if sizes(query)[0] != sizes(key)[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    mask, bias = _mask_and_bias(attention_mask, query.shape[2], key.shape[2])
    if attention_mask is None and sizes(query)[2] > 1:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = AttentionMask.causal() if is_causal else mask
    if isinstance(position_bias, LazyBias) and position_bias.shape[2:] == (query.shape[2], key.shape[2]):
        mask = position_bias.mask if mask is None else mask & position_bias.mask
    elif position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    result = ops.attention(query, key, value, mask, bias=bias, return_weights=wanted, **options)
    out, weights = result if wanted else (result, None)
    return out.transpose(1, 2).contiguous(), weights


def weights_are_captured() -> bool:
    """Return True if transformers records the weights of this call. Layers such as GPT-2's do not pass
    ``output_attentions`` on; transformers captures the weights that the layer returns."""
    capturing = sys.modules.get("transformers.utils.output_capturing")  # since transformers 5
    if capturing is None or torch.compiler.is_compiling():
        return False
    return any("attentions" in key for key in capturing._active_collector.get() or ())


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Mask function for transformers: the bool keep mask of "sdpa", (B, 1, Lq, Lk).

    Padding, look-ahead and sliding windows stay in normal form, which the kernels read; a dense tensor is made only if
    other code reads the mask. For other patterns the result is the dense tensor, or None if ``is_causal`` of the layers
    suffices.

    Raises:
        NotImplementedError: if the calling model does not use transformers' attention interface.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    config = kwargs.get("config")
    if not torch.compiler.is_compiling():
        dispatch.refuse_caller(config, _registered)
        if not (args or is_traced()) and (lazy := _lazy_mask(**kwargs)) is not None:
            lazy.call = unpadded.current()
            return lazy
    elif not dispatch.is_checked(config):  # tracing hides the caller: make a mask for all
        return eager_mask(*args, **kwargs)
    if dispatch.needs_masks(config):
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **kwargs)


def _lazy_mask(
    *,
    batch_size: int | None = None,
    q_length: int | None = None,
    kv_length: int | None = None,
    q_offset: int | Tensor | None = None,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> LazyMask | None:
    """Mask in normal form, from the arguments of transformers' mask functions; None if it has no normal form."""
    if not all(type(n) is int for n in (batch_size, q_length, kv_length, q_offset, kv_offset)):
        return None
    mask = bounds_of(mask_function, q_offset - kv_offset)
    if mask is None:
        return None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[1] < kv_offset + kv_length:
            return None
        keys = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        if not keys.all():
            mask = mask & AttentionMask.keep(keys[:, None, None])
    return LazyMask(mask, (batch_size, 1, q_length, kv_length), torch.device(device))


def _check_models_of(base: type[nn.Module]) -> None:
    """Extend transformers' base class by the checks of ``dispatch``, before and after a model's layers are made."""
    init, post_init = base.__init__, base.post_init
    set_implementation = getattr(base, "set_attn_implementation", None)  # since transformers 4.54

    @functools.wraps(init)
    def checked_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if (name := dispatch.implementation_of(self)) in _registered:
            dispatch.refuse_class(type(self), name)

    @functools.wraps(post_init)
    def checked_post_init(self: nn.Module) -> None:
        post_init(self)
        dispatch.refuse(self, _registered)

    @functools.wraps(set_implementation or post_init)
    def checked_set(self: nn.Module, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        before = [(config, config._attn_implementation) for config in dispatch.configs_of(self)]
        set_implementation(self, attn_implementation, *args, **kwargs)
        try:
            dispatch.refuse(self, _registered, dispatch.asked_of(self, attn_implementation))
        except NotImplementedError:
            for config, implementation in before:
                config._attn_implementation_internal = implementation
            raise

    base.__init__, base.post_init = checked_init, checked_post_init
    if set_implementation is not None:
        base.set_attn_implementation = checked_set


def _packed_mask(mask: PackedLazyMask, position_bias: Tensor | None) -> AttentionMask | None:
    """Mask parts of a packed batch, counted within each sequence; None if the bias is a tensor."""
    within = mask.packed.window or AttentionMask()
    if position_bias is None:
        return within
    if mask.has_gaps:
        raise StaysPaddedError(GAPS)
    return within & position_bias.mask if isinstance(position_bias, LazyBias) else None


def _mask_and_bias(mask: Tensor | None, Lq: int, Lk: int) -> tuple[AttentionMask | None, Tensor | None]:
    if mask is None:
        return None, None
    if isinstance(mask, LazyMask) and mask.shape[2:] == (Lq, Lk):
        return mask.mask, None
    mask = mask[..., :Lk]  # a static cache may be longer than its content
    if mask.is_floating_point():
        return None, mask
    if sizes(mask)[2] > 1 and mask.stride(2) == 0:  # the bias is equal for all queries
        mask = mask[:, :, :1]
    return AttentionMask.keep(mask), None
