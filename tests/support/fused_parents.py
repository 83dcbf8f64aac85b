"""Every module that may compute a child without calling it, with the plain module that it replaces."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import handwritten_forms as forms
import huggingface_models as models
import torch
from dialect_cases import FAMILIES
from dialect_parity import Case
from form_arguments import B, D, L, S, ids, keep, x
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import dialects, layers
from transformer_fast.reference import layers as reference_layers

VOCABULARY, HEADS, INNER = 11, 2, 12


@dataclasses.dataclass(frozen=True)
class Parent:
    """A module, its arguments, and the function that makes its fused form: ``accelerate``, or a class."""

    make: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Any, ...]]
    fuse: Callable[[nn.Module], nn.Module] | None = None  # None: accelerate, before or after a change


def _of_class(fast: ModuleType, oracle: ModuleType) -> Callable[..., Parent]:
    """Return a function that makes the parent of a class, from its arguments, name and constructor arguments."""

    def parent(arguments: Callable[[], tuple[Any, ...]], name: str, *sizes: Any, **options: Any) -> Parent:
        def fuse(plain: nn.Module) -> nn.Module:
            made = getattr(fast, name)(*sizes, **options)
            made.load_state_dict(plain.state_dict())
            return made

        return Parent(lambda: getattr(oracle, name)(*sizes, **options), arguments, fuse)

    return parent


class Padded(nn.Module):
    """Stack on a padded batch. Padded outputs are set to 0, because ``torch.nn`` leaves them undefined."""

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

_layer = _of_class(layers, reference_layers)
_source, _target = lambda: keep(B, 1, S), lambda: keep(1, L, L).tril() | torch.eye(L, dtype=torch.bool)
_encoded, _memory = (lambda: (x(), keep(B, 1, L))), (lambda: (x(), x(S), _source(), _target()))
_sizes = {"d_ff": INNER}
LAYERS: dict[str, Parent] = {
    "Embedder": _layer(lambda: (ids(),), "Embedder", VOCABULARY, D),
    "PositionalEncoder": _layer(lambda: (x(),), "PositionalEncoder", D, 0.1),
    "MultiHeadAttention": _layer(lambda: (x(), x(S), x(S), _source()), "MultiHeadAttention", HEADS, D),
    "FeedForward": _layer(lambda: (x(),), "FeedForward", D, INNER),
    "EncoderLayer": _layer(_encoded, "EncoderLayer", D, HEADS, **_sizes),
    "EncoderLayer, post-norm": _layer(_encoded, "EncoderLayer", D, HEADS, norm_first=False, norm="layer", **_sizes),
    "DecoderLayer": _layer(_memory, "DecoderLayer", D, HEADS, **_sizes),
    "Encoder": _layer(lambda: (ids(), keep(B, 1, L)), "Encoder", VOCABULARY, D, 1, HEADS, 0.1, **_sizes),
    "Decoder": _layer(lambda: (ids(), x(S), _source(), _target()), "Decoder", VOCABULARY, D, 1, HEADS, 0.1, **_sizes),
    "Transformer": _layer(
        lambda: (ids(), ids(), keep(B, 1, L), _target()), "Transformer", VOCABULARY, VOCABULARY, D, 1, HEADS, 0.1,
        **_sizes,
    ),
}  # fmt: skip


def _trained(value: Any) -> Any:
    """Copy an input, so that a float tensor gets a gradient."""
    if isinstance(value, list):
        return [_trained(part) for part in value]
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.clone().requires_grad_() if is_float else value


def _of_case(family: str, case: Case) -> Parent:
    fast, oracle, _ = FAMILIES[family]
    arguments = lambda: (*map(_trained, case.inputs), *case.masks)  # noqa: E731
    return _of_class(fast, oracle)(arguments, case.name, *case.arguments, **case.options)


DIALECTS: dict[str, Parent] = {  # the first case of each class that has a child
    f"{family}.{case.name}": parent
    for family in dialects.__all__
    for case in reversed(FAMILIES[family][2])
    if inspect.isclass(getattr(getattr(dialects, family), case.name, None))
    and (parent := _of_case(family, case)).make()._modules
}


def _wide(length: int = L) -> Tensor:
    return torch.randn(B, length, models.WIDTH, requires_grad=True)


def _added_look_ahead() -> Tensor:
    """Return the mask that a decoder of transformers passes to its layers: eager attention is causal without a mask."""
    return torch.zeros(B, 1, L, L).masked_fill(_look_ahead(), torch.finfo(torch.float32).min)


def _block(arguments: Callable[[], tuple[Any, ...]], name: str, path: str, **settings: Any) -> Parent:
    """Return a block of a model of transformers."""
    return Parent(lambda: models.make(models.named(name), "eager", **settings).get_submodule(path), arguments)


_alone, _with_mask = (lambda: (_wide(),)), (lambda: (_wide(), None))
_decoded, _causal = (lambda: (_wide(), _added_look_ahead(), _wide(S))), (lambda: (_wide(), None, _added_look_ahead()))
_bart, _mbart, _t5 = "BartForConditionalGeneration", "MBartForConditionalGeneration", "T5ForConditionalGeneration"
HUGGING_FACE: dict[str, Parent] = {
    "BertLayer": _block(_alone, "BertForMaskedLM", "bert.encoder.layer.0"),
    "BartEncoderLayer": _block(_with_mask, _bart, "model.encoder.layers.0"),
    "BartDecoderLayer": _block(_decoded, _bart, "model.decoder.layers.0"),
    "MBartEncoderLayer": _block(_with_mask, _mbart, "model.encoder.layers.0"),
    "MBartDecoderLayer": _block(_decoded, _mbart, "model.decoder.layers.0"),
    "DistilBertBlock": _block(_alone, "DistilBertForMaskedLM", "distilbert.transformer.layer.0"),
    "GPT2Block": _block(_causal, "GPT2LMHeadModel", "transformer.h.0"),
    "ViTLayer": _block(_alone, "ViTForImageClassification", "vit.layers.0"),
    "CLIPEncoderLayer": _block(_with_mask, "CLIPForImageClassification", "vision_model.encoder.layers.0"),
    "Dinov2Layer": _block(_alone, "Dinov2ForImageClassification", "dinov2.encoder.layer.0"),
    "T5Block": _block(_alone, _t5, "encoder.block.1"),
    "T5Block, decoder": _block(lambda: (_wide(), _added_look_ahead(), None, _wide(S)), _t5, "decoder.block.1"),
    "T5Block, gated": _block(_alone, _t5, "encoder.block.1", feed_forward_proj="gated-gelu"),
}  # fmt: skip


OTHERS: dict[str, Parent] = {
    "classic decoder layer, post-norm": Parent(
        lambda: reference_layers.DecoderLayer(D, HEADS, d_ff=INNER, norm_first=False, norm="layer"),
        lambda: (x(), x(S), _source(), _target()),
    ),
    "classic decoder": dataclasses.replace(LAYERS["Decoder"], fuse=None),
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
    """Set every dropout probability to 0, because the two sides draw different masks."""
    for m in module.modules():
        for name, value in list(vars(m).items()):
            if isinstance(value, float) and ("dropout" in name or (name == "p" and isinstance(m, nn.Dropout))):
                setattr(m, name, 0.0)
    return module


def plain(parent: Parent) -> nn.Module:
    """Make the plain module, with random parameters, so that no mistake is hidden."""
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
