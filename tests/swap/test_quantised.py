"""``accelerate`` after ``quantize_dynamic``: the layers stay quantised, the modules around them are fused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as Quantised
from torch.ao.quantization import quantize_dynamic

import transformer_fast as tfast
from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import d2l

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IDS = torch.randint(3, 20, (2, 7))
KEEP = torch.arange(7) < torch.tensor([[7], [4]])
X = torch.randn(2, 7, 32)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=20, **SIZES))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "torch": (
        lambda: nn.Transformer(32, 2, 1, 1, 64, batch_first=True),
        lambda m: m(X, X, src_key_padding_mask=~KEEP, memory_key_padding_mask=~KEEP),
    ),
    "classic": (
        lambda: reference.Transformer(20, 20, 32, 1, 2, 0.1),
        lambda m: m(IDS, IDS, KEEP[:, None], torch.ones(1, 7, 7).tril().bool()),
    ),
    "d2l": (lambda: d2l.TransformerEncoder(20, 32, 24, 2, 1, 0.1), lambda m: m(IDS, KEEP.sum(1))),
    "bert": (bert, lambda m: m(input_ids=IDS, attention_mask=KEEP.long()).logits[KEEP]),
}


def quantised_layers(model: nn.Module) -> list[str]:
    return [path for path, m in model.named_modules() if isinstance(m, Quantised)]


@pytest.mark.parametrize("arguments", [{}, {"packed": True}, {"fused_loss": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_quantised_layers_stay(name: str, arguments: dict[str, bool]) -> None:
    make, call = MODELS[name]
    plain = make().eval()
    quantised = quantize_dynamic(plain, {nn.Linear}, torch.qint8)
    fast = copy.deepcopy(quantised)
    report = tfast.accelerate(fast, **arguments)
    assert report.swapped and quantised_layers(fast) == quantised_layers(quantised) != []
    with torch.no_grad():
        found = call(fast)
        assert not torch.equal(found, call(plain))
        if name != "torch":  # torch's own encoder cannot run quantised
            torch.testing.assert_close(found, call(quantised), rtol=0, atol=1e-5)
    report.undo()
    assert [type(m) for m in fast.modules()] == [type(m) for m in quantised.modules()]
