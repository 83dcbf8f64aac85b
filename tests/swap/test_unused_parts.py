"""Parts of a model that a call leaves out: what has no gradient in the plain model has none after ``accelerate``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast


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
