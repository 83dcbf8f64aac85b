"""Update of the weights: schedule, initial weights, accumulation, precision, memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from small_training import fresh_run, short_config, weights_of
from torch import nn

from transformer_fast.translation import TrainConfig, build_model, load_trained, train, training
from transformer_fast.translation.batching import TokenBatches
from transformer_fast.translation.evaluate import batch_loss, logits, token_loss
from transformer_fast.translation.model import init_weights
from transformer_fast.translation.optim import build_optimizer, learning_rate
from transformer_fast.translation.progress import Silent
from transformer_fast.translation.tokenizer import PAD

EXACT = {"clip": 0.0, "dropout": 0.0}
"""No clipping and no dropout, so that two updates on the same tokens are equal."""


# Schedule and initial weights


def test_learning_rate_follows_the_paper() -> None:
    config = TrainConfig(source="a", target="b", save="c", warmup=4000, lr=512**-0.5 * 4000**-0.5)
    for step in (1, 17, 3999, 4000, 4001, 100_000):
        paper = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(step, config) == pytest.approx(paper, rel=1e-12)


def test_cooldown_ends_at_nearly_zero() -> None:
    config = TrainConfig(source="a", target="b", save="c", warmup=10, lr=1.0, max_steps=100, cooldown=20)
    flat = TrainConfig(source="a", target="b", save="c", warmup=10, lr=1.0, max_steps=100)
    ratios = [learning_rate(step, config) / learning_rate(step, flat) for step in range(79, 101)]
    assert ratios[:2] == [1.0, 1.0]
    assert ratios[2:] == pytest.approx([k / 21 for k in range(20, 0, -1)])


def test_initial_weights(corpus: dict[str, str], tmp_path: Path) -> None:
    model = build_model(short_config(corpus, tmp_path, d_model=128), 500)
    embedding = model.encoder.embed.lut.weight
    assert embedding is model.decoder.embed.lut.weight is model.out.weight
    assert float(embedding.detach()[1:].std()) == pytest.approx(128**-0.5, rel=0.02)
    assert not embedding.detach()[PAD].any()
    weight = model.encoder.layers[0].attn.q_linear.weight.detach()
    assert float(weight.abs().max()) == pytest.approx((6 / 256) ** 0.5, rel=0.01)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.detach().unique().tolist() == [0.0 if name.endswith("bias") else 1.0]
        elif name.endswith("bias"):
            assert not parameter.detach().any()


def test_stacked_projections_start_like_separate_ones() -> None:
    attention = nn.MultiheadAttention(128, 4)
    init_weights(attention, 128)
    for part in attention.in_proj_weight.detach().chunk(3):
        assert float(part.abs().max()) == pytest.approx((6 / 256) ** 0.5, rel=0.01)


# An update


def test_optimizer_is_that_of_the_paper(corpus: dict[str, str], tmp_path: Path) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), short_config(corpus, tmp_path))
    (group,) = optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


def test_accumulated_batches_weigh_every_token_alike(corpus: dict[str, str], tmp_path: Path) -> None:
    """An update of three batches has the gradient of the mean over all tokens, whatever their distribution."""
    config = short_config(corpus, tmp_path, accumulate=3, dropout=0.0, clip=0.0, batch_tokens=150)
    run = fresh_run(config)
    stream = TokenBatches(run.batches.corpus, config.batch_tokens, config.seed)
    batches = [stream.next_batch()[0] for _ in range(3)]
    assert len({batch.tokens for batch in batches}) > 1
    loss = sum(token_loss(logits(run.learner.model.train(), b), b.target_out, 0.1) for b in batches)
    loss = loss / sum(b.tokens for b in batches)
    wanted = torch.autograd.grad(loss, list(run.learner.model.parameters()))
    run._update()
    assert run.tokens == sum(b.tokens for b in batches)
    for parameter, gradient in zip(run.learner.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_gradient_is_clipped(corpus: dict[str, str], tmp_path: Path) -> None:
    config = short_config(corpus, tmp_path, clip=0.01)
    run = fresh_run(config)
    run._update()
    norm = torch.stack([p.grad.norm() for p in run.learner.model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert run.window.sums()[1] > 0.1


# Gradient accumulation, precision, seeds, memory


def assert_same_gradients(one: training._Run, other: training._Run) -> None:
    """Assert that the gradients of two runs are equal."""
    for ours, theirs in zip(one.learner.model.parameters(), other.learner.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_four_unequal_micro_batches_are_one_big_batch(corpus: dict[str, str], tmp_path: Path) -> None:
    """Batches of 1, 2, 5 and 9 sentences, and all 17 in one: equal loss, gradients and weights up to rounding."""
    runs = [fresh_run(short_config(corpus, tmp_path / name, **EXACT)) for name in ("four", "one")]
    pairs, cuts = runs[0].batches.corpus, (0, 1, 3, 8, 17)
    four = [pairs.batch(range(*cut)) for cut in itertools.pairwise(cuts)]
    one = [pairs.batch(range(17))]
    tokens = one[0].tokens
    assert len({batch.tokens for batch in four}) == 4 and sum(batch.tokens for batch in four) == tokens
    (loss, norm), (whole_loss, whole_norm) = (
        run.learner.update(1, batches, tokens) for run, batches in zip(runs, (four, one))
    )
    assert float(loss) == pytest.approx(float(whole_loss), rel=1e-6)
    assert float(norm) == pytest.approx(float(whole_norm), rel=1e-5)
    assert_same_gradients(*runs)


def test_a_packed_update_is_the_padded_one(corpus: dict[str, str], tmp_path: Path) -> None:
    """Sentences have unequal lengths on both sides; no layer sees padding, and loss and gradients are equal."""
    runs = [fresh_run(short_config(corpus, tmp_path / str(packed), packed=packed, **EXACT)) for packed in (True, False)]
    rows: list[int] = []
    for run in runs:
        run.learner.model.decoder.layers[0].register_forward_pre_hook(
            lambda module, inputs: rows.append(inputs[0].shape[:-1].numel())
        )
    batch = runs[0].batches.corpus.batch(range(16))
    losses = [run.learner.update(1, [batch], batch.tokens)[0] for run in runs]
    assert rows == [batch.tokens, batch.target_in.numel()] and batch.tokens < batch.target_in.numel()
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
    assert_same_gradients(*runs)


def test_bf16_on_the_cpu_follows_fp32(corpus: dict[str, str], tmp_path: Path) -> None:
    runs = [fresh_run(short_config(corpus, tmp_path / amp, amp=amp, **EXACT)) for amp in ("off", "bf16")]
    seen: list[torch.dtype] = []
    runs[1].learner.model.encoder.layers[0].attn.register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    batch = runs[0].batches.corpus.batch(range(16))
    losses = [float(run.learner.update(1, [batch], batch.tokens)[0]) / batch.tokens for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3) and losses[1] != losses[0]
    assert {p.dtype for p in runs[1].learner.model.parameters()} == {torch.float32}
    assert set(seen) == {torch.bfloat16}


def test_runs_in_bf16_differ_by_less_than_seeds(corpus: dict[str, str], tmp_path: Path) -> None:
    """Both runs have the same dropout masks."""
    losses = {
        amp: [
            train(short_config(corpus, tmp_path / f"{amp}-{seed}", amp=amp, seed=seed), Silent()).scores["valid_loss"]
            for seed in range(3)
        ]
        for amp in ("off", "bf16")
    }
    spread = max(losses["off"]) - min(losses["off"])
    assert 0 < max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < spread / 10, losses


def test_activation_checkpointing_changes_no_bit(corpus: dict[str, str], tmp_path: Path) -> None:
    """Recomputed layers draw the same dropout: runs are equal, and fewer tensors are saved for backward."""
    ends, kept = [], []
    for name, again in (("kept", False), ("again", True)):
        config = short_config(corpus, tmp_path / name, dropout=0.3, checkpoint_activations=again)
        train(config, Silent())
        ends.append(weights_of(tmp_path / name))
        model = load_trained(config.save, which="last").model.train()
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            batch_loss(model, fresh_run(short_config(corpus, tmp_path / f"{name}-2")).batches.corpus.batch(range(20)))
        kept.append(sum(sizes))
    assert ends[0] == ends[1]
    assert kept[1] < 0.8 * kept[0]
