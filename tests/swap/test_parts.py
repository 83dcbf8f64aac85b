"""Parts of a model that somebody replaced, wrapped, left out or changed: the accelerated model computes what the plain
one computes. ``tests/layers/test_children.py`` has each change of each child of a fused module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import pair
from form_arguments import results
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast

D = 8
SIZES: dict[str, Any] = {"d_model": D, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}


def x() -> Tensor:
    return torch.randn(2, 5, D)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES), 2, enable_nested_tensor=False)


TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(D), lambda: (x(),)),
    "RMSNorm": (lambda: nn.RMSNorm(D), lambda: (x(),)),
    "Linear": (lambda: nn.Linear(D, D), lambda: (x(),)),
    "Dropout": (lambda: nn.Dropout(0.0), lambda: (x().requires_grad_(),)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(D, 2, batch_first=True), lambda: (x(), x(), x())),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES), 2), lambda: (x(),)),
    "decoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**SIZES), 2), lambda: (x(), x())),
}


@pytest.mark.parametrize("name", [*TORCH, *FORMS])
def test_a_wrapped_forward_after_undo(name: str) -> None:
    """Wrappers hold the method of before ``undo``."""
    make, arguments = {**FORMS, **TORCH}[name]
    plain, m, report = pair(lambda: make().train(name in TORCH))
    args = arguments()
    for part in m.modules():
        part.forward = functools.partial(_call, part.forward)  # type: ignore[method-assign]
    report.undo()
    torch.testing.assert_close(results(m, args), results(plain, args), atol=2e-5, rtol=2e-5)


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


BLOCKS = [(kind, block) for kind in ("encoder", "decoder") for block in ("_sa_block", "_ff_block")]


@pytest.mark.parametrize(("kind", "block"), [*BLOCKS, ("decoder", "_mha_block")])
def test_a_block_of_a_layer_that_somebody_replaced(kind: str, block: str) -> None:
    """Before ``accelerate`` and after; the masks are those that torch's own method gets."""
    make, arguments = TORCH[kind]
    plain, args, first = make(), arguments(), "src" if kind == "encoder" else "tgt"
    masks = {"mask" if kind == "encoder" else "tgt_mask": torch.ones(5, 5).triu(1) > 0}
    padding = {f"{first}_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3]])}
    for before in (True, False):
        m, own = copy.deepcopy(plain), copy.deepcopy(plain)
        if not before:
            tfast.accelerate(m)
        for model in (m, own):
            layer = model.layers[0]
            setattr(layer, block, functools.partial(_doubled, getattr(type(layer), block), layer))
        if before:
            tfast.accelerate(m)
        torch.testing.assert_close(m(*args, **masks), own(*args, **masks), atol=2e-5, rtol=2e-5)
        with torch.no_grad():  # the encoder of torch makes nested tensors
            theirs, ours = own.eval()(*args, **padding), m.eval()(*args, **padding)
        torch.testing.assert_close(ours[0], theirs[0], atol=2e-5, rtol=2e-5)


def _doubled(method: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return 2 * method(layer, *args, **kwargs)


@torch.no_grad()
def hold(model: nn.Module, plain: nn.Module) -> None:
    """Compare both modes with the training mode of the plain model: PyTorch's fast path in eval calls no parts."""
    given = x()
    expected = plain.train()(given)
    for training in (True, False):
        torch.testing.assert_close(model.train(training)(given), expected, atol=1e-5, rtol=1e-5)


class Around(nn.Module):
    """A part of its own around another one, with its weight as an attribute, as peft has it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.weight, self.bias = base, base.weight, getattr(base, "bias", None)


class Adapter(Around):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * self.base_layer(x)


class OwnTable(Around):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) * 1.5


def test_an_adapter_of_the_output_projection_is_never_applied() -> None:
    """In PyTorch, too: nn.MultiheadAttention reads the weight."""
    plain, model, _ = pair(encoder)
    unchanged = copy.deepcopy(plain)
    for m in (plain, model):
        m.layers[0].self_attn.out_proj = Adapter(m.layers[0].self_attn.out_proj)
    hold(model, unchanged)
    hold(model, plain)


@pytest.mark.parametrize("names", [["linear1", "linear2"], ["self_attn"], ["out_proj"]])
@pytest.mark.parametrize("first", [True, False])
def test_adapters_of_peft(names: list[str], first: bool) -> None:
    peft = pytest.importorskip("peft")
    models = encoder(), encoder()
    if first:
        tfast.accelerate(models[1])
    config = peft.LoraConfig(target_modules=names, init_lora_weights=False)
    plain, model = (peft.get_peft_model(m, copy.deepcopy(config)) for m in models)
    if not first:
        tfast.accelerate(model)
    model.load_state_dict(plain.state_dict())
    hold(model, plain)
    hold(model.merge_and_unload(), plain.merge_and_unload())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("part", ["shared", "embed_tokens"])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel"])
def test_a_table_of_an_encoder_and_a_decoder(name: str, part: str, first: bool) -> None:
    """Both call `embed_tokens` of their own: what stands in the place of `shared` gets no gradient."""
    pytest.importorskip("transformers")
    import huggingface_models as hf

    ids, found = torch.arange(3, 9)[None], []
    for accelerated in (False, True):
        model = hf.make(hf.named(name), decoder_start_token_id=0)
        if accelerated and first:
            tfast.accelerate(model)
        for parent in [m for m in model.modules() if part in m._modules]:
            table = copy.deepcopy(getattr(parent, part))
            setattr(parent, part, OwnTable(table))
        if accelerated and not first:
            tfast.accelerate(model)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        tables = [m for m in model.modules() if isinstance(m, OwnTable)]
        found.append((loss.detach(), [table.weight.grad for table in tables]))
    torch.testing.assert_close(*found)
    assert [grad is None for grad in found[0][1]] == ([True] if part == "shared" else [False, False])


class Heads(nn.Module):
    """Encoder with a head that a call uses, and a table and a head that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused, self.encoder = nn.Embedding(32, D), nn.Embedding(5, D), encoder()
        self.head, self.other = nn.Linear(D, 32), nn.Linear(D, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor]:
        h = self.encoder(self.table(input_ids), src_key_padding_mask=attention_mask == 0)
        return (F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten()),)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    import huggingface_models as hf

    model = hf.make(hf.named("BertForMaskedLM"))
    model.bert.pooler = transformers.models.bert.modeling_bert.BertPooler(model.config)
    return model


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"packed": True, "fused_loss": True}], ids=str)
@pytest.mark.parametrize("make", [Heads, bert])
def test_what_has_no_gradient_has_none(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """AdamW decays a weight whose gradient is zero, and leaves one that has none: unused parts, and frozen biases."""
    plain = make()
    for key, parameter in plain.named_parameters():
        parameter.requires_grad_(not ("norm" in key.lower() and key.endswith("bias")))
    plain, model, report = pair(plain, **options)
    ids, mask, without = torch.arange(3, 15).view(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), []
    for m in (model.train(), plain.train()):
        m(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))[0].backward()
        without.append({key for key, p in m.named_parameters() if p.grad is None})
    assert report.swapped and without[0] == without[1] and len(without[1]) > 4


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("attends", [False, True], ids=["layer", "attention"])
def test_weights_that_change_in_an_autocast_region(attends: bool, clear: bool, training: bool) -> None:
    """PyTorch keeps the copy that it made first. Training mode is the oracle: the plain model's fast path in eval takes
    other copies. Weights that no copy is made of are new at once in both: norms, and biases added in float32."""
    layer = nn.TransformerEncoderLayer(**SIZES)
    (plain, model, _), given, found = pair(layer.self_attn if attends else layer), x(), []

    def run(m: Any) -> Tensor:
        return m(given, given, given, need_weights=False)[0] if attends else m(given)

    for m in (model.train(training), plain.train()):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found.append([run(m)])
            for p in m.parameters():
                p.mul_(1.5)
            if clear:
                torch.clear_autocast_cache()
            found[-1].append(run(m))
    for out, expected in zip(*found):
        torch.testing.assert_close(out.float(), expected.float(), atol=0.1, rtol=0.05)
