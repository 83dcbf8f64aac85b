"""Code of the classes of transformers that have a fast class, as the tests have compared it with the fast class."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

DROPPED = "nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)"
_NETWORK = f"""
    hidden_states = self.activation_fn(self.fc1(hidden_states))
    hidden_states = nn.functional.dropout(hidden_states, p=self.activation_dropout, training=self.training)
    hidden_states = self.fc2(hidden_states)
    hidden_states = {DROPPED}
    hidden_states = residual + hidden_states"""
_CLAMP = """
        clamp_value = torch.finfo(hidden_states.dtype).max - 1000
        hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)"""
_OWN = f"""
    hidden_states = {DROPPED}
    hidden_states = residual + hidden_states"""
_DECODER = "def forward(self, hidden_states, attention_mask=None, encoder_hidden_states=None, " \
    "encoder_attention_mask=None, cache=None, use_cache=True, **kwargs):"  # fmt: skip
_CROSS = "key_value_states=encoder_hidden_states, attention_mask=encoder_attention_mask, cache=cache, **kwargs"


def _pre_norm_decoder(name: str) -> str:
    """Return the text of a decoder layer that gives its attention the states with a name, or without."""
    return f"""{_DECODER}
    residual = hidden_states
    hidden_states = self.self_attn_layer_norm(hidden_states)
    hidden_states, _ = self.self_attn({name}hidden_states, cache=cache, attention_mask=attention_mask, **kwargs){_OWN}
    if encoder_hidden_states is not None:
        residual = hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)
        hidden_states, _ = self.encoder_attn({name}hidden_states, {_CROSS})
        hidden_states = {DROPPED}
        hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.final_layer_norm(hidden_states){_NETWORK}
    return hidden_states"""


_RMS = """def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return """
_OUTPUT = """def forward(self, hidden_states, input_tensor):
    hidden_states = self.dense(hidden_states)
    hidden_states = self.dropout(hidden_states)
"""
_MEAN = """
    mean = hidden_states.mean(-1, keepdim=True)
    variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
"""
_NORM_OF_SQUARES = """
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"""


def _relative(old: str) -> str:
    """Return the text of T5's attention, with the name of the cache of a version of transformers."""
    return f"""def forward(self, hidden_states, mask=None, key_value_states=None, position_bias=None, cache=None, \
**kwargs):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.key_value_proj_dim)
    past_seen_tokens = cache.get_seq_length(self.layer_idx) if cache is not None else 0
    past_seen_tokens = past_seen_tokens.clone() if isinstance(past_seen_tokens, torch.Tensor) else past_seen_tokens
    is_cross_attention = key_value_states is not None
    query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)
    is_updated = False
    if isinstance(cache, EncoderDecoderCache):
        is_updated = cache.is_updated.get(self.layer_idx)
        if is_cross_attention:
            {old} = cache.cross_attention_cache
        else:
            {old} = cache.self_attention_cache
    else:
        {old} = cache
    current_states = key_value_states if is_cross_attention else hidden_states
    if is_cross_attention and cache is not None and is_updated:
        key_states = {old}.layers[self.layer_idx].keys
        value_states = {old}.layers[self.layer_idx].values
    else:
        kv_shape = (*current_states.shape[:-1], -1, self.key_value_proj_dim)
        key_states = self.k(current_states).view(kv_shape).transpose(1, 2)
        value_states = self.v(current_states).view(kv_shape).transpose(1, 2)
        if cache is not None:
            key_states, value_states = {old}.update(key_states, value_states, self.layer_idx%s)
            if is_cross_attention and isinstance(cache, EncoderDecoderCache):
                cache.is_updated[self.layer_idx] = True
    if position_bias is None:
        key_length = key_states.shape[-2]
        if not self.has_relative_attention_bias:
            position_bias = torch.zeros((1, self.n_heads, input_shape[1], key_length), device=query_states.device, \
dtype=query_states.dtype)
            if self.gradient_checkpointing and self.training:
                position_bias.requires_grad = True
        else:
            position_bias = self.compute_bias(input_shape[1], key_length, device=query_states.device, \
past_seen_tokens=past_seen_tokens)
    attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, \
eager_attention_forward)
    attn_output, attn_weights = attention_interface(self, query_states, key_states, value_states, mask, \
dropout=0.0 if not self.training else self.dropout, scaling=self.scaling, position_bias=position_bias, **kwargs)
    attn_output = attn_output.reshape(*input_shape, -1).contiguous()
    attn_output = self.o(attn_output)
    return (attn_output, position_bias, attn_weights)"""


TEXTS: dict[str, tuple[str, ...]] = {
    "DropoutAddNorm": (
        f"{_OUTPUT}    hidden_states = self.LayerNorm(hidden_states + input_tensor)\n    return hidden_states",
    ),
    "DropoutAdd": (f"{_OUTPUT}    hidden_states = hidden_states + input_tensor\n    return hidden_states",),
    "ActivatedLinear": (
        """def forward(self, hidden_states):
    hidden_states = self.dense(hidden_states)
    hidden_states = self.intermediate_act_fn(hidden_states)
    return hidden_states""",
    ),
    "FeedForward": (
        """def forward(self, hidden_states):
    hidden_states = self.fc1(hidden_states)
    hidden_states = self.activation_fn(hidden_states)
    hidden_states = self.fc2(hidden_states)
    return hidden_states""",
    ),
    "DistilBertFeedForward": (
        """def forward(self, input):
    return apply_chunking_to_forward(self.ff_chunk, self.chunk_size_feed_forward, self.seq_len_dim, input)
def ff_chunk(self, input):
    x = self.lin1(input)
    x = self.activation(x)
    x = self.lin2(x)
    x = self.dropout(x)
    return x""",
    ),
    "ReluFeedForward": (
        """def forward(self, hidden_states):
    hidden_states = self.wi(hidden_states)
    hidden_states = self.act(hidden_states)
    hidden_states = self.dropout(hidden_states)
    if isinstance(self.wo.weight, torch.Tensor) and hidden_states.dtype != self.wo.weight.dtype and \
(self.wo.weight.dtype != torch.int8):
        hidden_states = hidden_states.to(self.wo.weight.dtype)
    hidden_states = self.wo(hidden_states)
    return hidden_states""",
    ),
    "FeedForwardAdd": (
        """def forward(self, hidden_states):
    forwarded_states = self.layer_norm(hidden_states)
    forwarded_states = self.DenseReluDense(forwarded_states)
    hidden_states = hidden_states + self.dropout(forwarded_states)
    return hidden_states""",
    ),
    "BertLayer": (
        """def forward(self, hidden_states, attention_mask=None, encoder_hidden_states=None, \
encoder_attention_mask=None, cache=None, **kwargs):
    self_attention_output, _ = self.attention(hidden_states, attention_mask, cache=cache, **kwargs)
    attention_output = self_attention_output
    if self.is_decoder and encoder_hidden_states is not None:
        if not hasattr(self, 'crossattention'):
            raise ValueError(f'If `encoder_hidden_states` are passed, {self} has to be instantiated with \
cross-attention layers by setting `config.add_cross_attention=True`')
        cross_attention_output, _ = self.crossattention(self_attention_output, None, encoder_hidden_states, \
encoder_attention_mask, cache=cache, **kwargs)
        attention_output = cross_attention_output
    layer_output = apply_chunking_to_forward(self.feed_forward_chunk, self.chunk_size_feed_forward, \
self.seq_len_dim, attention_output)
    return layer_output""",
    ),
    "RelativeAttention": (
        _relative("curr_past_key_values") % "",
        _relative("curr_cache") % ", kwargs=kwargs",
    ),
    "RMSNorm": (
        f"{_RMS}self.weight * hidden_states.to(input_dtype)",
        f"{_RMS}(self.weight * hidden_states).to(input_dtype)",
        f"{_RMS}(self.weight.to(torch.float32) * hidden_states).to(input_dtype)",
        """def forward(self, hidden_states):
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        hidden_states = hidden_states.to(self.weight.dtype)
    return self.weight * hidden_states""",
    ),
    "RMSNormOfEps": (
        f"""def forward(self, x):
    output = self._norm(x.float())
    output = output * self.weight.float()
    return output.type_as(x){_NORM_OF_SQUARES}""",
        f"""def forward(self, x):
    output = self._norm(x.float()).type_as(x)
    return output * self.weight{_NORM_OF_SQUARES}""",
        """def forward(self, hidden_states):
    normed_output = self._norm(hidden_states.float())
    if self.with_scale:
        normed_output = normed_output * self.weight.float()
    return normed_output.type_as(hidden_states)
def _norm(self, hidden_states):
    mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps
    return hidden_states * torch.pow(mean_squared, -0.5)""",
    ),
    "LayerNorm": (
        f"""def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32){_MEAN}\
    hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
    hidden_states = self.weight.to(torch.float32) * hidden_states
    return hidden_states.to(input_dtype)""",
        f"""def forward(self, hidden_states):
    input_type = hidden_states.dtype
    hidden_states = hidden_states.float(){_MEAN}\
    hidden_states = (hidden_states - mean) / torch.sqrt(variance + self.variance_epsilon)
    hidden_states = hidden_states.to(input_type)
    y = self.weight * hidden_states + self.bias
    return y""",
    ),
    "TransposedLinear": (
        """def forward(self, x):
    size_out = x.size()[:-1] + (self.nf,)
    x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
    x = x.view(size_out)
    return x""",
    ),
    "EncoderLayer": (
        f"""def forward(self, hidden_states, attention_mask, **kwargs):
    residual = hidden_states
    hidden_states, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs){_OWN}
    hidden_states = self.self_attn_layer_norm(hidden_states)
    residual = hidden_states{_NETWORK}
    hidden_states = self.final_layer_norm(hidden_states)
    if hidden_states.dtype == torch.float16 and (not torch.isfinite(hidden_states).all()):{_CLAMP}
    return hidden_states""",
    ),
    "PreNormEncoderLayer": (
        f"""def forward(self, hidden_states, attention_mask, **kwargs):
    residual = hidden_states
    hidden_states = self.self_attn_layer_norm(hidden_states)
    hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs){_OWN}
    residual = hidden_states
    hidden_states = self.final_layer_norm(hidden_states){_NETWORK}
    if hidden_states.dtype == torch.float16:{_CLAMP}
    return hidden_states""",
    ),
    "DecoderLayer": (
        f"""{_DECODER}
    residual = hidden_states
    hidden_states, _ = self.self_attn(hidden_states, cache=cache, attention_mask=attention_mask, **kwargs){_OWN}
    hidden_states = self.self_attn_layer_norm(hidden_states)
    if encoder_hidden_states is not None:
        residual = hidden_states
        hidden_states, _ = self.encoder_attn(hidden_states, {_CROSS})
        hidden_states = {DROPPED}
        hidden_states = residual + hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)
    residual = hidden_states{_NETWORK}
    hidden_states = self.final_layer_norm(hidden_states)
    return hidden_states""",
    ),
    "PreNormDecoderLayer": (_pre_norm_decoder("hidden_states="), _pre_norm_decoder("")),
}
"""Texts of ``forward``, and of the methods that it calls, by fast class, as :func:`text_of` returns them."""

CALLED = ("_norm", "ff_chunk")
"""Methods that a forward calls."""


def text_of(kind: type) -> str:
    """Return the code of a class without annotations, comments and decorators; a cache is called ``cache``."""
    methods = [kind.forward, *(vars(kind)[name] for name in CALLED if name in vars(kind))]
    return "\n".join(map(_text, methods))


def _text(method: Callable[..., Any]) -> str:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method)))).body
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list, function.returns = [], None
    arguments = function.args
    for argument in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    if isinstance(function.body[0], ast.Expr):  # a docstring
        del function.body[0]
    return re.sub(r"\bpast_key_values\b", "cache", ast.unparse(function))
