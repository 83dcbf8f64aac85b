"""Settings, schedule, loss, the training loop and what it reports."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
from small_training import small_config
from torch import nn

from transformer_fast.translation import (
    ConfigError,
    DataError,
    DivergedError,
    RunFolder,
    TrainConfig,
    build_model,
    environment,
    load_trained,
    read_parallel,
    train,
    training,
    validation,
)
from transformer_fast.translation.batching import Corpus, TokenBatches
from transformer_fast.translation.evaluate import (
    batch_loss,
    corpus_bleu,
    corpus_loss,
    exact_share,
    logits,
    token_loss,
    translate_greedily,
)
from transformer_fast.translation.model import init_weights
from transformer_fast.translation.numbers import make_numbers_corpus
from transformer_fast.translation.optim import build_optimizer, learning_rate
from transformer_fast.translation.progress import Silent, Status
from transformer_fast.translation.scores import quality
from transformer_fast.translation.tokenizer import PAD

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def settings(corpus: dict[str, str], save: Path, **changes: object) -> TrainConfig:
    run = {"max_steps": 6, "valid_every": 100, "bleu_sentences": 0}
    return small_config(corpus, save, **run | changes)


def test_precision_and_device_that_are_not_there(corpus: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="amp is 'fp16' but the device is the CPU"):
        train(settings(corpus, tmp_path, amp="fp16"), Silent())
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device is 'cuda' but torch sees no GPU"):
            train(settings(corpus, tmp_path, device="cuda"), Silent())


# Schedule, loss, initial weights


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


def test_loss_is_the_smoothed_cross_entropy_of_real_tokens() -> None:
    scores = torch.randn(3, 5, 11, dtype=torch.float64)
    target = torch.randint(1, 11, (3, 5))
    target[0, 3:] = PAD
    target[2, 1:] = PAD
    expected = 0.0
    for row, column in itertools.product(range(3), range(5)):
        if target[row, column] != PAD:
            log_p = scores[row, column].log_softmax(0)
            wanted = torch.full((11,), 0.2 / 11, dtype=torch.float64)
            wanted[target[row, column]] += 0.8
            expected -= float((wanted * log_p).sum())
    assert float(token_loss(scores, target, 0.2)) == pytest.approx(expected, rel=1e-12)


def test_loss_of_16_bit_scores_is_computed_in_fp32() -> None:
    scores, target = torch.randn(2, 3, 50).bfloat16(), torch.randint(1, 50, (2, 3))
    assert token_loss(scores, target).dtype == torch.float32
    assert torch.equal(token_loss(scores, target), token_loss(scores.float(), target))


def test_initial_weights(corpus: dict[str, str], tmp_path: Path) -> None:
    model = build_model(settings(corpus, tmp_path, d_model=128), 500)
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


# The loop


def test_accumulated_batches_weigh_every_token_alike(corpus: dict[str, str], tmp_path: Path) -> None:
    """One update of three batches has the gradient of the mean over all their tokens, whatever each one holds."""
    config = settings(corpus, tmp_path, accumulate=3, dropout=0.0, clip=0.0, batch_tokens=150)
    folder = RunFolder(config.save)
    with folder.writing():
        run = training._Run(config, folder, Silent(), build_model, lambda: 0.0)
    stream = TokenBatches(run.batches.corpus, config.batch_tokens, config.seed)
    batches = [next(stream) for _ in range(3)]
    assert len({batch.tokens for batch in batches}) > 1
    loss = sum(token_loss(logits(run.learner.model.train(), b), b.target_out, 0.1) for b in batches)
    loss = loss / sum(b.tokens for b in batches)
    wanted = torch.autograd.grad(loss, list(run.learner.model.parameters()))
    run._update()
    assert run.tokens == sum(b.tokens for b in batches)
    for parameter, gradient in zip(run.learner.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_gradient_is_clipped(corpus: dict[str, str], tmp_path: Path) -> None:
    config = settings(corpus, tmp_path, clip=0.01)
    folder = RunFolder(config.save)
    with folder.writing():
        run = training._Run(config, folder, Silent(), build_model, lambda: 0.0)
    run._update()
    norm = torch.stack([p.grad.norm() for p in run.learner.model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert run.window.sums()[1] > 0.1


def test_it_learns(tmp_path: Path) -> None:
    """Forty numbers by heart: loss and exact matches both say so, from the saved folder alone."""
    paths = make_numbers_corpus(tmp_path, train_size=40, held_out=1)
    config = TrainConfig(
        source=str(paths["train_source"]),
        target=str(paths["train_target"]),
        valid_source=str(paths["train_source"]),
        valid_target=str(paths["train_target"]),
        save=str(tmp_path / "run"),
        d_model=64,
        heads=2,
        layers=1,
        d_ff=128,
        dropout=0.0,
        vocab_size=60,
        max_length=100,
        batch_tokens=400,
        lr=5e-3,
        warmup=20,
        max_steps=200,
        valid_every=100,
        device="cpu",
    )
    result = train(config, Silent())
    trained = load_trained(config.save)
    text = read_parallel(config.source, config.target)
    lines = translate_greedily(trained.model, trained.tokenizer, text.source, CPU)
    assert exact_share(lines, text.target) == 1.0
    assert result.scores["valid_loss"] < 0.2
    assert trained.scores == result.best_scores


def test_validation_loss_does_not_depend_on_the_batches(corpus: dict[str, str], tmp_path: Path) -> None:
    config = settings(corpus, tmp_path)
    folder = RunFolder(config.save)
    with folder.writing():
        run = training._Run(config, folder, Silent(), build_model, lambda: 0.0)
    run.learner.model.train()
    small, large = (corpus_loss(run.learner.model, run.validation.corpus, budget, CPU) for budget in (40, 4000))
    assert small == pytest.approx(large, rel=1e-5)
    assert run.learner.model.training
    assert small == pytest.approx(math.log(60), rel=0.5)


def test_max_time_counts_over_resumes(corpus: dict[str, str], tmp_path: Path) -> None:
    ticks = itertools.count()
    config = settings(corpus, tmp_path, max_time=10.0, max_steps=1000)
    result = train(config, Silent(), clock=lambda: float(next(ticks)))
    assert result.stopped == "max_time"
    assert 0 < result.step < 10
    again = train(config, Silent(), clock=lambda: 0.0)
    assert (again.step, again.stopped) == (result.step, "max_time")
    longer = train(
        settings(corpus, tmp_path, max_time=40.0, max_steps=1000), Silent(), clock=lambda: float(next(ticks))
    )
    assert result.step < longer.step < 40


class Interrupting(Silent):
    """Asks the process to stop after the first update."""

    def update(self, status: Status) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_interrupt_saves_and_the_run_goes_on_as_if_never_stopped(corpus: dict[str, str], tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    stopped = train(settings(corpus, tmp_path / "a"), Interrupting())
    assert (stopped.step, stopped.stopped) == (1, "interrupted")
    assert signal.getsignal(signal.SIGTERM) is handler
    train(settings(corpus, tmp_path / "a"), Silent())
    train(settings(corpus, tmp_path / "b"), Silent())
    weights = [RunFolder(tmp_path / name).path(6).joinpath("model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


def test_divergence_is_an_error_and_is_never_saved(corpus: dict[str, str], tmp_path: Path) -> None:
    train(settings(corpus, tmp_path, max_steps=2, valid_every=6), Silent())

    def poisoned(config: TrainConfig, vocab: int) -> nn.Module:
        model = build_model(config, vocab)
        calls = itertools.count()
        model.decoder.register_forward_hook(lambda *args: args[-1] * (math.nan if next(calls) == 2 else 1.0))
        return model

    with pytest.raises(DivergedError, match=r"training diverged: .* lower lr \(0.001\) or lengthen warmup \(4\)"):
        train(settings(corpus, tmp_path, max_steps=6, valid_every=6), Silent(), build=poisoned)
    assert RunFolder(tmp_path).steps() == [2]


def test_best_is_the_highest_bleu_then_the_lowest_loss(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.5, 2.0, 9.0])
    monkeypatch.setattr(validation, "corpus_loss", lambda *args: next(losses))
    result = train(settings(corpus, tmp_path, valid_every=1, keep_last=1), Silent())
    assert (result.best_step, result.best_scores) == (2, {"valid_loss": 1.0})
    assert result.scores == {"valid_loss": 9.0}
    assert RunFolder(tmp_path).steps() == [2, 6]
    assert load_trained(tmp_path).step == 2
    assert quality({"bleu": 3.0, "valid_loss": 9.0}) > quality({"bleu": 2.0, "valid_loss": 1.0})


def test_without_validation_the_newest_is_served(corpus: dict[str, str], tmp_path: Path) -> None:
    alone = {name: corpus[name] for name in ("source", "target")}
    result = train(settings(alone, tmp_path, valid_every=2, max_steps=5), Silent())
    assert (result.scores, result.best_step) == ({}, None)
    assert load_trained(tmp_path).step == 5


def test_log_holds_every_report(corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REPORT_EVERY", 2)
    result = train(settings(corpus, tmp_path, valid_every=3, bleu_sentences=3), Silent())
    lines = [json.loads(line) for line in RunFolder(tmp_path).log.read_text().splitlines()]
    assert [(line["step"], "loss" in line) for line in lines] == [
        (2, True),
        (3, False),
        (4, True),
        (6, True),
        (6, False),
    ]
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx([5e-4, 1e-3, 1e-3 * (4 / 6) ** 0.5])
    assert lines[-1]["valid_loss"] == result.scores["valid_loss"]
    assert lines[-1]["tokens"] == result.tokens


def test_bad_text_is_refused_before_anything_is_saved(corpus: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "short").write_text("eins\n")
    with pytest.raises(DataError, match=r"has 150 lines, .*short has 1"):
        train(settings({**corpus, "target": str(tmp_path / "short")}, tmp_path / "run"), Silent())
    with pytest.raises(DataError, match="does not exist"):
        train(settings({**corpus, "valid_source": str(tmp_path / "no")}, tmp_path / "run"), Silent())
    assert not RunFolder(tmp_path / "run").exists()


def test_optimizer_is_that_of_the_paper(corpus: dict[str, str], tmp_path: Path) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), settings(corpus, tmp_path))
    (group,) = optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


# Scores and reports


def test_bleu_has_a_signature() -> None:
    lines = ["a small house stands on the hill", "the dog runs through the snow"]
    same, other = corpus_bleu(lines, lines), corpus_bleu(lines[::-1], lines)
    assert same.score == pytest.approx(100.0)
    assert other.score < 20
    assert re.fullmatch(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:[\d.]+", same.signature)


def test_exact_share() -> None:
    assert exact_share(["a", "b", "c", "d"], ["a", "x", "c", "d"]) == 0.75


def test_interrupts_are_left_alone_outside_the_main_thread(corpus: dict[str, str]) -> None:
    seen: list[bool] = []

    def inside() -> None:
        with environment.interruptible() as event:
            seen.append(event.is_set())

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [False]


def test_corpus_of_a_run_reports_what_it_left_out(corpus: dict[str, str], tmp_path: Path) -> None:
    text = read_parallel(corpus["source"], corpus["target"])
    messages: list[str] = []

    class Listening(Silent):
        def message(self, text: str) -> None:
            messages.append(text)

    train(settings(corpus, tmp_path, max_steps=1, max_length=20), Listening())
    trained = load_trained(tmp_path)
    kept = Corpus(text, trained.tokenizer, 20)
    assert kept.too_long > 0
    assert messages[0].startswith(f"{len(kept):,} sentence pairs, {kept.too_long:,} left out, 60 pieces")


# Gradient accumulation, precision, seeds, memory


def one_update(corpus: dict[str, str], folder: Path, **changes: object) -> training._Run:
    config = settings(corpus, folder, clip=0.0, dropout=0.0, **changes)
    with RunFolder(config.save).writing():
        run = training._Run(config, RunFolder(config.save), Silent(), build_model, lambda: 0.0)
    return run


def test_four_unequal_micro_batches_are_one_big_batch(corpus: dict[str, str], tmp_path: Path) -> None:
    """Four batches of 1, 2, 5 and 9 sentences, and all 17 in one: the same loss, gradients and weights to rounding."""
    runs = [one_update(corpus, tmp_path / name) for name in ("four", "one")]
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
    for ours, theirs in zip(*(run.learner.model.parameters() for run in runs), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_bf16_on_the_cpu_follows_fp32(corpus: dict[str, str], tmp_path: Path) -> None:
    runs = [one_update(corpus, tmp_path / amp, amp=amp) for amp in ("off", "bf16")]
    seen: list[torch.dtype] = []
    runs[1].learner.model.encoder.layers[0].attn.register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    batch = runs[0].batches.corpus.batch(range(16))
    losses = [float(run.learner.update(1, [batch], batch.tokens)[0]) / batch.tokens for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3) and losses[1] != losses[0]
    assert {p.dtype for p in runs[1].learner.model.parameters()} == {torch.float32}
    assert set(seen) == {torch.bfloat16}
    result = train(settings(corpus, tmp_path / "run", amp="bf16"), Silent())
    assert result.step == 6 and math.isfinite(result.scores["valid_loss"])


def test_a_seed_reproduces_a_run_to_the_bit(corpus: dict[str, str], tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        torch.rand(3)  # what was drawn before must not matter
        train(settings(corpus, tmp_path / name, seed=seed, dropout=0.3), Silent())
        return RunFolder(tmp_path / name).path(6).joinpath("model.safetensors").read_bytes()

    assert weights("a", 5) == weights("b", 5) != weights("c", 6)


def test_activation_checkpointing_changes_no_bit(corpus: dict[str, str], tmp_path: Path) -> None:
    """Layers computed again draw the same dropout: the runs are one, and fewer tensors are kept for backward."""
    ends, kept = [], []
    for name, again in (("kept", False), ("again", True)):
        config = settings(corpus, tmp_path / name, dropout=0.3, checkpoint_activations=again)
        train(config, Silent())
        ends.append(RunFolder(config.save).path(6).joinpath("model.safetensors").read_bytes())
        model = load_trained(config.save, which="last").model.train()
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            batch_loss(model, one_update(corpus, tmp_path / f"{name}-2").batches.corpus.batch(range(20)))
        kept.append(sum(sizes))
    assert ends[0] == ends[1]
    assert kept[1] < 0.8 * kept[0]


def test_text_in_lower_case(corpus: dict[str, str], tmp_path: Path) -> None:
    upper = tmp_path / "upper.en"
    upper.write_text(Path(corpus["source"]).read_text().upper())
    for name, source in (("lower", corpus["source"]), ("upper", str(upper))):
        train(settings({**corpus, "source": source}, tmp_path / name, lowercase=True), Silent())
    trained = [load_trained(tmp_path / name) for name in ("lower", "upper")]
    assert trained[0].tokenizer.model == trained[1].tokenizer.model and trained[0].scores == trained[1].scores
    line = Path(corpus["source"]).read_text().splitlines()[20]
    assert trained[0].tokenizer.encode([line.upper()]) == trained[0].tokenizer.encode([line])
