"""Calls and parts of a model that PyTorch or transformers treats in another way than a good guess says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast

AHEAD = torch.ones(5, 5, dtype=torch.bool).tril()


def test_attention_joins_a_mask_and_causal() -> None:
    """F.scaled_dot_product_attention joins them in one kernel of some versions, and refuses both elsewhere."""
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    keep = torch.rand(2, 1, 5, 5) > 0.3
    keep[..., 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, keep & AHEAD)
    torch.testing.assert_close(tfast.attention(q, k, v, keep, causal=True), expected)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_causal_with_a_scale_that_is_not_positive(scale: float) -> None:
    """PyTorch's fused kernel gives NaN."""
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    expected = (q @ k.mT * scale).masked_fill(~AHEAD, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(tfast.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale), expected)


@pytest.mark.parametrize("before", [True, False])
def test_a_table_with_a_greatest_norm(before: bool) -> None:
    """A call writes to the table, in eval and without gradients, too."""
    torch.manual_seed(0)
    ids, norm = torch.tensor([0, 2]), 1.0
    plain = nn.Sequential(nn.Embedding(5, 16, max_norm=norm), nn.LayerNorm(16)).eval()
    model = copy.deepcopy(plain)
    model[0].max_norm = norm if before else None
    assert tfast.accelerate(model).swapped
    model[0].max_norm = norm
    old = plain[0].weight.detach().clone()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids))
    assert torch.equal(model[0].weight, plain[0].weight) and not torch.equal(plain[0].weight, old)


@pytest.mark.parametrize("name", ["Bert", "Llama", "T5", "Mamba"])
def test_trainer_decays_the_same_parameters(name: str) -> None:
    """Trainer chooses by the class of a module and by names; of Mamba it decays the last norm and D."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    given = {
        "T5": {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        "Mamba": {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},
    }
    plain = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**given.get(name, sizes)))
    model = copy.deepcopy(plain)
    assert tfast.accelerate(model).swapped
    trainer = transformers.Trainer.__new__(transformers.Trainer)
    chosen = trainer.get_decay_parameter_names(plain)
    assert trainer.get_decay_parameter_names(model) == chosen
    assert any("norm" in parameter for parameter in chosen) == (name == "Mamba")


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_norms_keep_the_dtype_of_the_plain_ones(autocast: bool, dtype: torch.dtype, kind: type[nn.Module]) -> None:
    """Under autocast on a CPU a norm gives 16 bits; with weights in float32 it takes 16 bits outside of it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), kind(16))
    if not autocast:
        plain[0].to(dtype)
    model = copy.deepcopy(plain)
    assert tfast.accelerate(model).swapped
    x = torch.randn(2, 5, 16, dtype=torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        out, expected = model(x), plain(x)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected)


class Heads(nn.Module):
    """Encoder with a head that a call uses, and a table and a head that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = nn.Embedding(32, 16), nn.Embedding(5, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.other = nn.Linear(16, 32), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor]:
        h = self.encoder(self.table(input_ids), src_key_padding_mask=attention_mask == 0)
        return (F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten()),)


def with_unused_parts(name: str) -> nn.Module:
    """Return a model of which a call leaves parts out, the frozen bias of each norm among them."""
    torch.manual_seed(0)
    if name == "torch":
        model: nn.Module = Heads()
    else:
        transformers = pytest.importorskip("transformers")
        sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"vocab_size": 32, "num_hidden_layers": 2}
        config = transformers.BertConfig(**sizes, num_attention_heads=2)
        model = transformers.BertForMaskedLM(config)
        model.bert.pooler = transformers.models.bert.modeling_bert.BertPooler(config)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not ("norm" in key.lower() and key.endswith("bias")))
    return model


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"packed": True, "fused_loss": True}], ids=str)
@pytest.mark.parametrize("name", ["torch", "Bert"])
def test_what_has_no_gradient_has_none(name: str, options: dict[str, Any]) -> None:
    """AdamW decays a weight whose gradient is zero, and leaves one that has none."""
    plain = with_unused_parts(name)
    model = copy.deepcopy(plain)
    assert tfast.accelerate(model, **options).swapped
    ids = torch.arange(3, 15).view(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    without = []
    for m in (model.train(), plain.train()):
        m(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))[0].backward()
        without.append({key for key, p in m.named_parameters() if p.grad is None})
    assert without[0] == without[1]
    assert len(without[1]) > 4


@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_a_row_of_an_int8_layer_depends_on_no_other(packed: bool) -> None:
    """Elsewhere one scale serves all rows, and in float32 the number of rows decides the order of a sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()
    x = torch.randn(9, 64)
    exact = model(x)
    assert tfast.accelerate(model, quantize="int8", packed=packed).swapped
    expected = model(x)
    assert not torch.allclose(expected, exact, atol=1e-5)
    louder = torch.cat([x[:5], 100 * x[5:]])
    for rows in (x[:1], x[:2], x[:3], x[:5], louder):
        kept = min(len(rows), 5)
        assert torch.equal(model(rows)[:kept], expected[:kept])


@pytest.mark.parametrize("training", [True, False])
def test_layers_take_jagged_tensors_as_torch_does(training: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.0), nn.GELU()).train(training)
    model = copy.deepcopy(plain)
    assert tfast.accelerate(model).swapped
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    torch.testing.assert_close(model(x).values(), plain(x).values())


def test_attention_of_jagged_tensors_is_that_of_torch() -> None:
    """Causal, no kernel of a CPU takes it; `tfast.attention` names the argument."""
    torch.manual_seed(0)
    x = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
    expected = F.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(tfast.scaled_dot_product_attention(x, x, x).values(), expected.values())
    for call in (F.scaled_dot_product_attention, tfast.scaled_dot_product_attention):
        with pytest.raises(RuntimeError, match="No viable backend"):
            call(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match="q: expected a dense tensor, got a nested tensor"):
        tfast.attention(x, x, x, causal=True)
