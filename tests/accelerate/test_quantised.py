"""``quantize_dynamic`` after ``accelerate``: as many quantised layers, and the numbers, of the plain model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as Quantised
from torch.ao.quantization import quantize_dynamic
from torch.nn.utils import parametrize

import transformer_fast as tfast
from transformer_fast.accelerate.output_layer import OutputLayer
from transformer_fast.layers.linear import Linear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IDS = torch.randint(3, 99, (2, 7))
KEEP = torch.arange(7) < torch.tensor([[7], [4]])
X = torch.randn(2, 5, 32)


def bert(kind: str) -> nn.Module:
    return getattr(transformers, f"Bert{kind}")(transformers.BertConfig(vocab_size=99, **SIZES))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **SIZES))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "bert": (
        lambda: bert("ForSequenceClassification"), lambda m: m(input_ids=IDS, attention_mask=KEEP.long()).logits,
    ),
    "bert with a head": (
        lambda: bert("ForMaskedLM"), lambda m: m(input_ids=IDS, attention_mask=KEEP.long()).logits[KEEP],
    ),
    "vit": (vit, lambda m: m(torch.linspace(0, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)).logits),
    "torch": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), nn.Linear(32, 9)),
        lambda m: m(X),
    ),
    "torch's stack": (
        lambda: nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2), nn.Linear(32, 9)
        ),
        lambda m: m(X),
    ),
}  # fmt: skip
ARGUMENTS = [{}, {"packed": True}, {"fused_loss": True}, {"packed": True, "fused_loss": True}]


@pytest.fixture(autouse=True)
def swapped_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers are swapped on some processors only."""
    monkeypatch.setattr("transformer_fast.accelerate.engine.is_faster", lambda weight: True)


def kinds(model: nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]


def quantised(model: nn.Module, **options: Any) -> nn.Module:
    return quantize_dynamic(model, {nn.Linear}, torch.qint8, **options)


def count(model: nn.Module) -> int:
    return sum(isinstance(m, Quantised) for m in model.modules())


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda given: " and ".join(given) or "plain")
@pytest.mark.parametrize("name", MODELS)
def test_as_many_layers_are_quantised(name: str, arguments: dict[str, bool]) -> None:
    make, call = MODELS[name]
    plain = make().eval()
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, **arguments)
    before = kinds(fast)
    assert any(isinstance(m, Linear) for m in fast.modules())
    theirs, ours = quantised(plain), quantised(fast)
    assert count(ours) == count(theirs) > 0 and kinds(fast) == before
    assert [path for path, m in ours.named_modules() if isinstance(m, Quantised)] == [
        path for path, m in theirs.named_modules() if isinstance(m, Quantised)
    ]
    with torch.no_grad():
        # Torch's own layer cannot run quantised, and without padding the range of the numbers is another.
        rounded = name.startswith("torch") or "packed" in arguments
        torch.testing.assert_close(
            call(ours), call(plain if rounded else theirs), rtol=0, atol=0.05 if rounded else 1e-5
        )
    report.undo()
    assert kinds(fast) == kinds(plain)


def test_in_place_and_undone_afterwards() -> None:
    plain = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).eval()
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast)
    quantised(fast, inplace=True)
    torch.testing.assert_close(fast(X), quantised(plain)(X))
    assert count(fast) == 1
    report.undo()
    assert type(fast[1]) is nn.LayerNorm and count(fast) == 1


def test_the_other_swapped_modules_stay_fused() -> None:
    fast = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64), nn.LayerNorm(32), nn.Linear(32, 32)).eval()
    tfast.accelerate(fast)
    before, after = kinds(fast), kinds(quantised(fast))
    ours = [kind for kind in before if kind.__module__.startswith("transformer_fast") and kind is not Linear]
    assert ours == [kind for kind in after if kind.__module__.startswith("transformer_fast")]


class Mine(Linear):
    """Subclass with code of its own, which quantisation leaves as it leaves subclasses of ``nn.Linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_subclasses_of_ours_stay() -> None:
    model = nn.Sequential(Mine(32, 32)).eval()
    assert count(quantised(model)) == 0 and torch.equal(quantised(model)(X), model(X))


@pytest.mark.parametrize("kind", [Linear, OutputLayer])
def test_nothing_else_gives_the_class_back(kind: type[Linear]) -> None:
    layer = kind(4, 4)
    for name in dir(layer):
        getattr(layer, name, None)
    assert not parametrize.is_parametrized(layer) and not hasattr(layer, "parametrizations")
    assert type(layer) is type(copy.deepcopy(layer)) is type(pickle.loads(pickle.dumps(layer))) is kind
    nn.utils.parametrizations.weight_norm(layer)
    assert parametrize.is_parametrized(layer) and parametrize.type_before_parametrizations(layer) is kind
    assert isinstance(layer, kind) and type(layer) is not kind
    assert list(layer.parametrizations) == ["weight"]
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is kind
