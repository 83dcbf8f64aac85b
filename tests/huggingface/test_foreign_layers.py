"""Attention that is not ours in an accelerated model: it gets the mask that the plain model gives it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

transformers = pytest.importorskip("transformers", minversion="5")

import huggingface_models as models  # noqa: E402
from transformers.models.bert.modeling_bert import BertSelfAttention  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv  # noqa: E402

KINDS = ("eager", "sdpa")
NAMES = {"BertForMaskedLM": "bert.encoder.layer.{}.attention.self", "LlamaForCausalLM": "model.layers.{}.self_attn"}
"""Models, and the paths of their attention."""


def weighted(layer: Any, heads: list[Tensor], mask: Tensor | None, both: bool) -> Tensor:
    """Weighted values: the mask is added; with ``both`` a bool mask blocks, and None is what ``is_causal`` says."""
    q, k, v = heads
    scores = q @ k.mT * layer.scaling
    if mask is None and both and layer.is_causal:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9) if both and mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads_of(x: Tensor, layer: Any, names: str, size: int) -> list[Tensor]:
    return [getattr(layer, name)(x).unflatten(-1, (-1, size)).transpose(1, 2) for name in names.split()]


class Bert:
    """Attention like BERT's, written by hand."""

    both = False

    def forward(self: Any, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        heads = heads_of(hidden, self, "query key value", self.attention_head_size)
        return weighted(self, heads, attention_mask, self.both), None


class Llama:
    """Attention like Llama's, written by hand."""

    both = False

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = heads_of(hidden_states, self, "q_proj k_proj v_proj", self.head_dim)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (repeat_kv(t, self.num_key_value_groups) for t in (k, v))
        return self.o_proj(weighted(self, [q, k, v], attention_mask, self.both)), None


class DerivedBert(Bert, BertSelfAttention): ...


class DerivedLlama(Llama, LlamaAttention): ...


class OwnBert(Bert, nn.Module): ...


class OwnLlama(Llama, nn.Module): ...


class OwnBertOfBothKinds(OwnBert):
    both = True


class OwnLlamaOfBothKinds(OwnLlama):
    both = True


def of_class(*classes: type) -> Callable[[nn.Module, str], nn.Module]:
    """Return a maker of a copy of a model's attention, with another class."""

    def make(model: nn.Module, name: str) -> nn.Module:
        made = copy.deepcopy(attention(model, name))
        made.__class__ = classes["Llama" in name]
        return made

    return make


def taken(kind: str) -> Callable[[nn.Module, str], nn.Module]:
    return lambda model, name: attention(plain(name, kind), name)


def configured(kind: str) -> Callable[[nn.Module, str], nn.Module]:
    def make(model: nn.Module, name: str) -> nn.Module:
        config = models.config_of(models.named(name), kind)
        made = BertSelfAttention(config) if name.startswith("Bert") else LlamaAttention(config, 0)
        return models.scattered(made.eval(), std=0.3)

    return make


def bidirectional(model: nn.Module, name: str) -> nn.Module:
    made = copy.deepcopy(attention(model, name))
    made.is_causal = False
    return made


LAYERS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "theirs": lambda model, name: copy.deepcopy(attention(model, name)),
    "theirs, is_causal=False": bidirectional,
    "derived": of_class(DerivedBert, DerivedLlama),
    "own": of_class(OwnBert, OwnLlama),
    "own, of both kinds": of_class(OwnBertOfBothKinds, OwnLlamaOfBothKinds),
    **{f"of another {kind} model": taken(kind) for kind in KINDS},
    **{f"of a config with {kind}": configured(kind) for kind in KINDS},
}


def attention(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(NAMES[name].format(0))


def plain(name: str, kind: str) -> Any:
    return models.scattered(models.make(models.named(name), kind), std=0.3)


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = NAMES[name].format(0).rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def batches(name: str) -> Iterator[dict[str, Tensor]]:
    for side in ("right", "left", "none"):
        yield models.inputs(models.named(name), side)
    given = models.inputs(models.named(name), "none")
    yield given | {"attention_mask": torch.ones_like(given["input_ids"])}


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", LAYERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_the_layer_is_as_the_plain_model_with_it(
    name: str, made: str, kind: str, after: bool, packed: bool
) -> None:
    model = plain(name, kind)
    layer = LAYERS[made](model, name)
    fast = copy.deepcopy(model)
    for m in (model,) if after else (model, fast):
        put(m, name, copy.deepcopy(layer))
    report = tfast.accelerate(fast, packed=packed)
    assert any("attn_implementation" in (row.now or "") for row in report.swapped)
    if after:
        put(fast, name, copy.deepcopy(layer))
    for given in batches(name):
        ours, theirs = (models.outcome(m, given) for m in (fast, model))
        tokens = given.get("attention_mask", torch.ones_like(given["input_ids"])) == 1
        for found in (ours, theirs):
            found["logits"] = found["logits"][tokens]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    report.undo()
    torch.testing.assert_close(models.outcome(fast, given), models.outcome(model, given))


@pytest.mark.cover(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_as_a_whole(name: str, kind: str) -> None:
    """The plain model is compiled too: then transformers leaves out other masks."""
    torch._dynamo.reset()
    model = plain(name, kind)
    put(model, name, bidirectional(model, name))
    fast = copy.deepcopy(model)
    tfast.accelerate(fast)
    ours, theirs = (torch.compile(m, fullgraph=True, backend="eager") for m in (fast, model))
    options = {"use_cache": False} if "Llama" in name else {}
    for side in ("right", "none"):
        given = models.inputs(models.named(name), side)
        tokens = given.get("attention_mask", torch.ones_like(given["input_ids"])) == 1
        logits, expected = (m(**given, **options).logits[tokens] for m in (ours, theirs))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_other_layers_keep_the_short_form(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = plain(name, kind)
    tfast.accelerate(fast)
    put(fast, name, LAYERS["own"](fast, name))
    given = models.inputs(models.named(name), "left")
    masks: list[Any] = []
    attention_op = tfast.ops.attention

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        masks.append(mask)
        return attention_op(q, k, v, mask, **options)

    monkeypatch.setattr("transformer_fast.ops.attention", watched)
    with torch.no_grad():  # a row without keys, as of left padding, passes gradients on in eager attention
        fast(**given)
    assert len(masks) == 1 and masks[0].keep_mask is None and masks[0].additive_bias is None
