"""Memory of keys and values that stays from call to call: what lies in it is never read, and no two calls share it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_transformer import answers, batch, bits_of, tiny
from torch import Tensor

from transformer_fast import Transformer, extension
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


def kept(model: Transformer, given: tuple[Tensor, Tensor], **options: object) -> list[tuple]:
    """The answers, bit by bit, of a search that keeps the weights."""
    return bits_of(answers(model, given, keep_weights=True, **options))


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
    options = {"max_length": 80, "min_length": 70, **OPTIONS[name]}
    expected = kept(model, given, **options)
    assert blocks(model)
    with torch.inference_mode():
        for block in blocks(model):
            block.fill_(torch.nan)
    assert kept(model, given, **options) == expected


def test_a_call_takes_the_block_of_the_one_before() -> None:
    model, addresses = fixed(), []
    for size in (3, 8, 8, 5):
        kept(model, batch(size), max_length=9)
        (block,) = blocks(model)
        addresses.append(block.data_ptr())
    assert len(set(addresses[1:])) == 1, "what served 8 rows serves 8 and 5"


def test_long_answers_take_one_block_again() -> None:
    model, lengths = fixed(), {"max_length": 140, "min_length": 130}
    expected = kept(model, batch(4), **lengths)
    (first,) = blocks(model)
    assert kept(model, batch(4), **lengths) == expected
    assert len(blocks(model)) == 1 and blocks(model)[0] is first


def test_without_keep_weights_nothing_stays() -> None:
    model = fixed()
    answers(model, batch(3), max_length=9)
    assert not blocks(model)


def test_calls_at_one_time_have_blocks_of_their_own() -> None:
    model, lengths = fixed(), {"max_length": 40, "min_length": 20}
    batches = [batch(size, seed=size) for size in (2, 3, 4, 5)]
    expected = [kept(model, given, **lengths) for given in batches]
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda given: kept(model, given, **lengths), batches * 8)
        assert list(found) == expected * 8
    assert 1 <= len(blocks(model)) <= 4


@pytest.mark.parametrize(
    ("size", "taken", "left"),
    [(5, "small", 1), (11, "large", 1), (21, "new", 1)],  # where none will do, the largest goes
)
def test_the_smallest_block_that_will_do_is_taken(size: int, taken: str, left: int) -> None:
    pool, like = StatePool(), torch.zeros(())
    there = {"small": pool.take(10, like), "large": pool.take(20, like)}
    for block in reversed(there.values()):
        pool.give(block)
    found = pool.take(size, like)
    assert found is there.get(taken, found) and found.numel() >= size and len(pool._blocks) == left
    assert taken != "new" or (found.numel() == 21 and all(found is not block for block in there.values()))
    if taken == "small":
        assert pool.take(size, like) is there["large"]
    elif taken == "new":
        assert pool.take(5, like.double()).dtype == torch.float64 and len(pool._blocks) == 0
