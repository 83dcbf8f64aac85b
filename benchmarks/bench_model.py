"""The whole Transformer: a training step and a forward pass, against the eager reference and torch.nn.Transformer.

torch.compile of the whole reference takes minutes on a CPU. So by default each *kind* of layer of it is compiled, as
the layers of one kind share their code, and the loss; embeddings and what stands between run as they are. The whole
model as one graph is timed with ``--compile-whole``. Under autocast to bfloat16 a step is timed where there are
instructions for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transformer_fast as tfast
from transformer_fast.reference import layers as reference
from transformer_fast.translation.environment import multiplies_bf16

SMALL_CASE = "test_inference[cpu-multi30k-b64-l32]"


class Model(NamedTuple):
    """One side: a module, and functions of (source, target, lengths) for its logits and its loss."""

    module: nn.Module
    forward: Callable | None
    loss: Callable


PAD = 0
# (d_model, N, heads, d_ff, batch, length, vocabulary, dropout): the base of the paper, and the tiny model for Multi30k
# of Wu et al. (2021), on a batch as long as its longest sentences.
SHAPES = {
    "base-b16-l64": (512, 6, 8, 2048, 16, 64, 8000, 0.1),
    "multi30k-b64-l32": (128, 4, 4, 256, 64, 32, 10_000, 0.3),
}


class TorchTransformer(nn.Module):
    """``torch.nn.Transformer`` with embeddings and output, of the same sizes, with the same masks."""

    def __init__(self, vocabulary: int, d_model: int, N: int, heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.ModuleList(reference.Embedder(vocabulary, d_model) for _ in range(2))
        self.pe = reference.PositionalEncoder(d_model, dropout)
        self.transformer = nn.Transformer(
            d_model, heads, N, N, d_ff, dropout, batch_first=True, norm_first=True
        )  # fmt: skip
        self.out = nn.Linear(d_model, vocabulary)

    def forward(self, src, trg, lengths):
        padding = torch.arange(src.shape[1], device=src.device) >= lengths[:, None]
        look_ahead = torch.ones(trg.shape[1], trg.shape[1], dtype=torch.bool, device=trg.device).triu(1)
        source, target = (self.pe(embed(ids)) for embed, ids in zip(self.embed, (src, trg)))
        hidden = self.transformer(
            source,
            target,
            tgt_mask=look_ahead,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.out(hidden)


def build(shape: str, device: str):
    d_model, N, heads, d_ff, B, L, vocabulary, dropout = SHAPES[shape]
    torch.manual_seed(0)
    sizes, options = (vocabulary, vocabulary, d_model, N, heads, dropout), {"d_ff": d_ff, "norm": "layer"}
    slow = reference.Transformer(*sizes, **options).to(device)
    fast = tfast.Transformer(*sizes, **options).to(device)
    fast.load_state_dict(slow.state_dict())
    torchs = TorchTransformer(vocabulary, d_model, N, heads, d_ff, dropout).to(device)
    # Evenly from a quarter of the length to all of it, so that every run has the same share of padding, 3 / 8.
    spread = torch.linspace(L / 4, L, B).round().long()

    def make_inputs():
        """Return source, target and the lengths of both; ids past the lengths are padding."""
        lengths = spread[torch.randperm(B)].to(device)
        inside = torch.arange(L, device=device) < lengths[:, None]
        draws = (torch.randint(1, vocabulary, (B, L), device=device) for _ in range(2))
        return (*(torch.where(inside, ids, PAD) for ids in draws), lengths)

    def ours(inputs):
        src, trg, lengths = inputs
        return fast(src, trg, tfast.AttentionMask.lengths(lengths), tfast.AttentionMask.causal())

    look_ahead = reference.subsequentmask(L).to(device)

    def eager(inputs):
        src, trg, lengths = inputs
        keep = torch.arange(L, device=device)[None, None] < lengths[:, None, None]
        return slow(src, trg, keep, look_ahead)

    def own_loss(model):
        def loss(inputs):
            src, trg, lengths = inputs
            lengths = tfast.AttentionMask.lengths(lengths)
            masks = lengths, lengths & tfast.AttentionMask.causal()
            return model.loss(src, trg, *masks, trg, label_smoothing=0.1, ignore_index=PAD)

        return loss

    def loss_of(forward):
        def loss(inputs):
            logits = forward(inputs).flatten(0, 1)
            return F.cross_entropy(logits, inputs[1].flatten(), label_smoothing=0.1, ignore_index=PAD)

        return loss

    packed = copy.copy(fast)  # the same parameters
    packed.packed = True
    models = {
        "ours": Model(fast, ours, own_loss(fast)),
        "ours packed": Model(packed, None, own_loss(packed)),
        "eager": Model(slow, eager, loss_of(eager)),
        "nn.Transformer": Model(torchs, lambda i: torchs(*i), loss_of(lambda i: torchs(*i))),
    }
    parameters = sum(p.numel() for name, p in fast.named_parameters() if "embed" not in name)
    return models, make_inputs, 2.0 * parameters * B * L  # products with weights only, padding included


def same_logits(models):
    def check(inputs):
        for model in models.values():
            model.module.eval()
        ours, eager = models["ours"], models["eager"]
        with torch.inference_mode():
            torch.testing.assert_close(ours.forward(inputs), eager.forward(inputs), atol=2e-3, rtol=2e-3)
            for name in ("ours", "ours packed"):
                torch.testing.assert_close(models[name].loss(inputs), eager.loss(inputs), atol=2e-3, rtol=2e-3)

    return check


@pytest.mark.parametrize("shape", SHAPES)
def test_inference(versus, shape, device):
    models, make_inputs, operations = build(shape, device)
    check = same_logits(models)

    def call(forward):
        return lambda inputs: torch.inference_mode()(forward)(inputs)

    versus(
        make_inputs,
        {name: call(model.forward) for name, model in models.items() if model.forward},
        check=check,
        operations=operations,
    )


def compiled_by_layer(models, shape, device):
    """Return the reference with each kind of layer compiled, and its loss; it shares the parameters."""
    model = copy.deepcopy(models["eager"].module)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.compile()
    length = SHAPES[shape][5]
    criterion = torch.compile(F.cross_entropy)

    def loss(inputs):
        src, trg, lengths = inputs
        keep = torch.arange(length, device=device)[None, None] < lengths[:, None, None]
        logits = model(src, trg, keep, reference.subsequentmask(length).to(device)).flatten(0, 1)
        return criterion(logits, trg.flatten(), label_smoothing=0.1, ignore_index=PAD)

    return Model(model, None, loss)


def in_bf16(model):
    """Return the model under autocast, as `translation.train` with `amp="bf16"` runs it."""

    def loss(inputs):
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            return model.loss(inputs)

    return model._replace(loss=loss)


@pytest.mark.parametrize("shape", SHAPES)
def test_training_step(versus, shape, device, request):
    """Forward, label-smoothed loss and backward, with dropout; 3 / 8 of the batch is padding."""
    models, make_inputs, operations = build(shape, device)
    check = same_logits(models)
    models["compiled by layer"] = compiled_by_layer(models, shape, device)
    if device == "cuda" or multiplies_bf16():
        for name in ("ours", "ours packed", "nn.Transformer"):
            models[f"{name}, bf16"] = in_bf16(models[name])
    if request.config.getoption("--compile-whole"):
        models["compiled whole"] = models["eager"]._replace(loss=torch.compile(models["eager"].loss))

    def step(model):
        def run(inputs):
            model.module.train()
            loss = model.loss(inputs)
            model.module.zero_grad(set_to_none=True)
            loss.backward()
            return loss.detach()

        return run

    versus(
        make_inputs,
        {name: step(model) for name, model in models.items()},
        check=check,
        operations=3 * operations,
    )
