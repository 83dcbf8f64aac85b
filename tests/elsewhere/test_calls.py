"""Calls and parts of a model that PyTorch or transformers treats in another way than a good guess says."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
