"""Patterns of Hugging Face transformers blocks: attention and feed-forward with norms, dropouts and residual additions.

A fused block calls its attention as before, with all masks, caches and further arguments, and fuses dropout and
residual addition into the pass of the next norm. Many models share a structure and its names; a pattern never tests a
model's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.activated import activated_linear
from ...layers.dropout import apply_dropout, fused_p
from ...layers.evaluated_block import block_end
from ...layers.feed_forward import linear_relu_dropout
from ...layers.hooks import is_plain
from ...layers.norm import Unsummed, norm_and_sum
from ...layers.norm import unsummed as norm_unsummed
from .base import ANY, DROPOUT, LINEAR, Keywords, Part, Pattern, children, pattern_of, random_keep, swapped_by
from .norm import NORM, width_of

ATTENTION = Part(lambda module: True, returns=2)
"""Attention child: called with the block's arguments; returns output and weights."""

Step = tuple[nn.Module, Callable[[Tensor], Tensor], nn.Module | float]
"""A norm, the function before or after the norm, and the dropout of the function's output (module or probability)."""


def unsummed(x: Tensor, y: Tensor, drop: nn.Module | float) -> Unsummed:
    """Defer the sum ``x + drop(y)``, in the dtype in which PyTorch adds."""
    x = x if x.dtype == y.dtype else x.to(torch.promote_types(x.dtype, y.dtype))
    return norm_unsummed(x, y, drop)


Network = tuple[nn.Module, Any, nn.Module]
"""A feed-forward network: a linear layer, an activation, and a linear layer."""


def run(x: Tensor, steps: Iterable[Step], *, norm_first: bool, network: Network | None = None) -> Tensor:
    """Compute ``x + dropout(function(norm(x)))`` or ``norm(x + dropout(function(x)))`` per step, in order.

    Args:
        x: (B, L, d_model).
        steps: attention first.
        norm_first: True for the first formula.
        network: parts of the second and last step, if they are known.
    """
    (norm, attend, drop), *rest = steps
    attended = attend(norm(x) if norm_first else x)
    if network is not None:
        ((last_norm, _, last_drop),) = rest
        if is_off(drop) and is_off(last_drop):
            out = block_end(x, attended, None, norm, *network, last_norm, norm_first=norm_first)
            if out is not None:
                return out
    last = unsummed(x, attended, drop)
    if not norm_first:
        x, _ = norm_and_sum(norm, last)
        for norm, function, drop in rest:
            x, _ = norm_and_sum(norm, unsummed(x, function(x), drop))
        return x
    for norm, function, drop in rest:
        normed, summed = norm_and_sum(norm, last)
        last = unsummed(summed, function(normed), drop)
    return last.summed()


def is_off(drop: nn.Module | float) -> bool:
    """Return True for a dropout that drops nothing now."""
    return (fused_p(drop) if isinstance(drop, nn.Module) else drop) == 0.0


def activated(linear: nn.Module, activation: Any, x: Tensor, drop: nn.Module | float) -> Tensor:
    """Compute ``drop(activation(linear(x)))`` for a dropout module or a probability."""
    if isinstance(activation, nn.Module) and is_plain(activation, nn.ReLU):
        return linear_relu_dropout(linear, x, drop)
    if (inner := activated_linear(linear, x, activation)) is not None:
        return apply_dropout(drop, inner)
    return apply_dropout(drop, activation(linear(x)))


def block_calls(width: int, *names: str) -> Iterable[tuple[Any, ...]]:
    """Test calls of a block: with a mask and all named arguments, with extra arguments for attention, and with x alone.

    Named arguments that are not tensors are numbers, because only attention reads them.
    """
    x, mask = torch.randn(2, 5, width), random_keep(2, 1, 1, 5)
    others: dict[str, Any] = {
        "attention_mask": mask,
        "key_value_states": torch.randn(2, 3, width),
        "encoder_hidden_states": torch.randn(2, 3, width),
        "encoder_attention_mask": random_keep(2, 1, 1, 3),
        "position_bias": torch.randn(2, 1, 5, 5),
        "encoder_decoder_position_bias": torch.randn(2, 1, 5, 3),
        "past_key_values": 0.3,
        "use_cache": True,
    }
    given = {name: value for name, value in others.items() if name in ("attention_mask", *names)}
    alone = {name: value for name, value in given.items() if "encoder" not in name}
    return (x, Keywords(given)), (x, Keywords({**given, "of_no_name": 0.7})), (x, Keywords(alone)), (x, mask), (x, None)


class BartEncoderLayer(Pattern):
    """BART's encoder layer and its like: ``self_attn``, then ``fc1`` and ``fc2``, each with a norm before it or after
    the sum."""

    named = True
    parts = children(
        self_attn=ATTENTION,
        self_attn_layer_norm=NORM,
        fc1=LINEAR,
        activation_fn=dataclasses.replace(ANY, optional=True),
        fc2=LINEAR,
        final_layer_norm=NORM,
    )
    dropouts = ("dropout", "activation_dropout")

    def __init__(self, name: str, *, norm_first: bool) -> None:
        super().__init__(name)
        self.norm_first = norm_first

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return block_calls(width_of(m.final_layer_norm))

    def fused_forward(self, m: Any, hidden_states: Tensor, attention_mask: Tensor | None, **others: Any) -> Any:
        return self.run(m, hidden_states, {"attention_mask": attention_mask, **others}, None)

    def run(self, m: Any, x: Tensor, own: dict[str, Any], cross: dict[str, Any] | None) -> Tensor | None:
        """Compute the layer's output, given the arguments of its attentions; None skips cross-attention."""
        if x.dtype == torch.float16:  # some layers clamp float16, which the probe cannot see
            return None
        p, inner_p = (m.dropout, m.activation_dropout) if m.training else (0.0, 0.0)
        steps: list[Step] = [(m.self_attn_layer_norm, lambda x: m.self_attn(x, **own)[0], p)]
        if cross is not None:
            steps.append((m.encoder_attn_layer_norm, lambda x: m.encoder_attn(x, **cross)[0], p))
        steps.append((m.final_layer_norm, lambda x: m.fc2(activated(m.fc1, m.activation_fn, x, inner_p)), p))
        network = (m.fc1, m.activation_fn, m.fc2) if cross is None and inner_p == 0.0 else None
        return run(x, steps, norm_first=self.norm_first, network=network)


class BartDecoderLayer(BartEncoderLayer):
    """BART's decoder layer: as the encoder layer, with an optional ``encoder_attn``."""

    parts = children(
        **BartEncoderLayer.parts,
        encoder_attn=dataclasses.replace(ATTENTION, optional=True),
        encoder_attn_layer_norm=dataclasses.replace(NORM, optional=True),
    )

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        cross = ("encoder_hidden_states", "encoder_attention_mask") if "encoder_attn" in m._modules else ()
        return block_calls(width_of(m.final_layer_norm), "past_key_values", "use_cache", *cross)

    def fused_forward(
        self,
        m: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        past_key_values: Any,
        use_cache: bool | None,
        **others: Any,
    ) -> Tensor | None:
        others["past_key_values"] = past_key_values
        cross = None
        if encoder_hidden_states is not None:
            if "encoder_attn" not in m._modules or "encoder_attn_layer_norm" not in m._modules:
                return None
            cross = {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask, **others}
        return self.run(m, hidden_states, {"attention_mask": attention_mask, **others}, cross)


class FeedForward(Pattern):
    """``dropout(second(activation(first(x))))``; the surrounding block fuses the dropout with the next sum."""

    def __init__(self, name: str, first: str, second: str, activation: str, *, dropout: bool = True) -> None:
        super().__init__(name)
        self.names = first, second, activation
        self.parts = {first: ANY, second: ANY, activation: ANY, **({"dropout": DROPOUT} if dropout else {})}

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        first = getattr(m, self.names[0])
        return [(torch.randn(2, 5, first.in_features if hasattr(first, "in_features") else first.nx),)]

    def fused_forward(self, m: Any, x: Tensor) -> Tensor | None:
        return None if in_chunks(m) else apply_dropout(self.dropout(m), self.undropped(m, x))

    def dropout(self, m: Any) -> nn.Module | float:
        """Dropout of the output."""
        return m.dropout if "dropout" in self.parts else 0.0

    def undropped(self, m: Any, x: Tensor) -> Tensor:
        """Compute the output before the dropout."""
        first, activation, second = self.network(m)
        return second(activated(first, activation, x, 0.0))

    def network(self, m: Any) -> Network:
        """Parts of the network."""
        first, second, activation = (getattr(m, name) for name in self.names)
        return first, activation, second


def in_chunks(m: Any) -> bool:
    """Return True for a feed-forward network that runs on chunks of the sequence to bound memory."""
    return bool(getattr(m, "chunk_size_feed_forward", 0))


def feed_forward_step(norm: nn.Module, m: nn.Module) -> Step:
    """Step of a feed-forward network, whose dropout is deferred to the sum if possible."""
    pattern = pattern_of(m)
    if not isinstance(pattern, FeedForward) or in_chunks(m):
        return norm, m, 0.0
    return norm, lambda x: pattern.undropped(m, x), pattern.dropout(m)


def network_of(m: nn.Module) -> Network | None:
    """Parts of a feed-forward network that drops nothing; None for a module that must be called."""
    pattern = pattern_of(m)
    if not isinstance(pattern, FeedForward) or in_chunks(m) or not is_plain(m) or not pattern.fits(m):
        return None
    return pattern.network(m) if is_off(pattern.dropout(m)) else None


class Gpt2Block(Pattern):
    """Pre-norm ``attn``, optionally ``crossattention``, and ``mlp``, each of which ends in its own dropout."""

    named = True
    parts = children(
        ln_1=NORM,
        attn=ATTENTION,
        ln_2=NORM,
        crossattention=dataclasses.replace(ATTENTION, optional=True),
        ln_cross_attn=dataclasses.replace(NORM, optional=True),
        mlp=Part(swapped_by(FeedForward), fused=True),
    )

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        cross = ("encoder_hidden_states", "encoder_attention_mask") if "crossattention" in m._modules else ()
        return block_calls(width_of(m.ln_1), "past_key_values", "use_cache", *cross)

    def fused_forward(
        self,
        m: Any,
        hidden_states: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        use_cache: bool | None,
        **others: Any,
    ) -> Tensor | None:
        both = {"past_key_values": past_key_values, "attention_mask": attention_mask}
        own = {**both, "use_cache": use_cache, **others}
        steps: list[Step] = [(m.ln_1, lambda x: m.attn(x, **own)[0], 0.0)]
        if encoder_hidden_states is not None:
            if "crossattention" not in m._modules or "ln_cross_attn" not in m._modules:
                return None
            cross = {"encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask}
            steps.append((m.ln_cross_attn, lambda x: m.crossattention(x, **both, **cross)[0], 0.0))
        steps.append(feed_forward_step(m.ln_2, m.mlp))
        return run(hidden_states, steps, norm_first=True)


BRANCH = Part(lambda module: True, returns=1, optional=True)
"""Module that is called on the output of attention or of the network, such as a scale or stochastic depth."""


class EncoderBlock(Pattern):
    """An attention and a feed-forward network, each with its norm.

    Args:
        name: name of the pattern.
        attention, norm, mlp, last_norm: names of the children.
        norm_first: the norms are before attention and network, or after the sums.
        dropout: True if the block has one dropout for both, False if the network ends in a dropout, None for neither.
        after: names of modules on the output of attention, and on that of the network.
    """

    named = True

    def __init__(
        self,
        name: str,
        attention: str,
        norm: str,
        mlp: str,
        last_norm: str,
        *,
        norm_first: bool,
        dropout: bool | None,
        after: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    ) -> None:
        super().__init__(name)
        self.names, self.norm_first, self.dropout = (attention, norm, mlp, last_norm), norm_first, dropout
        self.after = after
        network = Part(swapped_by(FeedForward), fused=True) if dropout is False else Part(lambda m: True, returns=1)
        self.parts = {attention: ATTENTION, norm: NORM, mlp: network, last_norm: NORM}
        self.parts |= {**dict.fromkeys((*after[0], *after[1]), BRANCH), **({"dropout": DROPOUT} if dropout else {})}

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return block_calls(width_of(getattr(m, self.names[1])))

    def fused_forward(self, m: Any, hidden_states: Tensor, attention_mask: Tensor | None, **others: Any) -> Tensor:
        attention, norm, mlp, last_norm = (getattr(m, name) for name in self.names)

        def attend(x: Tensor) -> Tensor:
            return attention(x, attention_mask=attention_mask, **others)[0]

        drop: nn.Module | float = m.dropout if self.dropout else 0.0
        after = [following(m, names) for names in self.after]
        first: Step = (norm, followed(attend, after[0]), drop)
        last: Step = (last_norm, followed(mlp, after[1]), drop)
        if self.dropout is False:
            last = feed_forward_step(last_norm, mlp)
        network = None if m.training or after[1] else network_of(mlp)
        return run(hidden_states, (first, last), norm_first=self.norm_first, network=network)


def following(m: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """The children of these names that a module has and that compute something."""
    children = [m._modules[name] for name in names if m._modules.get(name) is not None]
    return [child for child in children if not is_plain(child, nn.Identity)]


def followed(function: Callable[[Tensor], Tensor], modules: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    """The function, followed by modules."""
    if not modules:
        return function

    def all_of_them(x: Tensor) -> Tensor:
        x = function(x)
        for module in modules:
            x = module(x)  # type: ignore[misc]
        return x

    return all_of_them


_DINO = (("layer_scale1", "drop_path"), ("layer_scale2", "drop_path"))


PATTERNS = (
    BartEncoderLayer("BartEncoderLayer", norm_first=False),
    BartEncoderLayer("PreNormBartEncoderLayer", norm_first=True),
    BartDecoderLayer("BartDecoderLayer", norm_first=False),
    BartDecoderLayer("PreNormBartDecoderLayer", norm_first=True),
    FeedForward("DistilBertFeedForward", "lin1", "lin2", "activation"),
    FeedForward("Gpt2FeedForward", "c_fc", "c_proj", "act"),
    FeedForward("ClipFeedForward", "fc1", "fc2", "activation_fn", dropout=False),
    Gpt2Block("Gpt2Block"),
    EncoderBlock(
        "DistilBertBlock", "attention", "sa_layer_norm", "ffn", "output_layer_norm", norm_first=False, dropout=False
    ),
    EncoderBlock("ClipLayer", "self_attn", "layer_norm1", "mlp", "layer_norm2", norm_first=True, dropout=None),
    EncoderBlock("DinoLayer", "attention", "norm1", "mlp", "norm2", norm_first=True, dropout=None, after=_DINO),
    EncoderBlock("VitLayer", "attention", "layernorm_before", "mlp", "layernorm_after", norm_first=True, dropout=True),
)
KNOWS = (
    (
        "blocks around transformers' attention",
        "BERT, BART, GPT-2, ViT, CLIP, DINOv2, DistilBERT and their relatives",
    ),
)
