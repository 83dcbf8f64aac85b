"""Memory of keys and values that stays from call to call: what lies in it is never read, and no two calls share it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_transformer import MARKS, batch, tiny
from torch import Tensor

from transformer_fast import GenerationConfig, Transformer, extension, generate
from transformer_fast.generation.state_pool import StatePool, state_pool

OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {},
    "beam": {"beam": 3},
    "beam that stays wide": {"beam": 3, "slots": "keep"},
    "int8": {"quantize": "int8"},
    "drafts": {"draft_tokens": 3},
}


def fixed(seed: int = 0) -> Transformer:
    return tiny(seed).requires_grad_(False)


def answers(model: Transformer, given: tuple[Tensor, Tensor], config: GenerationConfig) -> list[list[tuple]]:
    found = generate(model, given[0], src_lengths=given[1], config=config, **MARKS)
    return [[(h.tokens, h.score) for h in hypotheses] for hypotheses in found]


def blocks(model: Transformer) -> list[Tensor]:
    pool = state_pool(model.decoder)
    assert pool is not None
    return list(pool._blocks.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_what_an_earlier_call_left_is_not_read(name: str) -> None:
    """Nor where answers grow past the room of the first block."""
    if not extension.load() and name in ("int8", "drafts"):
        pytest.skip("needs the C++ extension")
    model, given = fixed(), batch(5)
    config = GenerationConfig(max_length=80, min_length=70, keep_weights=True, **OPTIONS[name])
    expected = answers(model, given, config)
    assert blocks(model)
    with torch.inference_mode():
        for block in blocks(model):
            block.fill_(torch.nan)
    assert answers(model, given, config) == expected


def test_a_call_takes_the_block_of_the_one_before() -> None:
    model, config = fixed(), GenerationConfig(max_length=9, keep_weights=True)
    addresses = []
    for size in (3, 8, 8, 5):
        answers(model, batch(size), config)
        (block,) = blocks(model)
        addresses.append(block.data_ptr())
    assert len(set(addresses[1:])) == 1, "what served 8 rows serves 8 and 5"


def test_long_answers_take_one_block_again() -> None:
    model, config = fixed(), GenerationConfig(max_length=140, min_length=130, keep_weights=True)
    expected = answers(model, batch(4), config)
    (first,) = blocks(model)
    assert answers(model, batch(4), config) == expected
    assert len(blocks(model)) == 1 and blocks(model)[0] is first


def test_without_keep_weights_nothing_stays() -> None:
    model = fixed()
    answers(model, batch(3), GenerationConfig(max_length=9))
    assert not blocks(model)


def test_calls_at_one_time_have_blocks_of_their_own() -> None:
    model, config = fixed(), GenerationConfig(max_length=40, min_length=20, keep_weights=True)
    batches = [batch(size, seed=size) for size in (2, 3, 4, 5)]
    expected = [answers(model, given, config) for given in batches]
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda given: answers(model, given, config), batches * 8)
        assert list(found) == expected * 8
    assert 1 <= len(blocks(model)) <= 4


def test_the_smallest_block_that_will_do_is_taken() -> None:
    pool, like = StatePool(), torch.zeros(())
    small, large = pool.take(10, like), pool.take(20, like)
    pool.give(large)
    pool.give(small)
    assert pool.take(5, like) is small and pool.take(5, like) is large
    pool.give(large)
    pool.give(small)
    assert pool.take(11, like) is large and len(pool._blocks) == 1


def test_where_none_will_do_the_largest_goes() -> None:
    pool, like = StatePool(), torch.zeros(())
    small, large = pool.take(10, like), pool.take(20, like)
    pool.give(large)
    pool.give(small)
    assert pool.take(21, like).numel() == 21 and len(pool._blocks) == 1
    assert pool.take(5, like.double()).dtype == torch.float64 and len(pool._blocks) == 0
