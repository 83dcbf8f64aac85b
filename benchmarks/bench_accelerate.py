"""Models that somebody already has, before and after ``tfast.accelerate``: an evaluation and a training step."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.reference import layers
from transformer_fast.reference.dialects import d2l, tensorflow

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from sdpa_models import Gpt

VOCAB, D, N, HEADS, D_FF, B, L = 4000, 256, 3, 4, 1024, 16, 32
SIZES = (VOCAB, D, D_FF, HEADS, N, 0.1)


def stock() -> nn.Module:
    return nn.Transformer(D, HEADS, N, N, D_FF, 0.1, batch_first=True)


def call_stock(m: nn.Module, ids: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    blocked = torch.arange(L, device=ids.device) >= lengths[:, None]
    look_ahead = nn.Transformer.generate_square_subsequent_mask(L, device=ids.device)
    padding = {"src_key_padding_mask": blocked, "memory_key_padding_mask": blocked}
    return m(x, x, tgt_mask=look_ahead, tgt_is_causal=True, **padding)


def call_classic(m: nn.Module, ids: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    keep = (torch.arange(L, device=ids.device) < lengths[:, None]).unsqueeze(1)
    return m(ids, ids, keep, layers.subsequentmask(L).to(ids.device))


def call_tensorflow(m: nn.Module, ids: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    padded = torch.where(torch.arange(L, device=ids.device) < lengths[:, None], ids, 0)
    return m(padded, ids, *(mask.to(ids.device) for mask in tensorflow.create_masks(padded, ids)))[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "nn.Transformer": (stock, call_stock),
    "classic": (lambda: layers.Transformer(VOCAB, VOCAB, D, N, HEADS, 0.1, d_ff=D_FF), call_classic),
    "tensorflow": (lambda: tensorflow.Transformer(N, D, HEADS, D_FF, VOCAB, VOCAB, 100, 100), call_tensorflow),
    "d2l": (
        lambda: d2l.EncoderDecoder(d2l.TransformerEncoder(*SIZES), d2l.TransformerDecoder(*SIZES)),
        lambda m, ids, lengths, x: m(ids, ids, lengths)[0],
    ),
}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
@pytest.mark.parametrize("name", MODELS)
def test_before_and_after(versus, name, training, device):
    """Dropout 0.1 in training; a batch of which a third is padding."""
    make, call = MODELS[name]
    torch.manual_seed(0)
    before = make().to(device)
    after = copy.deepcopy(before)
    assert tfast.accelerate(after).swapped

    def make_inputs():
        lengths = torch.randint(L // 4, L + 1, (B,), device=device)
        return torch.randint(1, VOCAB, (B, L), device=device), lengths, torch.randn(B, L, D, device=device)

    def check(inputs):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(call(after.eval(), *inputs), call(before.eval(), *inputs), atol=2e-3, rtol=2e-3)

    def run(model):
        def step(inputs):
            model.train(training)
            if not training:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch.nn's, of nested tensors
                    return call(model, *inputs)
            loss = call(model, *inputs).square().mean()
            model.zero_grad(set_to_none=True)
            loss.backward()
            return loss.detach()

        return step

    versus(make_inputs, {"ours": run(after), "before": run(before)}, check=check)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
@pytest.mark.parametrize("length", [128, 512, 1024])
def test_gpt(versus, length, training, device):
    """A GPT that calls torch's attention in its own code, with dropout 0.1: d 256, 4 heads, 3 layers, 4 sequences."""
    torch.manual_seed(0)
    before = Gpt(VOCAB, D, N, HEADS, length, 0.1).to(device).train(training)
    after = copy.deepcopy(before)
    assert tfast.accelerate(after).swapped

    def make_inputs():
        return torch.randint(VOCAB, (4, length + 1), device=device)

    def check(ids):
        with torch.no_grad():
            torch.testing.assert_close(after.eval()(ids[:, 1:]), before.eval()(ids[:, 1:]), atol=2e-3, rtol=2e-3)
        after.train(training), before.train(training)

    def run(model):
        def step(ids):
            if not training:
                with torch.no_grad():
                    return model(ids[:, 1:])
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            model.zero_grad(set_to_none=True)
            loss.backward()
            return loss.detach()

        return step

    versus(make_inputs, {"ours": run(after), "before": run(before)}, check=check)
