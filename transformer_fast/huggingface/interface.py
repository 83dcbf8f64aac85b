"""Models and modules that call transformers' attention interface, by what transformers says of them; and our names.

transformers accepts a registered name for every model class, but many older models compute attention themselves, and
take only their mask from the implementation. Such a model would be right, because our masks are those of transformers,
but would not use the attention that was asked for by name. So it is refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

OWN_ATTENTION = "its layers compute attention by themselves, and do not call transformers' attention interface"

LACKS = {
    "axk2": "indices", "deepseek_v32": "indices", "dots3_note": "indices", "glm_moe_dsa": "indices",
    "hy_v4": "indices", "inkling2": "sinks", "minimax_m3_vl": "block_indices", "mistral_large4": "indices",
}  # fmt: skip
"""Argument that the layers of a model always give to their attention and that the kernels lack, by the model's
folder."""
ASKS_FOR_SDPA = {
    "edgetam", "edgetam_video", "gemma4", "gemma4_unified", "glm5_next", "qwen2_5_omni", "sam2", "sam2_video", "sam3",
    "sam3_lite_text", "sam3_tracker", "sam3_tracker_video",
}  # fmt: skip
"""Folders of models whose code compares the name of its attention with "sdpa"."""
WITHOUT_IS_CAUSAL = {
    "AlignTextSelfAttention", "ClapTextSelfAttention", "DogeAttention", "LayoutLMSelfAttention",
    "Llama4VisionAttention", "MarkupLMSelfAttention", "MllamaTextCrossAttention", "MllamaVisionAttention",
    "SplinterSelfAttention",
}  # fmt: skip
"""Classes of transformers that call the interface, and do not say if they are causal. All others say it, as
FlashAttention needs it."""


def folder_of(kind: type) -> str:
    """Folder of the model to which a class of transformers belongs; "" for other classes."""
    package, _, rest = kind.__module__.partition(".models.")
    return rest.partition(".")[0] if package == "transformers" else ""


def calls_the_interface(module: nn.Module) -> bool:
    """Return True for a module of transformers that calls the interface: its file imports the table of functions."""
    definer = next(base for base in type(module).__mro__ if "forward" in vars(base))
    if definer.__module__.startswith("transformers."):
        functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        if vars(sys.modules[definer.__module__]).get("ALL_ATTENTION_FUNCTIONS") is not functions:
            return False
    elif not definer.__module__.startswith("transformer_fast.huggingface."):
        return False
    own = module.__dict__
    return "config" in own and ("is_causal" in own or type(module).__name__ in WITHOUT_IS_CAUSAL)


def can_use(model: type[nn.Module]) -> bool:
    """Return True if transformers lets a class of models have another attention."""
    can = getattr(model, "_can_set_attn_implementation", None)  # since transformers 4.54
    return can is None or can()


_COMMON_ARGUMENTS = {
    "module", "query", "key", "value", "query_states", "key_states", "value_states", "attention_mask", "scaling",
    "dropout", "is_causal", "position_bias", "sliding_window", "softcap", "s_aux", "output_attentions", "training",
    "kwargs", "args",
}  # fmt: skip


def own_arguments(layer: type[nn.Module]) -> tuple[str, ...]:
    """Arguments that only the eager attention in a layer's file has. torch.compile does not trace into it."""
    return _own_arguments(layer)


own_arguments._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in tracing.py


def eager_attention(layer: type[nn.Module]) -> Any:
    """Eager attention in the file of a layer's author; None if there is none."""
    definer = getattr(layer, "_former", None)
    kind = layer if definer is None else definer.kind
    return getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)


@functools.cache
def _own_arguments(layer: type[nn.Module]) -> tuple[str, ...]:
    eager = eager_attention(layer)
    names = () if eager is None else inspect.signature(eager).parameters
    return tuple(name for name in names if name not in _COMMON_ARGUMENTS)


def lacks(modules: Iterable[nn.Module]) -> str:
    """Reason why the kernels do not serve the attention among these modules, or ""."""
    for module in modules:
        if (argument := LACKS.get(folder_of(type(module)))) and calls_the_interface(module):
            return f"its {type(module).__name__} gives {argument} to its attention, which the kernel lacks"
    return ""


def asks_for_sdpa(modules: Iterable[nn.Module]) -> bool:
    """Return True if the code of a model compares the name of its attention with "sdpa"."""
    return any(folder_of(type(module)) in ASKS_FOR_SDPA for module in modules)


@functools.cache
def models_of(config: type) -> tuple[Any, ...]:
    """Classes of models that have a class of configs."""
    from transformers import PreTrainedModel

    found, todo = [], [PreTrainedModel]
    for kind in todo:
        todo.extend(kind.__subclasses__())
        if getattr(kind, "config_class", None) is config:
            found.append(kind)
    return tuple(found)


@functools.cache
def _supports_sdpa(config: type) -> bool:
    kinds = models_of(config)
    return bool(kinds) and all(kind._supports_sdpa and can_use(kind) for kind in kinds)


def supports_sdpa(config: type) -> bool:
    """Return True if all models of a class of configs have layers that take the masks of "sdpa"."""
    return _supports_sdpa(config)


supports_sdpa._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in tracing.py


def supports_flash(config: type) -> bool:
    """Return True if all models of a class of configs compute flattened batches by their boundaries alone."""
    kinds = models_of(config)
    return bool(kinds) and all(getattr(kind, "_supports_flash_attn", False) for kind in kinds)


def check(config: Any) -> None:
    """Check a config for which a mask is made.

    Raises:
        NotImplementedError: if the models of the config do not call the interface. The message names the class of the
            config, the implementation, and an alternative.
    """
    kinds = models_of(type(config))
    if kinds and not any(map(can_use, kinds)):
        name = config._attn_implementation
        raise NotImplementedError(
            f'models of {type(config).__name__} cannot use attn_implementation="{name}": {OWN_ATTENTION}. Use '
            'attn_implementation="eager"; tfast.accelerate(model) still swaps the norms and embeddings it knows. Where '
            "it is a part of a larger model, name one for each part, such as "
            f'attn_implementation={{"text_config": "{name}", "vision_config": "eager"}}'
        )


NAME = "transformer_fast"
"""Name that a user chooses."""

NAMES = {"eager": f"{NAME}_eager", "sdpa": f"{NAME}_sdpa"}
"""Names that ``accelerate`` writes into a model's configs, by the former implementation. The model keeps its masks."""

registered: set[str] = set()
"""All names of our attention, once transformers knows them."""


def is_ours(name: str | None) -> bool:
    """Return True for a name of our attention."""
    return name in registered
