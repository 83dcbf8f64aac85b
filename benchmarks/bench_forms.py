"""Small models of transformers of many forms, with their default attention, before and after ``tfast.accelerate``,
without dropout: an evaluation and a training step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

SMALL_CASE = "test_forms[cpu-vit-evaluation]"
D, HEADS, LAYERS, B = 128, 4, 3, 4
SHAPE = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 4 * D}
IMAGE = {"image_size": 224, "patch_size": 16}


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout of a model to 0."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def of_transformers(name: str, inputs: str, **fields: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Model of transformers with random weights, and its inputs."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**fields))
    size = fields.get("image_size", 0)
    given = {
        "ids": lambda: (torch.randint(4, 99, (B, 256)),),
        "image": lambda: (torch.randn(B, 3, size, size),),
        "sound": lambda: (torch.randn(B, 80, 512), ),
    }  # fmt: skip
    return model, given[inputs]()


WHISPER = {f"{part}_{name}": size for part in ("encoder", "decoder")
           for name, size in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", 4 * D))}  # fmt: skip
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "sam": lambda: of_transformers("SamVisionModel", "image", **SHAPE, **IMAGE, mlp_dim=4 * D, output_channels=32,
        window_size=7, global_attn_indexes=[1]),
    "dinov2": lambda: of_transformers("Dinov2Model", "image", **SHAPE, **IMAGE),
    "clip": lambda: of_transformers("CLIPVisionModel", "image", **SHAPE, **IMAGE),
    "vit": lambda: of_transformers("ViTModel", "image", **SHAPE, **IMAGE),
    "esm": lambda: of_transformers("EsmModel", "ids", **SHAPE, vocab_size=99, pad_token_id=1,
        attention_probs_dropout_prob=0.0),
    "whisper": lambda: (
        of_transformers("WhisperModel", "sound", d_model=D, **WHISPER, max_source_positions=256, vocab_size=99,
            pad_token_id=0, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)[0].encoder,
        (torch.randn(B, 80, 512),)),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
@pytest.mark.parametrize("name", MODELS)
def test_forms(versus, name, training, device):
    """Width 128, 4 heads, 3 layers; 4 images of 224 x 224, or sequences. "before" has the default attention; "eager"
    is transformers' other one."""
    torch.manual_seed(0)
    before, inputs = MODELS[name]()
    before = without_dropout(before).to(device).train(training)
    after, eager = copy.deepcopy(before), copy.deepcopy(before)
    calls = {"before": run(before, training)}
    if hasattr(eager, "set_attn_implementation"):
        eager.set_attn_implementation("eager")
        calls["eager"] = run(eager, training)
    assert tfast.accelerate(after).swapped

    def check(given):
        with torch.no_grad():
            torch.testing.assert_close(first(after(*given)), first(before(*given)), atol=2e-3, rtol=2e-3)

    versus(lambda: tuple(t.to(device) for t in inputs), {"ours": run(after, training), **calls}, check=check)


def run(model: nn.Module, training: bool) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """An evaluation or a training step of a model."""

    def step(given: tuple[Tensor, ...]) -> Tensor:
        if not training:
            with torch.no_grad():
                return first(model(*given))
        loss = first(model(*given)).square().mean()
        model.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    return step


def first(result: Any) -> Tensor:
    """First tensor of a model's result."""
    return result if isinstance(result, Tensor) else result[0]
