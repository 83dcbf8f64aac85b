"""The comparison of cached and uncached decoding, and the profile of a step: what they count and call wrong."""

import json
import sys

import compare_cached
import profile_generation
import pytest
import torch

from transformer_fast import GenerationConfig, Transformer
from transformer_fast.translation import train
from transformer_fast.translation.numbers import make_numbers_corpus, numbers_config
from transformer_fast.translation.progress import Silent

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
    assert outcome.cached_seconds > 0 and outcome.uncached_seconds > 0

    real = compare_cached.generate

    def wrong(_, *, config, **given):
        return real(model(seed=0 if not config.cache else 1), config=config, **given)

    monkeypatch.setattr(compare_cached, "generate", wrong)
    outcome = compare_cached.compare(model(), batches(), config, "search")
    assert len(outcome.differences) > 1 and outcome.counts(tie=0.0) == (0, len(outcome.differences))
    assert outcome.counts(tie=1e9) == (len(outcome.differences), 0)
    assert sorted(d.sentence for d in outcome.differences) == sorted({d.sentence for d in outcome.differences})


def test_a_tie_has_no_margin():
    """Two tokens of one weight are a tie at the first step, and the margin says so; otherwise there is one."""
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
    """A search finds them in another; the margin of two that do not follow each other would excuse too much."""
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


def test_the_command(tmp_path, monkeypatch, capsys):
    make_numbers_corpus(tmp_path / "data", train_size=200, held_out=20)
    sizes = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "batch_tokens": 512, "max_steps": 2, "warmup": 1}
    train(numbers_config(tmp_path / "data", tmp_path / "run", vocab_size=60, valid_every=1000, **sizes), Silent())
    (tmp_path / "in.txt").write_text("seven\nnine hundred one\nforty-two\n")
    arguments = [
        "--model",
        tmp_path / "run",
        "--source",
        tmp_path / "in.txt",
        "--beams",
        1,
        2,
        "--out",
        tmp_path / "out",
    ]
    monkeypatch.setattr(sys, "argv", ["compare_cached.py", *map(str, arguments)])
    assert compare_cached.main() == 0
    assert "| greedy | 3 | 3 | 0 | 0 |" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "compare_cached.json").read_text())
    assert [one["search"] for one in report["results"]] == ["greedy", "beam 2"] and report["sentences"] == 3


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
