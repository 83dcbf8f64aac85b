"""Training loop: when it stops, what it keeps, what it logs, and what it refuses."""

from __future__ import annotations

import itertools
import math
import os
import platform
import signal
import threading
from pathlib import Path

import pytest
import torch
from small_training import Messages, log_of, short_config, weights_of
from torch import nn

from transformer_fast import backends, extension
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
from transformer_fast.translation.batching import Corpus
from transformer_fast.translation.checkpoint import is_better
from transformer_fast.translation.numbers import make_numbers_corpus
from transformer_fast.translation.progress import Silent, Status
from transformer_fast.translation.translator import Translator


def test_precision_and_device_that_are_not_there(corpus: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="amp is 'fp16' but the device is the CPU"):
        train(short_config(corpus, tmp_path, amp="fp16"), Silent())
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device is 'cuda' but torch sees no GPU"):
            train(short_config(corpus, tmp_path, device="cuda"), Silent())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_batches_are_packed_where_attention_is_fused(corpus: dict[str, str], tmp_path: Path, backend: str) -> None:
    made = []

    def build(config: TrainConfig, vocab: int) -> nn.Module:
        made.append(build_model(config, vocab))
        return made[0]

    with backends.backend(backend):
        train(short_config(corpus, tmp_path, max_steps=1), Silent(), build=build)
    assert made[0].packed == (backend == "auto" and extension.load())


@pytest.mark.parametrize(("amp", "has_unit"), [("bf16", False), ("bf16", True), ("off", False)])
def test_bf16_on_a_cpu_without_the_unit_says_so(
    amp: str, has_unit: bool, corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "multiplies_bf16", lambda: has_unit)
    messages = Messages()
    train(short_config(corpus, tmp_path / "run", amp=amp, max_steps=1), messages)
    assert any("AVX512-BF16" in text for text in messages.texts) == (amp == "bf16" and not has_unit)


def test_where_bf16_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and flags.exists():
        words = flags.read_text().split()
        assert environment.multiplies_bf16() == ("avx512_bf16" in words or "amx_tile" in words)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # a torch without oneDNN has no such op
    assert environment.multiplies_bf16() is False


@pytest.mark.slow("trains until it translates")
def test_it_learns(tmp_path: Path) -> None:
    """Forty numbers are memorised: the saved folder gives a low loss and exact matches."""
    paths = make_numbers_corpus(tmp_path, train_size=40, held_out=1)
    source, target = str(paths["train_source"]), str(paths["train_target"])
    corpus = {"source": source, "target": target, "valid_source": source, "valid_target": target}
    size = {"d_model": 64, "d_ff": 128, "dropout": 0.0, "lr": 5e-3, "warmup": 20, "max_steps": 100, "valid_every": 100}
    config = short_config(corpus, tmp_path / "run", **size)
    result = train(config, Silent())
    trained = load_trained(config.save)
    text = read_parallel(source, target)
    assert list(Translator(trained.model, trained.tokenizer, beam=1).translate(text.source)) == text.target
    assert result.scores["valid_loss"] < 0.2
    assert trained.scores == result.best_scores


def test_max_time_counts_over_resumes(corpus: dict[str, str], tmp_path: Path) -> None:
    ticks = itertools.count()
    config = short_config(corpus, tmp_path, max_time=10.0, max_steps=1000)
    result = train(config, Silent(), clock=lambda: float(next(ticks)))
    assert result.stopped == "max_time"
    assert 0 < result.step < 10
    again = train(config, Silent(), clock=lambda: 0.0)
    assert (again.step, again.stopped) == (result.step, "max_time")
    longer = train(
        short_config(corpus, tmp_path, max_time=40.0, max_steps=1000), Silent(), clock=lambda: float(next(ticks))
    )
    assert result.step < longer.step < 40


class Interrupting(Silent):
    """Progress that requests a stop after the first update."""

    def update(self, status: Status) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_interrupt_saves_and_the_run_goes_on_as_if_never_stopped(corpus: dict[str, str], tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    stopped = train(short_config(corpus, tmp_path / "a"), Interrupting())
    assert (stopped.step, stopped.stopped) == (1, "interrupted")
    assert signal.getsignal(signal.SIGTERM) is handler
    train(short_config(corpus, tmp_path / "a"), Silent())
    train(short_config(corpus, tmp_path / "b"), Silent())
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")


def test_divergence_is_an_error_and_is_never_saved(corpus: dict[str, str], tmp_path: Path) -> None:
    train(short_config(corpus, tmp_path, max_steps=2, valid_every=6), Silent())

    def poisoned(config: TrainConfig, vocab: int) -> nn.Module:
        model = build_model(config, vocab)
        calls = itertools.count()
        model.decoder.register_forward_hook(lambda *args: args[-1] * (math.nan if next(calls) == 2 else 1.0))
        return model

    with pytest.raises(DivergedError, match=r"training diverged: .* lower lr \(0.001\) or lengthen warmup \(4\)"):
        train(short_config(corpus, tmp_path, max_steps=6, valid_every=6), Silent(), build=poisoned)
    assert RunFolder(tmp_path).steps() == [2]


def test_best_is_the_highest_bleu_then_the_lowest_loss(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.5, 2.0, 9.0])
    monkeypatch.setattr(validation, "corpus_loss", lambda *args: next(losses))
    result = train(short_config(corpus, tmp_path, valid_every=1, keep_last=1), Silent())
    assert (result.best_step, result.best_scores) == (2, {"valid_loss": 1.0})
    assert result.scores == {"valid_loss": 9.0}
    assert RunFolder(tmp_path).steps() == [2, 6]
    assert load_trained(tmp_path).step == 2
    assert is_better({"bleu": 3.0, "valid_loss": 9.0}, {"bleu": 2.0, "valid_loss": 1.0})


def test_without_validation_the_newest_translates(corpus: dict[str, str], tmp_path: Path) -> None:
    alone = {name: corpus[name] for name in ("source", "target")}
    result = train(short_config(alone, tmp_path, valid_every=2, max_steps=5), Silent())
    assert (result.scores, result.best_step) == ({}, None)
    assert load_trained(tmp_path).step == 5


def test_log_holds_every_report(corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REPORT_EVERY", 2)
    result = train(short_config(corpus, tmp_path, valid_every=3, bleu_sentences=3), Silent())
    lines = log_of(tmp_path)
    reports = [(2, True), (3, False), (4, True), (6, True), (6, False)]
    assert [(line["step"], "loss" in line) for line in lines] == reports
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx([5e-4, 1e-3, 1e-3 * (4 / 6) ** 0.5])
    assert lines[-1]["valid_loss"] == result.scores["valid_loss"]
    assert lines[-1]["tokens"] == result.tokens


def test_bad_text_is_refused_before_anything_is_saved(corpus: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "short").write_text("eins\n")
    with pytest.raises(DataError, match=r"has 150 lines, .*short has 1"):
        train(short_config({**corpus, "target": str(tmp_path / "short")}, tmp_path / "run"), Silent())
    with pytest.raises(DataError, match="does not exist"):
        train(short_config({**corpus, "valid_source": str(tmp_path / "no")}, tmp_path / "run"), Silent())
    assert not RunFolder(tmp_path / "run").exists()


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
    messages = Messages()
    train(short_config(corpus, tmp_path, max_steps=1, max_length=20), messages)
    trained = load_trained(tmp_path)
    kept = Corpus(text, trained.tokenizer, 20)
    assert kept.too_long > 0
    assert messages.texts[0].startswith(f"{len(kept):,} sentence pairs, {kept.too_long:,} left out, 60 pieces")


def test_one_pair_is_no_plural(corpus: dict[str, str], tmp_path: Path) -> None:
    one = {}
    for side, path in corpus.items():
        one[side] = str(tmp_path / side)
        Path(one[side]).write_text(Path(path).read_text().splitlines()[0] + "\n")
    messages = Messages()
    train(short_config(corpus, tmp_path / "run", max_steps=1, **{k: one[k] for k in ("source", "target")}), messages)
    assert messages.texts[0].startswith("1 sentence pair, ")


def test_a_seed_reproduces_a_run_to_the_bit(corpus: dict[str, str], tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        torch.rand(3)  # earlier draws must not matter
        train(short_config(corpus, tmp_path / name, seed=seed, dropout=0.3), Silent())
        return weights_of(tmp_path / name)

    assert weights("a", 5) == weights("b", 5) != weights("c", 6)


def test_text_in_lower_case(corpus: dict[str, str], tmp_path: Path) -> None:
    upper = tmp_path / "upper.en"
    upper.write_text(Path(corpus["source"]).read_text().upper())
    for name, source in (("lower", corpus["source"]), ("upper", str(upper))):
        train(short_config({**corpus, "source": source}, tmp_path / name, lowercase=True), Silent())
    trained = [load_trained(tmp_path / name) for name in ("lower", "upper")]
    assert trained[0].tokenizer.model == trained[1].tokenizer.model and trained[0].scores == trained[1].scores
    line = Path(corpus["source"]).read_text().splitlines()[20]
    assert trained[0].tokenizer.encode([line.upper()]) == trained[0].tokenizer.encode([line])
