"""Time that packing saves a whole model: a training step on batches of sentences, packed and padded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import transformer_fast as tfast
from transformer_fast.masks.packing import packing_of, take

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import F32, LONGEST, Case

SMALL_CASE = "test_training_step[cpu-cpu-padded to max]"
VOCAB = 8000
# (d_model, layers, heads, d_ff, batch), padded length (None: the longest sentence), on which device
SIZES = {"cpu": (128, 2, 4, 512, 32), "cuda": (512, 6, 8, 2048, 64)}
CASES = [("cpu", None), ("cpu", LONGEST), ("cuda", None), ("cuda", LONGEST)]


@pytest.mark.parametrize(("on", "padded"), CASES, ids=[f"{on}-padded to {padded or 'max'}" for on, padded in CASES])
def test_training_step(versus, device, on, padded):
    """Forward, label-smoothed loss over the real targets and backward, dropout 0.1."""
    if on != device:
        pytest.skip(f"a case for {on}")
    d_model, N, heads, d_ff, B = SIZES[on]
    case = Case("sentences", B, heads, padded, D=d_model // heads, cross=True, dtype=F32)
    dtype = torch.float32 if on == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    model = tfast.Transformer(VOCAB, VOCAB, d_model, N, heads, 0.1, d_ff=d_ff, norm="layer").to(device, dtype)
    source, target = case.key_lengths(), case.query_lengths()
    targets = packing_of(target, B, case.queries, device)
    # The host has the lengths, as every data loader does; padded attention wants them beside its tensors.
    masks = {
        True: (tfast.AttentionMask.lengths(source), tfast.AttentionMask.lengths(target) & tfast.AttentionMask.causal()),
        False: (tfast.AttentionMask.lengths(source.to(device)), tfast.AttentionMask.causal()),
    }

    def make_inputs():
        return tuple(torch.randint(0, VOCAB, (B, length), device=device) for length in (case.keys, case.queries))

    def logits(inputs, packed):
        model.packed = packed
        return take(model(*inputs, *masks[packed]), targets)

    def step(packed):
        def run(inputs):
            model.train()
            labels = take(inputs[1], targets)
            loss = F.cross_entropy(logits(inputs, packed).float(), labels, label_smoothing=0.1)
            model.zero_grad(set_to_none=True)
            loss.backward()
            return loss.detach()

        return run

    def check(inputs):
        model.eval()
        with torch.inference_mode():
            tolerance = 2e-3 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(logits(inputs, True), logits(inputs, False), atol=tolerance, rtol=tolerance)

    parameters = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    versus(
        make_inputs,
        {"ours": step(True), "ours padded": step(False)},
        check=check,
        operations=6.0 * parameters * int(target.sum()),
    )
