"""Every module of the package that may compute a child without calling it, beside the plain module it stands for."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import handwritten_forms as forms
import torch
import transformers
from handwritten_forms import B, D, L, S, ids, keep, x
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import dialects, layers
from transformer_fast.reference import dialects as reference_dialects
from transformer_fast.reference import layers as reference_layers

VOCABULARY, HEADS, INNER = 11, 2, 12


@dataclasses.dataclass(frozen=True)
class Parent:
    """A module, arguments for it, and what makes its fused form of it: ``accelerate``, or a class of this package."""

    make: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Any, ...]]
    fuse: Callable[[nn.Module], nn.Module] | None = None  # None: accelerate, before or after a change


def _of_class(fast: ModuleType, oracle: ModuleType, name: str, *sizes: Any, **options: Any) -> dict[str, Any]:
    def fuse(plain: nn.Module) -> nn.Module:
        made = getattr(fast, name)(*sizes, **options)
        made.load_state_dict(plain.state_dict())
        return made

    return {"make": lambda: getattr(oracle, name)(*sizes, **options), "fuse": fuse}


class Padded(nn.Module):
    """A stack over a padded batch. ``torch.nn`` leaves padded positions undefined, so that they are 0 here."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.stack(x, src_key_padding_mask=padding).masked_fill(padding.unsqueeze(-1), 0.0)


def _torch_layer(kind: type[nn.Module], **options: Any) -> nn.Module:
    return kind(D, HEADS, INNER, batch_first=True, **options)


def _padding() -> Tensor:
    return torch.arange(L) >= torch.tensor([[L], [4]])


def _look_ahead() -> Tensor:
    return torch.ones(L, L, dtype=torch.bool).triu(1)


_encoder_layer = functools.partial(_torch_layer, nn.TransformerEncoderLayer)
_decoder_layer = functools.partial(_torch_layer, nn.TransformerDecoderLayer)

TORCH: dict[str, Parent] = {
    "LayerNorm": Parent(lambda: nn.LayerNorm(D), lambda: (x(),)),
    "RMSNorm": Parent(lambda: nn.RMSNorm(D), lambda: (x(),)),
    "Embedding": Parent(lambda: nn.Embedding(VOCABULARY, D), lambda: (ids(),)),
    "Dropout": Parent(lambda: nn.Dropout(0.1), lambda: (x(),)),
    "MultiheadAttention": Parent(
        lambda: nn.MultiheadAttention(D, HEADS, batch_first=True), lambda: (x(), x(S), x(S), ~keep(B, S))
    ),
    "TransformerEncoderLayer": Parent(_encoder_layer, lambda: (x(), None, _padding())),
    "TransformerEncoderLayer, pre-norm": Parent(lambda: _encoder_layer(norm_first=True), lambda: (x(), _look_ahead())),
    "TransformerEncoderLayer, GELU": Parent(lambda: _encoder_layer(activation="gelu"), lambda: (x(),)),
    "TransformerEncoderLayer, a module": Parent(lambda: _encoder_layer(activation=nn.SiLU()), lambda: (x(),)),
    "TransformerDecoderLayer": Parent(_decoder_layer, lambda: (x(), x(S), _look_ahead())),
    "TransformerEncoder": Parent(
        lambda: Padded(nn.TransformerEncoder(_encoder_layer(), 1, nn.LayerNorm(D))), lambda: (x(), _padding())
    ),
    "TransformerEncoder, two layers": Parent(
        lambda: nn.TransformerEncoder(_encoder_layer(), 2, enable_nested_tensor=False), lambda: (x(), _look_ahead())
    ),
    "TransformerDecoder": Parent(
        lambda: nn.TransformerDecoder(_decoder_layer(norm_first=True), 1, nn.LayerNorm(D)),
        lambda: (x(), x(S), _look_ahead()),
    ),
}

_layers = functools.partial(_of_class, layers, reference_layers)
_source, _target = lambda: keep(B, 1, S), lambda: keep(1, L, L).tril() | torch.eye(L, dtype=torch.bool)
LAYERS: dict[str, Parent] = {
    "Embedder": Parent(**_layers("Embedder", VOCABULARY, D), arguments=lambda: (ids(),)),
    "PositionalEncoder": Parent(**_layers("PositionalEncoder", D, 0.1), arguments=lambda: (x(),)),
    "MultiHeadAttention": Parent(
        **_layers("MultiHeadAttention", HEADS, D), arguments=lambda: (x(), x(S), x(S), _source())
    ),
    "FeedForward": Parent(**_layers("FeedForward", D, INNER), arguments=lambda: (x(),)),
    "EncoderLayer": Parent(**_layers("EncoderLayer", D, HEADS, d_ff=INNER), arguments=lambda: (x(), keep(B, 1, L))),
    "EncoderLayer, post-norm": Parent(
        **_layers("EncoderLayer", D, HEADS, d_ff=INNER, norm_first=False, norm="layer"),
        arguments=lambda: (x(), keep(B, 1, L)),
    ),
    "DecoderLayer": Parent(
        **_layers("DecoderLayer", D, HEADS, d_ff=INNER), arguments=lambda: (x(), x(S), _source(), _target())
    ),
    "Encoder": Parent(
        **_layers("Encoder", VOCABULARY, D, 1, HEADS, 0.1, d_ff=INNER), arguments=lambda: (ids(), keep(B, 1, L))
    ),
    "Decoder": Parent(
        **_layers("Decoder", VOCABULARY, D, 1, HEADS, 0.1, d_ff=INNER),
        arguments=lambda: (ids(), x(S), _source(), _target()),
    ),
    "Transformer": Parent(
        **_layers("Transformer", VOCABULARY, VOCABULARY, D, 1, HEADS, 0.1, d_ff=INNER),
        arguments=lambda: (ids(), ids(), keep(B, 1, L), _target()),
    ),
}

_bert = functools.partial(_of_class, dialects.bert, reference_dialects.bert)
_tensorflow = functools.partial(_of_class, dialects.tensorflow, reference_dialects.tensorflow)
_d2l = functools.partial(_of_class, dialects.d2l, reference_dialects.d2l)
_lengths, _blocked = lambda: torch.tensor([3, S]), lambda *shape: 1.0 - keep(*shape).float()
_sized = dict.fromkeys(("query_size", "key_size", "value_size"), D)
DIALECTS: dict[str, Parent] = {
    "bert.BERTEmbedding": Parent(**_bert("BERTEmbedding", VOCABULARY, D), arguments=lambda: (ids(),)),
    "bert.MultiHeadedAttention": Parent(
        **_bert("MultiHeadedAttention", HEADS, D), arguments=lambda: (x(), x(S), x(S), keep(B, 1, 1, S))
    ),
    "tensorflow.MultiHeadAttention": Parent(
        **_tensorflow("MultiHeadAttention", D, HEADS), arguments=lambda: (x(S), x(S), x(), _blocked(B, 1, 1, S))
    ),
    "tensorflow.EncoderLayer": Parent(
        **_tensorflow("EncoderLayer", D, HEADS, INNER), arguments=lambda: (x(), _blocked(B, 1, 1, L))
    ),
    "tensorflow.DecoderLayer": Parent(
        **_tensorflow("DecoderLayer", D, HEADS, INNER),
        arguments=lambda: (x(), x(S), _look_ahead().float(), _blocked(B, 1, 1, S)),
    ),
    "tensorflow.Encoder": Parent(
        **_tensorflow("Encoder", 1, D, HEADS, INNER, VOCABULARY, 20), arguments=lambda: (ids(), _blocked(B, 1, 1, L))
    ),
    "tensorflow.Decoder": Parent(
        **_tensorflow("Decoder", 1, D, HEADS, INNER, VOCABULARY, 20),
        arguments=lambda: (ids(), x(S), _look_ahead().float(), _blocked(B, 1, 1, S)),
    ),
    "tensorflow.Transformer": Parent(
        **_tensorflow("Transformer", 1, D, HEADS, INNER, VOCABULARY, VOCABULARY, 20, 20),
        arguments=lambda: (ids(), ids(), None, _look_ahead().float(), _blocked(B, 1, 1, L)),
    ),
    "tensorflow.AdditiveAttention": Parent(
        **_tensorflow("AdditiveAttention", 6, D, D), arguments=lambda: (x(S), x(S), x(), _blocked(B, 1, S))
    ),
    "tensorflow.BilinearAttention": Parent(
        **_tensorflow("BilinearAttention", 6, D, D), arguments=lambda: (x(S), x(S), x(), _blocked(B, 1, S))
    ),
    "d2l.DotProductAttention": Parent(
        **_d2l("DotProductAttention", 0.1), arguments=lambda: (x(), x(S), x(S), _lengths())
    ),
    "d2l.AdditiveAttention": Parent(
        **_d2l("AdditiveAttention", 6, 0.1, query_size=D, key_size=D), arguments=lambda: (x(), x(S), x(S), _lengths())
    ),
    "d2l.MultiHeadAttention": Parent(
        **_d2l("MultiHeadAttention", D, HEADS, 0.1, **_sized), arguments=lambda: (x(), x(S), x(S), _lengths())
    ),
    "d2l.PositionWiseFFN": Parent(**_d2l("PositionWiseFFN", INNER, D, num_inputs=D), arguments=lambda: (x(),)),
    "d2l.PositionalEncoding": Parent(**_d2l("PositionalEncoding", D, 0.1), arguments=lambda: (x(),)),
    "d2l.AddNorm": Parent(**_d2l("AddNorm", D, 0.1), arguments=lambda: (x(), x())),
    "d2l.EncoderBlock": Parent(**_d2l("EncoderBlock", D, INNER, HEADS, 0.1), arguments=lambda: (x(), _lengths())),
    "d2l.DecoderBlock": Parent(
        **_d2l("DecoderBlock", D, INNER, HEADS, 0.1, 0), arguments=lambda: (x(), [x(S), _lengths(), [None]])
    ),
    "d2l.TransformerEncoder": Parent(
        **_d2l("TransformerEncoder", VOCABULARY, D, INNER, HEADS, 1, 0.1), arguments=lambda: (ids(), _lengths())
    ),
    "d2l.TransformerDecoder": Parent(
        **_d2l("TransformerDecoder", VOCABULARY, D, INNER, HEADS, 1, 0.1),
        arguments=lambda: (ids(), [x(S), _lengths(), [None]]),
    ),
}


def _block(path: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A block of a model of transformers, by its class."""

    def make() -> nn.Module:
        settings = getattr(transformers, config)(**sizes, attn_implementation="eager")
        settings._attn_implementation = "eager"
        module, _, name = path.rpartition(".")
        made = __import__(f"transformers.models.{module}", fromlist=[name])
        arguments = {"layer_idx": 0} if name in ("GPT2Block", "BartDecoderLayer", "MBartDecoderLayer") else {}
        return getattr(made, name)(settings, **arguments)

    return make


def _added_look_ahead() -> Tensor:
    """The mask that a decoder of transformers gives its layers: eager attention looks ahead without one."""
    return torch.zeros(B, 1, L, L).masked_fill(_look_ahead(), torch.finfo(torch.float32).min)


def _decoded() -> tuple[Any, ...]:
    return x(), _added_look_ahead(), x(S)


_bart = {"d_model": D, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER,
         "decoder_ffn_dim": INNER}  # fmt: skip
_bert_sizes = {"hidden_size": D, "num_attention_heads": HEADS, "intermediate_size": INNER}
_t5 = {"d_model": D, "d_kv": D // HEADS, "d_ff": INNER, "num_heads": HEADS, "num_layers": 1}
HUGGING_FACE: dict[str, Parent] = {
    "BertLayer": Parent(_block("bert.modeling_bert.BertLayer", "BertConfig", **_bert_sizes), lambda: (x(),)),
    "BartEncoderLayer": Parent(
        _block("bart.modeling_bart.BartEncoderLayer", "BartConfig", **_bart), lambda: (x(), None)
    ),
    "BartDecoderLayer": Parent(
        _block("bart.modeling_bart.BartDecoderLayer", "BartConfig", **_bart), _decoded
    ),
    "MBartEncoderLayer": Parent(
        _block("mbart.modeling_mbart.MBartEncoderLayer", "MBartConfig", **_bart), lambda: (x(), None)
    ),
    "MBartDecoderLayer": Parent(
        _block("mbart.modeling_mbart.MBartDecoderLayer", "MBartConfig", **_bart), _decoded
    ),
    "DistilBertBlock": Parent(
        _block(
            "distilbert.modeling_distilbert.TransformerBlock", "DistilBertConfig", dim=D, n_heads=HEADS,
            hidden_dim=INNER,
        ),
        lambda: (x(),),
    ),
    "GPT2Block": Parent(
        _block("gpt2.modeling_gpt2.GPT2Block", "GPT2Config", n_embd=D, n_head=HEADS, n_inner=INNER),
        lambda: (x(), None, _added_look_ahead()),
    ),
    "ViTLayer": Parent(_block("vit.modeling_vit.ViTLayer", "ViTConfig", **_bert_sizes), lambda: (x(),)),
    "T5Block": Parent(_block("t5.modeling_t5.T5Block", "T5Config", **_t5), lambda: (x(),)),
    "T5Block, decoder": Parent(
        _block("t5.modeling_t5.T5Block", "T5Config", **_t5, is_decoder=True),
        lambda: (x(), _added_look_ahead(), None, x(S)),
    ),
    "T5Block, gated": Parent(
        _block("t5.modeling_t5.T5Block", "T5Config", **_t5, feed_forward_proj="gated-gelu"), lambda: (x(),)
    ),
}  # fmt: skip


class _DenseNorm(nn.Module):
    """The end of a block as models of transformers write it, with a norm of another name in each."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.dense, self.dropout, self.norm_name = nn.Linear(D, D), nn.Dropout(0.1), norm
        setattr(self, norm, nn.LayerNorm(D))

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return getattr(self, self.norm_name)(self.dropout(self.dense(hidden_states)) + input_tensor)


OTHERS: dict[str, Parent] = {
    "classic decoder layer, post-norm": Parent(
        lambda: reference_layers.DecoderLayer(D, HEADS, d_ff=INNER, norm_first=False, norm="layer"),
        lambda: (x(), x(S), _source(), _target()),
    ),
    "classic decoder": Parent(
        lambda: reference_layers.Decoder(VOCABULARY, D, 1, HEADS, 0.1, d_ff=INNER),
        lambda: (ids(), x(S), _source(), _target()),
    ),
    "dense, layer_norm": Parent(lambda: _DenseNorm("layer_norm"), lambda: (x(), x())),
    "dense, norm": Parent(lambda: _DenseNorm("norm"), lambda: (x(), x())),
}


def _handwritten() -> dict[str, Parent]:
    """Return the hand-written modules, one of each structure."""
    by_structure = {repr(make()): name for name, (make, _) in reversed(forms.FORMS.items())}
    return {
        name: Parent(functools.partial(_shortened, make), arguments)
        for name, (make, arguments) in forms.FORMS.items()
        if name in by_structure.values()
    }


def _shortened(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a module with one layer per stack, or two where the sum between two layers is fused."""
    module = make()
    most = 2 if type(module).__name__ == "AnnotatedEncoder" else 1
    for name in ("layers", "enc_layers", "dec_layers", "blks"):
        if name in module._modules:
            del module._modules[name][most:]
            if hasattr(module, "num_layers"):
                module.num_layers = most
    return module


PARENTS: dict[str, Parent] = (
    {f"torch {name}": parent for name, parent in TORCH.items()}
    | {f"layers {name}": parent for name, parent in LAYERS.items()}
    | {f"dialects {name}": parent for name, parent in DIALECTS.items()}
    | {f"hand-written {name}": parent for name, parent in (_handwritten() | OTHERS).items()}
    | {f"transformers {name}": parent for name, parent in HUGGING_FACE.items()}
)


def without_dropout(module: nn.Module) -> nn.Module:
    """Set every probability of dropout to 0: the two sides draw different masks."""
    for m in module.modules():
        for name, value in list(vars(m).items()):
            if isinstance(value, float) and ("dropout" in name or (name == "p" and isinstance(m, nn.Dropout))):
                setattr(m, name, 0.0)
    return module


def plain(parent: Parent) -> nn.Module:
    """Make the plain module, with parameters that hide no mistake."""
    torch.manual_seed(0)
    module = without_dropout(parent.make())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def fused(parent: Parent, module: nn.Module) -> nn.Module:
    """Return the fused form of a copy of a plain module."""
    if parent.fuse is not None:
        return without_dropout(parent.fuse(module)).train(module.training)
    module = copy.deepcopy(module)
    tfast.accelerate(module)
    return module
