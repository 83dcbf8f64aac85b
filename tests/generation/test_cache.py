"""Cached decoding against decoding without a cache, which runs the whole prefix at every step."""

import gc

import pytest
import torch
from helpers import assert_as_exact_as_eager
from tiny_transformer import BOS, EOS, VOCAB, batch, tiny
from torch import nn

from transformer_fast import GenerationConfig, beam_search, extension, generate, greedy
from transformer_fast.generation.beam import Search
from transformer_fast.generation.cache import DecoderCache, assign_slots, move_rows
from transformer_fast.generation.decoding import Decoding, check_request
from transformer_fast.generation.fused import FusedStep
from transformer_fast.layers import MultiHeadAttention


def request(model, src, **options):
    options = {"src_lengths": None, "src_mask": None, "bos": BOS, "eos": EOS, "pad": None, "max_length": 99, **options}
    return check_request(model, src, **options)


@pytest.mark.parametrize(
    "options", [{}, {"norm": "std"}, {"norm": "rms"}, {"norm_first": False}, {"tie_weights": True}], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_and_beam_are_the_same_with_and_without(seed, options):
    model = tiny(seed, **options)
    src, lengths = batch(seed=seed)
    given = {"src_lengths": lengths, "bos": BOS, "eos": EOS, "max_length": 25}
    assert greedy(model, src, **given) == greedy(model, src, cache=False, **given)
    got, expected = (beam_search(model, src, beam=4, n_best=4, cache=cache, **given) for cache in (True, False))
    for ours, theirs in zip(got, expected, strict=True):
        assert [h.tokens for h in ours] == [h.tokens for h in theirs]
        assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs], abs=1e-3)
    answers = {tuple(tuple(h.tokens) for h in hypotheses) for hypotheses in got}
    assert options.get("tie_weights") or len(answers) > 1, "what is said must depend on the sentence"


def test_the_two_attentions_may_have_other_numbers_of_heads():
    model = tiny(1)
    for layer in model.decoder.layers:
        layer.attn_2 = MultiHeadAttention(2, 32)
    src, lengths = batch(seed=1)
    given = {"src_lengths": lengths, "bos": BOS, "eos": EOS, "max_length": 12}
    assert greedy(model, src, **given) == greedy(model, src, cache=False, **given)


def test_layers_with_other_numbers_of_heads_have_no_cache():
    model = tiny(1)
    model.decoder.layers[1].attn_1 = MultiHeadAttention(2, 32)
    src, lengths = batch(seed=1)
    given = {"src_lengths": lengths, "bos": BOS, "eos": EOS, "max_length": 12}
    assert greedy(model, src, **given) == greedy(model, src, cache=False, **given)


def test_past_a_block_and_past_the_positional_table():
    model = tiny(max_len=40)
    with torch.no_grad():
        model.out.bias[EOS] = -1e4
    src, _ = batch(2)
    given = {"bos": BOS, "eos": EOS, "max_length": torch.tensor([150, 70])}
    assert greedy(model, src, **given) == greedy(model, src, cache=False, **given)
    got, expected = (beam_search(model, src, beam=3, cache=cache, **given) for cache in (True, False))
    assert [h[0].tokens for h in got] == [h[0].tokens for h in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_logits_are_as_exact_as_without(dtype):
    """Rows that continue, double, end and change slots, for given tokens: each step's logits against fp64."""
    exact_model, model = tiny(5, torch.float64), tiny(5).to(dtype)
    src, lengths = batch(5, seed=5)
    generator = torch.Generator().manual_seed(1)
    exact, eager, cached = (
        Decoding([m], request(m, src, src_lengths=lengths), GenerationConfig(cache=cache), rows=12)
        for m, cache in ((exact_model, False), (model, False), (model, True))
    )
    tokens = torch.full((5, 1), BOS)
    with torch.inference_mode():
        for step in range(70):
            expected, own, got = (decoding.next_logits(tokens) for decoding in (exact, eager, cached))
            assert_as_exact_as_eager(got, own, expected, what=f"logits of step {step}")
            rows = torch.randint(
                len(tokens), (int(torch.randint(1, 13, (), generator=generator)),), generator=generator
            )
            rows = rows.sort().values if step % 2 else rows
            tokens = torch.cat([tokens[rows], torch.randint(VOCAB, (len(rows), 1), generator=generator)], dim=1)
            for decoding in (exact, eager, cached):
                decoding.select(rows)


def test_a_mask_that_is_no_length_and_a_source_with_nothing_to_read():
    model = tiny(2)
    src, _ = batch(4, seed=2)
    mask = torch.rand(4, 1, 7) > 0.4
    mask[3] = False
    given = {"src_mask": mask, "bos": BOS, "eos": EOS, "max_length": 15}
    assert greedy(model, src, **given) == greedy(model, src, cache=False, **given)
    got, expected = (beam_search(model, src, beam=3, cache=cache, **given) for cache in (True, False))
    assert [h[0].tokens for h in got] == [h[0].tokens for h in expected]


def test_the_callers_mask_stays_as_it_was():
    """Sentences that end leave the cache, and others take their entries, also in the cache's own mask."""
    model = tiny(2)
    src, _ = batch(6, seed=2)
    mask = torch.rand(6, 1, 7) > 0.4
    given = mask.clone()
    answers = greedy(model, src, src_mask=given, bos=BOS, eos=EOS, max_length=torch.tensor([1, 2, 3, 9, 9, 9]))
    assert torch.equal(given, mask) and len({len(answer) for answer in answers}) > 1


@pytest.mark.parametrize("options", [{}, {"alignments": True}, {"beam": 3}], ids=str)
def test_a_cache_is_free_when_its_call_ends(options):
    """Without waiting for the collector of circles: it holds more than anything else of a search."""
    gc.collect()
    gc.disable()
    try:
        generate(tiny(), batch()[0], bos=BOS, eos=EOS, config=GenerationConfig(max_length=5, **options))
        assert not {DecoderCache, FusedStep, Search} & {type(thing) for thing in gc.get_objects()}
    finally:
        gc.enable()


def test_a_row_keeps_its_slot_where_it_can():
    assert assign_slots([0, 1, 2]) == ([0, 1, 2], [])
    assert assign_slots([0, 0, 2]) == ([0, 1, 2], [(0, 1)])  # one copy: the second child of 0 takes the slot of 1
    assert assign_slots([1, 1, 1]) == ([1, 0, 2], [(1, 0), (1, 2)])
    assert assign_slots([0, 3, 2]) == ([0, 1, 2], [(3, 1)])  # the last fills the hole of one that left
    assert assign_slots([2, 0]) == ([1, 0], [(2, 1)])


def test_what_is_copied_from_is_not_copied_to():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rows, kept = (int(torch.randint(1, 12, (), generator=generator)) for _ in range(2))
        parents = torch.randint(rows, (kept,), generator=generator).tolist()
        slots, moves = assign_slots(parents)
        held = {slot: slot for slot in range(max(rows, kept))}
        held |= {to: source for source, to in moves}
        assert sorted(slots) == list(range(kept)) and [held[slot] for slot in slots] == parents
        assert not {source for source, _ in moves} & {to for _, to in moves}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_of_a_cache_move(monkeypatch, dtype):
    cache = torch.randn(3, 9, 2, 4, 16, 5).to(dtype)
    for length, moves in ((16, [(0, 4), (0, 5), (8, 1)]), (3, [(2, 6)]), (0, [(1, 2)])):
        expected = cache.clone()
        for source, target in moves:
            expected[:, target, :, :, :length] = cache[:, source, :, :, :length]
        indexed = cache.clone()
        move_rows(cache, moves, length)
        with monkeypatch.context() as without:
            without.setattr(extension, "load", lambda: False)
            move_rows(indexed, moves, length)
        assert torch.equal(cache, expected) and torch.equal(indexed, expected)


def test_a_step_runs_one_position_and_copies_what_moved():
    """The decoder sees one position a row; a part of somebody's own, or with a hook, is called as it is."""
    widths, hooked = [], []
    model = tiny(1)
    model.decoder.layers[0].ff.register_forward_pre_hook(lambda layer, inputs: widths.append(inputs[0].shape[1]))
    model.decoder.layers[1].attn_1.k_linear.register_forward_hook(lambda *_: hooked.append(1))
    src, _ = batch(3)
    before = {name: id(module) for name, module in model.named_modules()}
    answers = greedy(model, src, bos=BOS, eos=EOS, max_length=9)
    steps = len(widths)
    assert set(widths) == {1} and steps == len(hooked) == min(9, 1 + max(map(len, answers)))
    assert greedy(model, src, bos=BOS, eos=EOS, max_length=9, cache=False) == answers
    assert max(widths[steps:]) == steps  # without a cache, as many as the prefix has
    assert {name: id(module) for name, module in model.named_modules()} == before

    class Opposite(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    model.decoder.layers[1].attn_2.q_linear.__class__ = Opposite
    opposite = greedy(model, src, bos=BOS, eos=EOS, max_length=9)
    assert opposite == greedy(model, src, bos=BOS, eos=EOS, max_length=9, cache=False) != answers
