"""Cache of generation: its logits against fp64, its slots, and the work of a step."""

import gc

import pytest
import torch
from tiny_transformer import BOS, MARKS, VOCAB, answers, batch, decoding, random_rows, tiny
from torch import nn

from transformer_fast import GenerationConfig, extension, greedy
from transformer_fast.generation.beam import Search
from transformer_fast.generation.cache import DecoderCache, assign_slots, move_rows
from transformer_fast.generation.session import Session
from transformer_fast.testing import assert_as_exact_as_eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_logits_are_as_exact_as_without(dtype):
    """Compare the logits of each step with fp64, for rows that continue, fork, end and change slots.

    In fp64 the model without a cache is the exact one, and shows no rounding. The rounding of the fp32 model, scaled to
    fp64, then stands for it.
    """
    exact_model, model = tiny(5, torch.float64), tiny(5).to(dtype)
    src, lengths = batch(5, seed=5)
    generator = torch.Generator().manual_seed(1)
    own_model = tiny(5) if dtype == torch.float64 else model
    shrink = torch.finfo(dtype).eps / torch.finfo(own_model.out.weight.dtype).eps
    exact, eager, cached = (
        decoding(m, (src, lengths), 12, GenerationConfig(cache=cache))
        for m, cache in ((exact_model, False), (own_model, False), (model, True))
    )
    tokens = torch.full((5, 1), BOS)
    with torch.inference_mode():
        for step in range(70):
            expected, own, got = (one.next_logits(tokens) for one in (exact, eager, cached))
            own = expected + (own - expected) * shrink
            assert_as_exact_as_eager(got, own, expected, what=f"logits of step {step}")
            rows = random_rows(len(tokens), 1, 12, generator)
            rows = rows.sort().values if step % 2 else rows
            tokens = torch.cat([tokens[rows], torch.randint(VOCAB, (len(rows), 1), generator=generator)], dim=1)
            for one in (exact, eager, cached):
                one.select(rows)


@pytest.mark.parametrize("options", [{}, {"alignments": True}, {"beam": 3}], ids=str)
def test_a_cache_is_free_when_its_call_ends(options):
    """The cache, the largest object of a search, must be freed without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        answers(tiny(), batch(), max_length=5, **options)
        assert not {DecoderCache, Session, Search} & {type(thing) for thing in gc.get_objects()}
    finally:
        gc.enable()


def test_a_row_keeps_its_slot_where_it_can():
    assert assign_slots([0, 1, 2]) == ([0, 1, 2], [])
    assert assign_slots([0, 0, 2]) == ([0, 1, 2], [(0, 1)])  # one copy: the second child of 0 takes the slot of 1
    assert assign_slots([1, 1, 1]) == ([1, 0, 2], [(1, 0), (1, 2)])
    assert assign_slots([0, 3, 2]) == ([0, 1, 2], [(3, 1)])  # row 3 takes the free slot of row 1
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
    """The decoder computes one position per row; a custom part, or one with a hook, is called."""
    widths, hooked = [], []
    model = tiny(1)
    model.decoder.layers[0].ff.register_forward_pre_hook(lambda layer, inputs: widths.append(inputs[0].shape[1]))
    model.decoder.layers[1].attn_1.k_linear.register_forward_hook(lambda *_: hooked.append(1))
    src, _ = batch(3)
    before = {name: id(module) for name, module in model.named_modules()}
    said = greedy(model, src, **MARKS, max_length=9)
    steps = len(widths)
    assert set(widths) == {1} and steps == len(hooked) == min(9, 1 + max(map(len, said)))
    assert greedy(model, src, **MARKS, max_length=9, cache=False) == said
    assert max(widths[steps:]) == steps  # without a cache, as many positions as the prefix has
    assert {name: id(module) for name, module in model.named_modules()} == before

    class Opposite(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    model.decoder.layers[1].attn_2.q_linear.__class__ = Opposite
    opposite = greedy(model, src, **MARKS, max_length=9)
    assert opposite == greedy(model, src, **MARKS, max_length=9, cache=False) != said
