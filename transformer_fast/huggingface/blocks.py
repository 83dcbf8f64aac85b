"""Fast forwards of transformers' own small classes: dropout, sum and norm in one pass, norms, and linear layers.

A fast class is a subclass of one class of transformers. A fast class adds no state, and reads the attributes and the
children of the module at each call. A child that is hooked, replaced or subclassed is called as transformers calls it.
``supported.py`` says which class has which fast class; ``table.py`` makes the subclasses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layers.activated import activated_linear
from ..layers.dropout import apply_dropout
from ..layers.feed_forward import linear_relu_dropout
from ..layers.hooks import is_plain
from ..layers.norm import Unsummed, norm_and_sum
from ..layers.norm import unsummed as sum_of_one_dtype
from ..layers.padded_calls import StaysPaddedError
from ..layers.products import product_of
from ..layers.torch_modules import Embedding
from ..masks import AttentionMask
from ..ops.linear import is_faster
from ..ops.norm import eager_layer_norm
from .tokens import BOUNDARIES


@dataclasses.dataclass(frozen=True)
class Former:
    """Class of transformers from which a fast class is derived.

    Attributes:
        kind: the class.
        forward: its method.
        names: arguments of the method that have a place, without ``self``.
        head: of a model around stacks, what its head reads.
        reads_last: of such a model, True if a head of one position reads the last token of a row, not the first one.
        makes_masks: of such a model, True if its stacks get padding masks, and make their masks of them.
        methods: other methods of the class whose results the fast class computes itself, by name.
    """

    kind: type[nn.Module]
    forward: Callable[..., Any]
    names: tuple[str, ...]
    head: Any = None
    reads_last: bool = False
    makes_masks: bool = False
    methods: tuple[tuple[str, Any], ...] = ()

    def is_changed(self, module: nn.Module) -> bool:
        """Return True if somebody replaced a method of the class, or of the module."""
        own, kind = module.__dict__, self.kind
        if kind.forward is not self.forward:
            return True
        return any(name in own or getattr(kind, name) is not method for name, method in self.methods)


class Fast(nn.Module):
    """First base of a fast class; the last base is the class of transformers."""

    _former: Former
    methods: tuple[str, ...] = ()
    """Other methods of a class of transformers whose results :meth:`compute` computes itself."""

    @staticmethod
    def obstacle(module: Any) -> str:
        """Reason to leave a module, or ""."""
        return ""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result of transformers' forward; None for a call that transformers' own forward must compute."""
        raise NotImplementedError


class DropoutAddNorm(Fast):
    """``LayerNorm(dropout(dense(x)) + residual)``: one pass after the linear layer."""

    def compute(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        summed = unsummed(input_tensor, self.dense(hidden_states), self.dropout)
        return norm_and_sum(self.LayerNorm, summed)[0]


class DropoutAdd(Fast):
    """``dropout(dense(x)) + residual``: one pass after the linear layer."""

    def compute(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return unsummed(input_tensor, self.dense(hidden_states), self.dropout).summed()


class _Activated(Fast):
    """A linear layer and its activation, which are one pass for int8 weights."""

    @staticmethod
    def obstacle(module: Any) -> str:
        on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
        return "" if on_cpu else "int8 weights are for a CPU"


class ActivatedLinear(_Activated):
    """``intermediate_act_fn(dense(x))``."""

    def compute(self, hidden_states: Tensor) -> Tensor:
        return activated(self.dense, self.intermediate_act_fn, hidden_states)


class FeedForward(_Activated):
    """``fc2(activation_fn(fc1(x)))``."""

    def compute(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(activated(self.fc1, self.activation_fn, hidden_states))


class DistilBertFeedForward(_Activated):
    """``dropout(lin2(activation(lin1(x))))``."""

    methods = ("ff_chunk",)

    def compute(self, input: Tensor) -> Tensor | None:
        if self.chunk_size_feed_forward:
            return None
        return self.dropout(self.lin2(activated(self.lin1, self.activation, input)))


class ReluFeedForward(Fast):
    """T5's ``wo(dropout(act(wi(x))))``: ReLU and dropout in one pass."""

    def compute(self, hidden_states: Tensor) -> Tensor | None:
        weight = getattr(self.wo, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():  # a quantised layer
            return None
        inner = activated(self.wi, self.act, hidden_states, self.dropout)
        return self.wo(inner.to(weight.dtype))  # wo may be float32 while the other layers are not


class FeedForwardAdd(Fast):
    """T5's ``x + dropout(DenseReluDense(layer_norm(x)))``: dropout and sum in one pass."""

    def compute(self, hidden_states: Tensor) -> Tensor:
        return unsummed(hidden_states, self.DenseReluDense(self.layer_norm(hidden_states)), self.dropout).summed()


class RMSNorm(Fast):
    """``weight * x / sqrt(mean(x * x) + variance_epsilon)``, of rows and a weight of one dtype."""

    kind, eps_name = "rms", "variance_epsilon"

    @staticmethod
    def obstacle(module: Any) -> str:
        weight = module._parameters.get("weight")
        return "" if weight is not None and weight.dim() == 1 else "its weight is not of one dimension"

    def compute(self, hidden_states: Tensor) -> Tensor | None:
        own = self._parameters
        weight, bias, eps, kind = own.get("weight"), own.get("bias"), getattr(self, self.eps_name), self.kind
        if weight is None or weight.dtype != hidden_states.dtype or type(eps) is not float:
            return None  # a weight that is computed, or a result of another dtype
        found = None
        if type(hidden_states) is Tensor:
            found = eager_layer_norm(hidden_states, weight, bias, eps, kind, None)
        return ops.layer_norm(hidden_states, weight, bias, eps, kind=kind) if found is None else found


class RMSNormOfEps(RMSNorm):
    """:class:`RMSNorm` whose epsilon is ``eps``, and whose argument has several names."""

    eps_name, methods = "eps", ("_norm",)

    def compute(self, *args: Tensor, **kwargs: Tensor) -> Tensor | None:
        return super().compute(*args, *kwargs.values())


class LayerNorm(RMSNorm):
    """``weight * (x - mean) / sqrt(var + variance_epsilon)``, with or without a bias."""

    kind = "layer"


class TransposedLinear(Fast):
    """``x weight + bias`` for a weight (in, out), where our product is faster."""

    @staticmethod
    def obstacle(module: Any) -> str:
        weight = module._parameters.get("weight")
        usual = weight is not None and weight.dim() == 2 and is_faster(weight.t())
        return "" if usual else "torch's product is as fast for its size"

    def compute(self, x: Tensor) -> Tensor:
        return product_of(self, x, self.weight.t(), self.bias)


class EncoderLayer(Fast):
    """BART's encoder layer: ``self_attn``, then ``fc1`` and ``fc2``. Dropout, sum and norm run in one pass.

    Attributes:
        norm_first: the norms are before attention and network, or after the sums.
    """

    norm_first = False

    def compute(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
        if hidden_states.dtype == torch.float16:  # some of these layers clamp float16
            return None
        return self.run(hidden_states, {"attention_mask": attention_mask, **others}, None)

    def run(self, x: Tensor, own: dict[str, Any], cross: dict[str, Any] | None) -> Tensor:
        """Compute the layer, given the arguments of its attentions; None skips cross-attention."""
        p, inner_p = (self.dropout, self.activation_dropout) if self.training else (0.0, 0.0)
        steps = [(self.self_attn_layer_norm, lambda x: self.self_attn(x, **own)[0])]
        if cross is not None:
            steps.append((self.encoder_attn_layer_norm, lambda x: self.encoder_attn(x, **cross)[0]))
        steps.append((self.final_layer_norm, lambda x: self.fc2(activated(self.fc1, self.activation_fn, x, inner_p))))
        if not self.norm_first:
            for norm, function in steps:
                x = norm_and_sum(norm, unsummed(x, function(x), p))[0]
            return x
        last: Tensor | Unsummed = x
        for norm, function in steps:
            normed, x = norm_and_sum(norm, last)
            last = unsummed(x, function(normed), p)
        return last.summed()  # type: ignore[union-attr]


class PreNormEncoderLayer(EncoderLayer):
    """mBART's encoder layer."""

    norm_first = True


class DecoderLayer(EncoderLayer):
    """BART's decoder layer: :class:`EncoderLayer` with attention to the outputs of an encoder."""

    def compute(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        *args: Any,
        use_cache: bool | None = True,
        **others: Any,
    ) -> Tensor | None:
        # The cache has another name in each version of transformers, and both attentions get it.
        if args or hidden_states.dtype == torch.float16:
            return None
        cross = None
        if encoder_hidden_states is not None:
            cross = {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask, **others}
        return self.run(hidden_states, {"attention_mask": attention_mask, **others}, cross)


class PreNormDecoderLayer(DecoderLayer):
    """mBART's decoder layer."""

    norm_first = True


class RelativeAttention(Fast):
    """T5's attention in a stack that computes tokens alone: the relative positions are a part of the mask.

    The first layer returns that part in place of the bias of transformers, for the layers behind it.
    """

    methods = ("compute_bias", "_relative_position_bucket")

    def compute(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: AttentionMask | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, AttentionMask, Tensor | None] | None:
        if BOUNDARIES not in kwargs:
            return None
        positions = self._positions() if position_bias is None else position_bias
        source = hidden_states if key_value_states is None else key_value_states
        q, k, v = (
            linear(x).view(*x.shape[:-1], -1, self.key_value_proj_dim).transpose(1, 2)
            for linear, x in ((self.q, hidden_states), (self.k, source), (self.v, source))
        )
        attend = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        p = self.dropout if self.training else 0.0
        out, weights = attend(self, q, k, v, mask, dropout=p, scaling=self.scaling, position_bias=positions, **kwargs)
        return self.o(out.reshape(*hidden_states.shape[:-1], -1)), positions, weights

    def _positions(self) -> AttentionMask:
        """Relative positions, with a copy of the table: sharding frees the table between layers.

        Raises:
            StaysPaddedError: if other code than that of transformers has a part in them.
        """
        if not self.has_relative_attention_bias:
            return AttentionMask()
        table, distance = self.relative_attention_bias, self.relative_attention_max_distance
        usual = type(table) in (nn.Embedding, Embedding) and len(table.weight) == self.relative_attention_num_buckets
        if usual and not (table.max_norm or table.scale_grad_by_freq or table.sparse or table.padding_idx is not None):
            with contextlib.suppress(TypeError, ValueError):  # no buckets for far distances
                return AttentionMask.relative(table.weight.clone(), distance, not self.is_decoder)
        raise StaysPaddedError("its relative positions are not those of its table alone")


def unsummed(x: Tensor, y: Tensor, drop: nn.Module | float) -> Unsummed:
    """Defer the sum ``x + drop(y)``, in the dtype in which PyTorch adds."""
    if x.dtype != y.dtype:
        x = x.to(torch.promote_types(x.dtype, y.dtype))
    return sum_of_one_dtype(x, y, drop)


def activated(linear: nn.Module, activation: Any, x: Tensor, drop: nn.Module | float = 0.0) -> Tensor:
    """Compute ``drop(activation(linear(x)))`` for a dropout module or a probability."""
    if isinstance(activation, nn.Module) and is_plain(activation, nn.ReLU):
        return linear_relu_dropout(linear, x, drop)
    if (inner := activated_linear(linear, x, activation)) is None:
        inner = activation(linear(x))
    return apply_dropout(drop, inner)
