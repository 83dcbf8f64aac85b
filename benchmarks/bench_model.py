"""The whole Transformer: a training step and a forward pass, against the eager reference and torch.nn.Transformer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transformer_fast as tfast
from transformer_fast.reference import layers as reference

VOCAB = 8000
SHAPES = {"base-b8-l48": (512, 6, 8, 2048, 8, 48), "small-b32-l32": (256, 3, 8, 1024, 32, 32)}


class TorchTransformer(nn.Module):
    """``torch.nn.Transformer`` with embeddings and output, of the same sizes, with the same masks."""

    def __init__(self, d_model: int, N: int, heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.ModuleList(reference.Embedder(VOCAB, d_model) for _ in range(2))
        self.pe = reference.PositionalEncoder(d_model, dropout)
        self.transformer = nn.Transformer(
            d_model, heads, N, N, d_ff, dropout, batch_first=True, norm_first=True
        )  # fmt: skip
        self.out = nn.Linear(d_model, VOCAB)

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
    d_model, N, heads, d_ff, B, L = SHAPES[shape]
    torch.manual_seed(0)
    slow = reference.Transformer(VOCAB, VOCAB, d_model, N, heads, 0.1, d_ff=d_ff, norm="layer").to(device)
    fast = tfast.Transformer(VOCAB, VOCAB, d_model, N, heads, 0.1, d_ff=d_ff, norm="layer").to(device)
    fast.load_state_dict(slow.state_dict())
    torchs = TorchTransformer(d_model, N, heads, d_ff, 0.1).to(device)

    def make_inputs():
        lengths = torch.randint(L // 4, L + 1, (B,), device=device)
        return (*(torch.randint(0, VOCAB, (B, L), device=device) for _ in range(2)), lengths)

    def ours(inputs):
        src, trg, lengths = inputs
        return fast(src, trg, tfast.AttentionMask.lengths(lengths), tfast.AttentionMask.causal())

    def eager(inputs):
        src, trg, lengths = inputs
        keep = torch.arange(L, device=device)[None, None] < lengths[:, None, None]
        return slow(src, trg, keep, reference.subsequentmask(L).to(device))

    models = {"ours": (fast, ours), "eager": (slow, eager), "nn.Transformer": (torchs, lambda i: torchs(*i))}
    parameters = sum(p.numel() for name, p in fast.named_parameters() if "embed" not in name)
    return models, make_inputs, 2.0 * parameters * B * L  # products with weights only


def same_logits(models):
    def check(inputs):
        for model, _ in models.values():
            model.eval()
        with torch.inference_mode():
            torch.testing.assert_close(models["ours"][1](inputs), models["eager"][1](inputs), atol=2e-3, rtol=2e-3)

    return check


@pytest.mark.parametrize("shape", SHAPES)
def test_inference(versus, shape, device):
    models, make_inputs, operations = build(shape, device)
    check = same_logits(models)

    def call(forward):
        return lambda inputs: torch.inference_mode()(forward)(inputs)

    versus(
        make_inputs,
        {name: call(forward) for name, (_, forward) in models.items()},
        check=check,
        operations=operations,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_training_step(versus, shape, device):
    """Forward, label-smoothed loss and backward, dropout 0.1."""
    models, make_inputs, operations = build(shape, device)
    check = same_logits(models)

    def step(model, forward):
        def run(inputs):
            model.train()
            logits = forward(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), inputs[1].flatten(), label_smoothing=0.1)
            model.zero_grad(set_to_none=True)
            loss.backward()
            return loss.detach()

        return run

    versus(
        make_inputs,
        {name: step(*both) for name, both in models.items()},
        check=check,
        operations=3 * operations,
    )
