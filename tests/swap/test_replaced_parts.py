"""Replaced parts of an encoder layer, such as peft's adapters: PyTorch's fast path in eval calls none of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))


class Adapter(nn.Module):
    """Low-rank adapter with the attributes of peft's, `weight` among them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.down = nn.Parameter(torch.randn(4, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) * 0.3)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T


class Doubled(nn.Linear):
    """Subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def doubled(base: nn.Linear) -> nn.Module:
    part = Doubled(base.in_features, base.out_features)
    part.load_state_dict(base.state_dict())
    return part


PARTS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "adapter": Adapter,
    "subclass": doubled,
    "sequence": nn.Sequential,
}


def layer() -> nn.TransformerEncoderLayer:
    """Return a layer without dropout."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def replace(m: nn.Module, part: str) -> None:
    """Put other parts into a layer."""
    torch.manual_seed(1)
    m.linear1, m.linear2 = PARTS[part](m.linear1), PARTS[part](m.linear2)


def check(model: nn.Module, plain: nn.Module) -> None:
    """Compare both modes with the training mode of the plain model, whose forward calls its parts."""
    with torch.no_grad():
        expected = plain.train()(X)
        for training in (True, False):
            torch.testing.assert_close(model.train(training)(X), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_there_before(part: str) -> None:
    plain = layer()
    replace(plain, part)
    model = copy.deepcopy(plain)
    tfast.accelerate(model)
    check(model, plain)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_comes_afterwards(part: str) -> None:
    plain, model = layer(), layer()
    assert tfast.accelerate(model).swapped
    replace(plain, part)
    replace(model, part)
    check(model, plain)


def test_an_adapter_of_the_output_projection_is_never_applied() -> None:
    """In PyTorch, too: nn.MultiheadAttention reads the weight."""
    plain, model = layer(), layer()
    tfast.accelerate(model)
    for m in (plain, model):
        m.self_attn.out_proj = Adapter(m.self_attn.out_proj)
    check(model, layer())
    check(model, plain)


@pytest.mark.parametrize("names", [["linear1", "linear2"], ["self_attn"], ["out_proj"]])
@pytest.mark.parametrize("first", [True, False])
def test_adapters_of_peft(names: list[str], first: bool) -> None:
    peft = pytest.importorskip("peft")
    encoder = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
    config = peft.LoraConfig(target_modules=names, init_lora_weights=False)
    model = copy.deepcopy(encoder)
    if first:
        tfast.accelerate(model)
    torch.manual_seed(2)
    plain = peft.get_peft_model(encoder, config)
    torch.manual_seed(2)
    model = peft.get_peft_model(model, copy.deepcopy(config))
    if not first:
        tfast.accelerate(model)
    model.load_state_dict(plain.state_dict())
    check(model, plain)
    check(model.merge_and_unload(), plain.merge_and_unload())


class OwnTable(nn.Module):
    """Table of its own in the place of an embedding, as peft's copy of a module."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.copy = nn.Embedding.from_pretrained(base.weight.detach() * 1.5, freeze=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.copy(ids)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("part", ["shared", "embed_tokens"])
@pytest.mark.parametrize("name", ["T5", "Bart", "Marian"])
def test_a_table_of_an_encoder_and_a_decoder(name: str, part: str, first: bool) -> None:
    """Both call `embed_tokens` of their own: what stands in the place of `shared` gets no gradient."""
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 32, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0}
    kind = getattr(transformers, "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration")
    sides = "layers", "ffn_dim", "attention_heads"
    sizes = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in zip(sides, (1, 32, 2), strict=True)}
    more = {"num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32} if name == "T5" else sizes
    ids, models = torch.arange(3, 9)[None], []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = kind(kind.config_class(**settings, **more)).eval()
        if accelerated and first:
            tfast.accelerate(model)
        for parent in [m for m in model.modules() if part in m._modules]:
            setattr(parent, part, OwnTable(getattr(parent, part)))
        if accelerated and not first:
            tfast.accelerate(model)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {key: p.grad for key, p in model.named_parameters() if key.endswith("copy.weight")}
        models.append((loss.detach(), grads))
    torch.testing.assert_close(*models)
    assert [grad is None for grad in models[0][1].values()] == ([True] if part == "shared" else [False, False])
