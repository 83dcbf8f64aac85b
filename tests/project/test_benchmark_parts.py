"""Computations of the scripts in benchmarks/: turns, comparisons, margins, and the lower bound of a call.
test_benchmarks.py runs the scripts."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import bench_generation
import compare_cached
import compare_quantized
import compare_training
import profile_generation
import profile_step
import pytest
import torch
from bench_generation import Case, Result

from transformer_fast import GenerationConfig, Transformer, extension
from transformer_fast.translation import Tokenizer, TrainConfig
from transformer_fast.translation.batching import Corpus, TokenBatches
from transformer_fast.translation.numbers import english, german, sample_numbers
from transformer_fast.translation.text import ParallelText
from transformer_fast.translation.tokenizer import PAD

# Ways to generate, in turns


@pytest.fixture
def turns(monkeypatch):
    """Sides without a model: one is not installed, one gives other answers."""
    turns = []

    def side(name, answers):
        def run(src):
            turns.append(name)
            if answers is None:
                raise RuntimeError("the library is not installed")
            return answers(src)

        return run

    sides = {
        "ours": side("ours", lambda src: src.tolist()),
        "Marian": side("Marian", None),
        "CTranslate2": side("CTranslate2", lambda src: [*src[:1].tolist(), *(src[1:] + 1).tolist()]),
        "ours int8": side("ours int8", lambda src: src.tolist()),
    }
    monkeypatch.setattr(bench_generation, "ways", lambda *_: sides)
    return turns


def test_sides_take_turns_and_are_compared_with_ours(turns):
    found = {r.side: r for r in bench_generation.compare(Case("small", "greedy", 4, 8), "cpu", 3, False)}
    assert turns == ["ours", "Marian", "CTranslate2", "ours int8"] * 4
    assert {name: len(result.seconds) for name, result in found.items()} == {
        "ours": 3, "Marian": 0, "CTranslate2": 3, "ours int8": 3
    }  # fmt: skip
    assert found["Marian"].refused == "the library is not installed" and found["Marian"].same is None
    assert found["CTranslate2"].same == 0.25 and found["CTranslate2"].bleu is None
    assert found["ours int8"].same == 1.0 and found["ours int8"].bleu == pytest.approx(100.0)


def test_the_fastest_round_counts():
    ours = Result("beam", 2, "ours", [0.5, 0.25, 1.0])
    peer = Result("beam", 2, "peer", [1.0, 2.0, 0.5], same=0.5, bleu=12.34)
    assert peer.row(ours, 10) == "| beam | 2 | peer | 40 | 2.00 | 50%, BLEU 12.3 |"
    assert ours.row(ours, 10) == "| beam | 2 | ours | 80 | 1.00 |  |"
    refused = Result("beam", 2, "peer", [], refused="not here")
    assert refused.row(ours, 10) == "| beam | 2 | peer | not here | | |"


def test_the_record_has_every_round(turns, monkeypatch, tmp_path, capsys):
    arguments = ["--size", "small", "--length", "8", "--batch", "4", "--search", "greedy", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_generation.py", *arguments, "--out", str(tmp_path)])
    bench_generation.main()
    record = json.loads((tmp_path / "bench_generation.json").read_text(encoding="utf-8"))
    assert [(r["side"], len(r["seconds"])) for r in record["results"]] == [
        ("ours", 2), ("Marian", 0), ("CTranslate2", 2), ("ours int8", 2)
    ]  # fmt: skip
    assert record["threads"] >= 1 and "vector_unit" in record and record["length"] == 8
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 + 4 and all(line.count("|") == 7 for line in printed[1:])


# With and without a cache

BOS, EOS, VOCAB = 2, 3, 20


def model(seed=0):
    torch.manual_seed(seed)
    made = Transformer(VOCAB, VOCAB, 16, 1, 2, 0.0, d_ff=24)
    with torch.no_grad():
        made.out.weight.mul_(6)
        made.decoder.layers[0].attn_2.v_linear.weight.mul_(6)
    return made


def batches():
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in (5, 2, 7, 7, 3)]
    return compare_cached.make_batches(sources, 2, bos=BOS, eos=EOS)


def test_sentences_of_like_length_share_a_batch():
    made = batches()
    assert [numbers for numbers, _ in made] == [[1, 4], [0, 2], [3]]
    assert made[1][1]["src_lengths"].tolist() == [5, 7] and made[1][1]["src"].shape == (2, 7)


@pytest.mark.parametrize("beam", [1, 3])
def test_what_is_the_same_and_what_is_wrong(beam, monkeypatch):
    config = GenerationConfig(beam=beam, max_length=8)
    outcome = compare_cached.compare(model(), batches(), config, "search")
    assert (outcome.sentences, outcome.differences) == (5, []) and outcome.largest_score_difference < 1e-4

    real = compare_cached.generate

    def wrong(_, *, config, **given):
        return real(model(seed=0 if not config.cache else 1), config=config, **given)

    monkeypatch.setattr(compare_cached, "generate", wrong)
    outcome = compare_cached.compare(model(), batches(), config, "search")
    assert len(outcome.differences) > 1 and outcome.counts(tie=0.0) == (0, len(outcome.differences))
    assert outcome.counts(tie=1e9) == (len(outcome.differences), 0)
    assert sorted(d.sentence for d in outcome.differences) == sorted({d.sentence for d in outcome.differences})


def test_a_tie_has_no_margin():
    """Two equally weighted tokens are a tie at the first step, with margin 0; without a tie the margin is positive."""
    tied = model()
    given = batches()[0][1]
    config = GenerationConfig(beam=3, max_length=6)
    decode = lambda: compare_cached.generate(tied, config=config, **given)  # noqa: E731
    assert min(compare_cached.margins(decode)) > 1e-6
    with torch.no_grad():
        best = decode()[0][0].tokens[0]
        twin = best + 1 if best + 1 < VOCAB else best - 1
        tied.out.weight[twin], tied.out.bias[twin] = tied.out.weight[best], tied.out.bias[best]
    assert compare_cached.margins(decode)[0] == 0.0


def test_margins_are_of_answers_in_the_order_of_their_scores():
    """A search finds answers in another order; margins of non-neighbours would excuse too much."""
    made, searches = model(), []
    with torch.no_grad():
        made.out.bias[EOS] += 3.0  # answers of many lengths
    config = GenerationConfig(beam=5, n_best=4, max_length=8, length_penalty=1.0)
    with compare_cached.recording(searches):
        for _, given in batches():
            compare_cached.generate(made, config=config, **given)
    scores = [[h.score for h in found if h.finished] for search in searches for found in search.found]
    assert any(sorted(found) != found != sorted(found, reverse=True) for found in scores)
    assert all(margin >= 0 for search in searches for margin in search.margins)


# Profiles


def test_the_least_a_call_can_take():
    case = profile_generation.Case("small", "beam", 2, 16)  # d 256, 3 layers, d_ff 1024
    step, first = profile_generation.step_work(case), profile_generation.first_work(case)
    layers = 3 * (6 * 256 * 256 + 2 * 256 * 1024)
    assert step.weights == layers + 8000 * 256
    assert step.cache_bytes == 4 * 3 * 2 * 256 * (10 * 8 + 2 * 16)  # ten rows half way, and two sources
    assert step.products == 2 * 10 * step.weights and step.attention == 3 * 4 * 256 * 10 * (8 + 16)
    assert first.products == 2 * 32 * layers + step.products
    assert first.attention == 3 * 4 * 256 * 32 * 16 + step.attention
    limits = profile_generation.Limits(bandwidth=1e9, fp32=1e12, int8=2e12)
    reads, does = step.seconds(limits, int8=False)
    assert reads == (4 * step.weights + step.cache_bytes) / 1e9
    assert does == pytest.approx((step.products + step.attention) / 1e12)
    reads, does = step.seconds(limits, int8=True)
    assert reads == (step.weights + step.cache_bytes) / 1e9
    assert does == pytest.approx((step.products / 2 + step.attention) / 1e12)


def test_kinds_of_ops():
    x = torch.randn(64, 64)
    shares = profile_generation.shares(lambda: [torch.nn.functional.linear(x, x), x.topk(3), torch.cat([x, x])])
    assert all(shares[kind] > 0 for kind in ("products", "choice of tokens", "rows moved"))
    least = {"first_reads_and_does": (0.005, 0.01), "step_reads_and_does": (0.002, 0.004)}
    side = {"whole": 0.1, "first": 0.02, "step": 0.005, **least, "shares": shares}
    sides = {"ours": side, "CTranslate2": side | {"shares": None}}
    one = {"case": profile_generation.Case("base", "greedy", 16, 64)._asdict(), "sides": sides}
    text = profile_generation.table([one], profile_generation.Limits(1e10, 1e11, 2e11))
    for name in sides:
        row = f"| base greedy B 16 L 64 | {name} | 100 ms | 20 ms | 50% | 5.00 ms | 2.00 ms | 4.00 ms | 80% |"
        assert row in text
    assert text.count("| CTranslate2 |") == 1 and "10 GB read, 100 G operations in fp32, 200 G in int8" in text


def test_a_profile_of_a_step_counts_each_op_once():
    assert extension.load(), extension.status()
    x, weight = torch.randn(64, 48), torch.randn(48, 48)
    norm = torch.ops.transformer_fast.layer_norm
    options = None, None, None, 1e-5, "layer", 0.0, None, "native"
    seconds = profile_step.shares(lambda: norm(torch.mm(x, weight), *options)[0].sum())
    used = {kind for kind, time in seconds.items() if time > 0}
    assert {"products with weights", "norm, residual, ReLU, dropout", "sums over rows"} <= used
    assert not used & {"loss", "attention", "embedding"}
    text = profile_step.table({"ours": seconds}, 0.001)
    assert "| all |" in text and text.endswith("at this machine's rate: 1 ms.")


# Quantised weights, and padding


def test_weights_that_lose_too_much_are_an_error(monkeypatch, capsys):
    right, wrong = ["a right line of words"] * 20, ["a wrong one"] * 20
    said = {None: right, "int8": wrong}

    class Translator:
        def __init__(self, model, tokenizer, *, config):
            self.quantize = config.quantize

        def translate(self, lines):
            return said[self.quantize]

    tokenizer = SimpleNamespace(lowercase=False)
    trained = SimpleNamespace(generation=GenerationConfig(), model=None, tokenizer=tokenizer)
    monkeypatch.setattr(compare_quantized, "Translator", Translator)
    monkeypatch.setattr(compare_quantized, "load_trained", lambda _: trained)
    monkeypatch.setattr(compare_quantized, "read_lines", lambda _: right)
    given = ["--model", "run", "--source", "source", "--target", "target", "--beams", "1"]
    assert compare_quantized.main(given) == 1 and compare_quantized.main([*given, "--loss", "101"]) == 0
    out = capsys.readouterr().out
    assert "| beam 1 | int8 |" in out and "0.0% |" in out


def test_the_padding_of_updates_is_that_of_the_timed_batches():
    sample = sample_numbers(100, held_out=False)
    text = ParallelText([english(n) for n in sample], [german(n) for n in sample], "")
    corpus = Corpus(text, Tokenizer.train((*text.source, *text.target), 60), 60)
    sizes = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "batch_tokens": 200, "max_length": 60}
    config = TrainConfig(source="a", target="b", save="c", device="cpu", **sizes)
    found = compare_training.compare(config, corpus, 60, updates=2)
    batches = TokenBatches(corpus, 200, seed=0)
    batches.next_batch()  # which warms up
    timed = [batches.next_batch()[0] for _ in range(2)]
    for share, ids in ((found.source_padding, "source"), (found.target_padding, "target_in")):
        assert share == pytest.approx(
            float((torch.cat([getattr(b, ids).flatten() for b in timed]) == PAD).float().mean())
        )
