"""Names of the parts of hand-written attention, and what a module's names and numbers say about its formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import dropout
from ...masks import AttentionMask
from ...masks.checks import broadcasts
from .base import ANY, LINEAR, Part, parameters_of

QUERY = (
    "to_q", "q", "query", "queries", "linear_q", "q_linear", "q_proj", "proj_q", "q_layer", "query_layer", "wq", "w_q",
    "W_q", "Wq", "W_Q", "w_qs", "fc_q", "q_lin", "q_net", "linear_query", "query_projection", "query_proj",
    "to_queries", "toqueries", "query_linear", "lin_q", "query_dense", "query_fc",
)  # fmt: skip
"""Names of the linear layer of queries. Those of keys and values have ``k`` and ``v`` for ``q``."""
ALL_THREE = (
    "to_qkv", "qkv", "qkv_proj", "in_proj", "c_attn", "query_key_value", "Wqkv", "W_qkv", "linear_qkv", "qkv_linear",
    "qkv_layer", "w_qkv", "kqv", "qkv_net", "proj_qkv", "in_projection", "qkv_projection",
)  # fmt: skip
"""Names of one linear layer of queries, keys and values."""
KEYS_AND_VALUES = ("to_kv", "kv", "kv_proj", "linear_kv", "kv_linear", "Wkv", "W_kv", "kv_net", "proj_kv")
"""Names of one linear layer of keys and values."""
LISTS = ("linears", "linear_layers", "projections", "qkv_layers", "proj_layers")
"""Names of a list of three linear layers, or of four with the output's."""
ROLES: Mapping[str, tuple[str, ...]] = {
    "out": ("to_out", "proj", "out_proj", "linear_out", "output_layer", "out", "dense", "output_linear", "fc",
        "fc_out", "o_proj", "wo", "W_o", "Wo", "W_O", "w_o", "o", "o_net", "c_proj", "out_lin", "fc_o",
        "unify_heads", "unifyheads", "out_linear", "projection", "final_linear", "out_projection",
        "output_projection", "output_proj", "output", "proj_o", "out_layer", "linear_o", "linear", "final",
        "o_linear", "lin_o", "to_output"),
    "dropout": ("dropout", "attn_drop", "attn_dropout", "attention_dropout", "drop", "att_drop", "att_dropout",
        "dropout_attn", "weights_dropout", "drop_attn", "dropout_module", "attn_drop_layer", "attend_dropout"),
    "out_dropout": ("proj_drop", "out_dropout", "proj_dropout", "resid_drop", "resid_dropout", "output_dropout",
        "out_drop", "dropout_out", "drop_out"),
    "softmax": ("attend", "softmax", "sm", "attn_softmax", "softmax_layer"),
    "norm": ("norm", "prenorm", "pre_norm", "input_norm", "layer_norm", "LayerNorm", "layernorm", "ln"),
    "memory_norm": ("norm_context", "context_norm", "norm_kv", "kv_norm"),
    "q_norm": ("q_norm", "norm_q", "query_norm", "q_ln", "ln_q", "qnorm"),
    "k_norm": ("k_norm", "norm_k", "key_norm", "k_ln", "ln_k", "knorm"),
}  # fmt: skip
"""Names of other children, by role."""
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "q", "queries", "Q", "x_q", "x", "hidden_states", "input_tensor", "input", "inputs", "xq",
        "q_in"),
    "key": ("key", "k", "keys", "K", "x_k", "context", "memory", "xk", "ctx", "x_kv", "kv", "y", "key_value"),
    "value": ("value", "v", "values", "V", "x_v", "xv"),
    "mask": ("mask", "attn_mask", "attention_mask", "att_mask", "src_mask", "key_padding_mask", "padding_mask",
        "x_mask", "bias", "attn_bias", "rel_pos_bias", "keep_mask", "key_mask", "pad_mask"),
    "flag": ("need_weights", "output_attentions", "return_weights", "return_attention", "return_attn",
        "need_head_weights", "return_attn_weights", "output_attention", "return_attention_weights",
        "return_attentions", "vis"),
}  # fmt: skip
"""Names of forward's arguments, by role. The first argument is the query where none has such a name."""
TABLES = ("relative_position_bias_table", "relative_position_index")
"""Learned bias per distance ((2 h - 1) (2 w - 1), heads), and its row per query and key (L, L), as in Swin."""

LAYOUTS = {"(B, L, d)": 3, "(L, B, d)": 3, "(B, N, L, d)": 4, "(B, Y, X, d)": 4}
"""Axes of inputs, and their number: attention in every one of N groups, or over a grid, has no memory and no mask."""

Kind = tuple[str, int]
"""Kind of a mask: "bool", "int" or "float", and the number of its dimensions."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Formula of a module. The numbers decide what the names leave open.

    Attributes:
        linears: names of the linear layers: of everything; of queries and of the rest; or of each. A list has one name.
        parts: names of other children, by role.
        probability: attribute with the probability of dropout of the weights, "" for none.
        table: True for a learned bias per distance.
        places: places of query, key and value, of the mask and of the flag that asks for weights, among forward's
            arguments; -1 for none.
        required, defaults: number of forward's arguments without a default, and the defaults (None for none).
        heads, scale: number of heads, and factor of the scores.
        order: axes of the result of one layer: "3hd", "h3d" or "hd3".
        layout: axes of inputs, one of ``LAYOUTS``.
        norms_memory: ``norm`` also applies to keys and values.
        residual: ``norm`` applies to the sum of input and output instead.
        returned: "tensor", "one" for (out,), or "none" for (out, None).
        stored: attribute that holds the weights of the last call.
        masks: what masks of a kind mean: (kind, meaning, place of the head axis, result of a query without a key).
    """

    linears: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    places: tuple[int, int, int, int, int]
    required: int
    defaults: tuple[Any, ...]
    probability: str = ""
    table: bool = False
    heads: int = 1
    scale: float = 1.0
    order: str = "3hd"
    layout: str = "(B, L, d)"
    norms_memory: bool = False
    residual: bool = False
    returned: str = "tensor"
    stored: str = ""
    masks: tuple[tuple[Kind, str, str, str], ...] = ()

    @property
    def children(self) -> dict[str, Part]:
        """The module's children, as parts of a pattern."""
        linear = dataclasses.replace(LINEAR, many=self.linears[0] in LISTS)
        return {**dict.fromkeys(self.linears, linear), **{name: _PARTS.get(role, ANY) for role, name in self.parts}}


_WEIGHTS_DROPOUT = Part(lambda module: type(module) in (*dropout.KINDS, nn.Identity), fused=True)
_SOFTMAX = Part(lambda module: type(module) is nn.Softmax and module.dim in (-1, 3), fused=True)
_PARTS = {"dropout": _WEIGHTS_DROPOUT, "softmax": _SOFTMAX}


def reading_of(m: nn.Module) -> Reading | None:
    """Read the names of a module; None for another structure."""
    names = [name for name, child in m._modules.items() if child is not None]
    linears = _linears(names)
    arguments = parameters_of(type(m))
    if not linears or not arguments:
        return None
    roles = {alias: role for role, aliases in ROLES.items() for alias in aliases}
    others = [name for name in names if name not in linears]
    parts = tuple((roles.get(name, ""), name) for name in others)
    found = [role for role, _ in parts]
    tables = {name for own in (m._parameters, m._buffers) for name, tensor in own.items() if tensor is not None}
    if "" in found or len(set(found)) < len(found) or tables - set(TABLES) or len(tables) == 1:
        return None
    probabilities = [name for name in ROLES["dropout"] if type(m.__dict__.get(name)) is float]
    defaults = tuple(None if p.default is p.empty else p.default for p in arguments)
    places, required = _places([p.name for p in arguments]), sum(p.default is p.empty for p in arguments)
    known = [place for place in places if place >= 0]
    if required > len({*range(required)} & {*known}) or any(
        not isinstance(defaults[place], bool | int | float | str | None) for place in range(len(defaults))
    ):
        return None
    probability = "" if "dropout" in found else (probabilities or [""])[0]
    return Reading(linears, parts, places, required, defaults, probability, table=bool(tables))


def _linears(names: Iterable[str]) -> tuple[str, ...]:
    """Names of the linear layers of queries, keys and values, in one of the known forms; () for none."""
    for alone in (*ALL_THREE, *LISTS):
        if alone in names:
            return (alone,)
    for query in QUERY:
        if query in names:
            key, value = _key_and_value(query)
            if key in names and value in names:
                return query, key, value
            both = [name for name in KEYS_AND_VALUES if name in names]
            return (query, both[0]) if both else ()
    return ()


def _key_and_value(query: str) -> tuple[str, str]:
    """Names of keys and values that go with a name of queries."""
    forms = (("queries", "keys", "values"), ("query", "key", "value"), ("q", "k", "v"), ("Q", "K", "V"))
    theirs, key, value = next(names for names in forms if names[0] in query)
    return query.replace(theirs, key, 1), query.replace(theirs, value, 1)


def _places(names: list[str]) -> tuple[int, int, int, int, int]:
    """Places of query, key, value, mask and flag among the names of arguments; -1 for none."""
    found = [next((names.index(alias) for alias in aliases if alias in names), -1) for aliases in ARGUMENTS.values()]
    if found[0] < 0 and 0 not in found:
        found[0] = 0
    return tuple(found)  # type: ignore[return-value]


def heads_and_scales(m: nn.Module, width: int) -> Iterable[tuple[int, float]]:
    """Numbers of heads and factors that a module's attributes suggest, the likely ones first."""
    numbers = {name: v for name, v in m.__dict__.items() if type(v) is int and v > 0 and width % v == 0}
    factors = [v for v in m.__dict__.values() if type(v) is float and v > 0.0]
    counts = [v for name, v in numbers.items() if "head" in name and "dim" not in name and "size" not in name]
    for heads in dict.fromkeys([*counts, *numbers.values(), *(width // v for v in numbers.values()), 1]):
        d = width // heads
        for scale in dict.fromkeys([d**-0.5, *factors, width**-0.5, 1.0, *(1.0 / f for f in factors)]):
            yield heads, scale


def kind_of(mask: Tensor) -> Kind:
    """Kind of a mask."""
    return "bool" if mask.dtype == torch.bool else "float" if mask.is_floating_point() else "int", mask.dim()


MEANINGS = ("keep", "blocked", "added")
"""Meanings of a mask: nonzero takes part; nonzero is blocked; added to the scores."""
HEAD_AXES = {2: ("", "keys"), 3: ("", "heads", "windows"), 4: ("",)}
"""Places of the missing axes of a mask, by its dimensions: in front, (B, Lk) is for keys, (B, Lq, Lk) for all heads,
and (windows, Lq, Lk) for every window in turn."""


def scores_of(mask: Tensor, meaning: str, axis: str) -> Tensor | AttentionMask:
    """Four-dimensional bias, or keep mask, of a mask with a known meaning."""
    if axis == "keys":
        mask = mask[:, None, None]
    elif axis:
        mask = mask.unsqueeze(1)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if meaning == "added":
        return mask
    kept = mask if mask.dtype == torch.bool and meaning == "keep" else mask != 0 if meaning == "keep" else mask == 0
    return AttentionMask.keep(kept)


def fits(mask: Tensor, axis: str, batch: int, queries: int, keys: int) -> bool:
    """Return True for a mask whose shape is that of its meaning, and of no other.

    With as many queries as sequences, two dimensions may be meant as (B, Lk) or as (Lq, Lk).
    """
    shape = mask.shape
    if axis == "windows":
        return shape[0] > 0 and batch % shape[0] == 0
    if not (broadcasts(shape[-2], batch if axis == "keys" else queries) and broadcasts(shape[-1], keys)):
        return False
    if len(shape) == 2:
        return shape[0] == 1 or batch != queries
    return broadcasts(shape[0], batch) or (len(shape) == 3 and not axis)


def table_of(m: nn.Module) -> Tensor:
    """Bias (1, heads, L, L) of a learned table per distance."""
    table, index = (getattr(m, name) for name in TABLES)
    return table[index.view(-1)].view(*index.shape, -1).permute(2, 0, 1).unsqueeze(0)


def is_default(value: Any, default: Any) -> bool:
    """Return True for the default of an argument."""
    return value is default or (type(value) is type(default) and not isinstance(value, Tensor) and value == default)
