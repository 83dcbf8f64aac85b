"""Greedy decoding with drafted tokens: drafts, checks, and steps of several positions. test_answers.py tests the
answers."""

from __future__ import annotations

from collections.abc import Callable

import handwritten as hw
import pytest
import torch
from tiny_transformer import BOS, VOCAB, answers, assert_same, batch, never_ending, tiny
from torch import Tensor, nn

from transformer_fast import GenerationConfig, accelerate, extension
from transformer_fast.generation.decoding import CachedDecoding
from transformer_fast.generation.request import Request
from transformer_fast.reference.layers import Transformer as ReferenceTransformer
from transformer_fast.testing import assert_as_exact_as_eager


def change_logits(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor, Tensor], Tensor], *, drafts: bool = False
) -> None:
    """Change the logits of fp32 steps, or of the draft: change(logits, ids, held) -> logits."""
    call = CachedDecoding.span_logits

    def span_logits(self: CachedDecoding, ids: Tensor, held: Tensor, *, newest: bool = False) -> Tensor:
        logits = call(self, ids, held, newest=newest)
        return change(logits, ids, held) if newest == drafts else logits

    monkeypatch.setattr(CachedDecoding, "span_logits", span_logits)


def one_draft_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedDecoding, "span_steps", lambda *_: None)


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of positions per sentence that each fp32 step computed."""
    spans: list[int] = []
    change_logits(monkeypatch, lambda logits, ids, _: spans.append(ids.shape[1]) or logits)
    return spans


@pytest.mark.parametrize("draft_tokens", [1, 3, 6])
@pytest.mark.parametrize("options", [{}, {"suppress": (5, 9), "renormalize": True}, {"no_repeat_ngram": 2}], ids=str)
def test_fewer_steps_than_tokens(monkeypatch: pytest.MonkeyPatch, options: dict, draft_tokens: int) -> None:
    """Sentences end one after the other."""
    spans = count_checks(monkeypatch)
    expected = answers(tiny(1), batch(9), **options)
    assert_same(answers(tiny(1), batch(9), draft_tokens=draft_tokens, **options), expected)
    assert max(spans) == draft_tokens + 1
    assert len(spans) < max(len(each[0].tokens) for each in expected)


@pytest.mark.parametrize("right", [0.0, 0.5])
def test_whatever_is_drafted(monkeypatch: pytest.MonkeyPatch, right: float) -> None:
    """Answers stay the same if no draft is right, and if rows are at different positions because some are."""
    spans = count_checks(monkeypatch)
    generator = torch.Generator().manual_seed(0)

    def drafted(logits: Tensor, ids: Tensor, _: Tensor) -> Tensor:
        return torch.where(torch.rand(len(ids), 1, 1, generator=generator) < right, logits, -logits)

    change_logits(monkeypatch, drafted, drafts=True)
    one_draft_at_a_time(monkeypatch)
    model, given = tiny(2), batch(8)
    expected = answers(model, given)
    assert_same(answers(model, given, draft_tokens=3), expected)
    if right == 0:
        assert len(spans) == max(len(h.tokens) + h.finished for [h] in expected)


@pytest.mark.parametrize(("seed", "sentences"), [(2, 1), (25, 2), (0, 6), (2, 6), (3, 6), (9, 9), (28, 9)])
def test_drafts_are_the_same_one_by_one(monkeypatch: pytest.MonkeyPatch, seed: int, sentences: int) -> None:
    """Rows that take over slots of the draft's cache after others ended draft the same tokens too."""
    model, given = tiny(seed), batch(sentences)
    drafted, steps_of = [], CachedDecoding.span_steps

    def several(self: CachedDecoding, *given: object) -> Tensor | None:
        found = steps_of(self, *given)
        drafted.append(found.shape[1])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(CachedDecoding, "span_steps", several)
        checks = count_checks(patch)
        found = answers(model, given, draft_tokens=5, suppress=(4,))
    assert max(drafted) > 3
    one_draft_at_a_time(monkeypatch)
    single = count_checks(monkeypatch)
    assert_same(answers(model, given, draft_tokens=5, suppress=(4,)), found)
    assert single == checks


def test_the_annotated_transformer_reads_no_position_past_its_table() -> None:
    """An answer as long as the positional table: no token past it is drafted."""
    torch.manual_seed(0)
    model = hw.make_model(VOCAB, VOCAB, 2, 32, 48, 4).eval()
    model.tgt_embed[1].pe = model.tgt_embed[1].pe[:, :12]
    accelerate(never_ending(model))
    given = batch(3)
    expected = answers(model, given, max_length=12)
    assert [len(h.tokens) for [h] in expected] == [12, 12, 12]
    assert_same(answers(model, given, max_length=12, draft_tokens=5), expected)


@pytest.mark.parametrize("form", [{}, {"norm": "std", "norm_first": False}], ids=str)
def test_a_step_of_several_positions_is_as_exact_as_the_modules(form: dict) -> None:
    """Sentences hold different numbers of positions, some overwritten; past a block of the cache; with fewer sentences
    at the end."""
    generator = torch.Generator().manual_seed(4)
    src, _ = batch(4)
    mask = torch.arange(src.shape[1]) < torch.tensor([7, 1, 4, 6])[:, None]
    ids = torch.randint(2, VOCAB, (4, 140), generator=generator)
    ids[:, 0] = BOS

    def step_of(model: nn.Module, memory: Tensor) -> CachedDecoding:
        request = Request(src, mask[:, None], mask.sum(1), bos=BOS, eos=1)
        return CachedDecoding(model.decoder, model.out, memory, request, GenerationConfig(), rows=24, spans=True)

    models = tiny(3, torch.float64, **form), tiny(3, **form), tiny(3, **form)
    with torch.inference_mode():
        memories = [model.encoder(src, mask[:, None]) for model in models]
        exact, ours, modules = map(step_of, models, memories)
        assert ours._session is not None and exact._session is None
        modules._session = None
        held, kept = torch.zeros(4, dtype=torch.long), torch.arange(4)
        while int(held.max()) < 130:
            span = int(torch.randint(1, 7, (), generator=generator))
            newest = torch.stack([ids[s, n : n + span] for s, n in zip(kept.tolist(), held.tolist(), strict=True)])
            got = ours.span_logits(newest, held)
            eager, expected = (one.span_logits(newest, held) for one in (modules, exact))
            assert_as_exact_as_eager(got, eager, expected)
            held = held + torch.randint(1, span + 1, (len(held),), generator=generator)
            if len(held) == 4 and int(held.max()) > 70:
                kept = torch.tensor([1, 3])
                held = held[kept]
                for one in (exact, ours, modules):
                    one.select(kept)
        # The oracle of all three: the decoder over whole prefixes.
        model, memory = models[0], memories[0]
        for s, n in zip(kept.tolist(), held.tolist(), strict=True):
            causal = torch.ones(1, n + 1, n + 1, dtype=torch.bool).tril()
            whole = model.decoder(ids[s : s + 1, : n + 1], memory[s : s + 1], mask[s : s + 1, None], causal)
            row = kept.tolist().index(s)
            newest = torch.stack([ids[k, m : m + 1] for k, m in zip(kept.tolist(), held.tolist(), strict=True)])
            torch.testing.assert_close(exact.span_logits(newest, held)[row, 0], model.out(whole[0, -1]))


def with_logits(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change the logits of the fp32 model: change(logits (rows, span, vocabulary), positions (rows, span))."""
    change_logits(monkeypatch, lambda logits, ids, held: change(logits, held[:, None] + torch.arange(ids.shape[1])))


def test_nan_counts_only_where_a_token_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny(1), batch(3)
    expected = answers(model, given, max_length=6)
    with monkeypatch.context() as patch:
        change_logits(patch, lambda logits, *_: torch.zeros_like(logits), drafts=True)
        one_draft_at_a_time(patch)
        # No draft is accepted, so logits after drafts are not used.
        with_logits(patch, lambda logits, at: torch.where(at[:, :, None] > at[:, :1, None], torch.nan, logits))
        assert expected and all(0 not in h.tokens for [h] in expected)
        assert_same(answers(model, given, max_length=6, draft_tokens=3), expected)
    with_logits(monkeypatch, lambda logits, at: torch.where(at[:, :, None] == 3, torch.nan, logits))
    with pytest.raises(FloatingPointError, match="logits for token 4 are NaN"):
        answers(model, given, max_length=6, draft_tokens=3)


def test_nan_of_a_suppressed_token_is_seen_with_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without drafts, the NaN raises although the token is suppressed."""
    with_logits(
        monkeypatch,
        lambda logits, at: logits.masked_fill((at[:, :, None] == 3) & (torch.arange(VOCAB) == 5), torch.nan),
    )
    for rules in ({}, {"no_repeat_ngram": 3}):
        with pytest.raises(FloatingPointError, match="logits for token 4 are NaN"):
            options = {"max_length": 6, "suppress": (5,), "renormalize": True, **rules}
            answers(tiny(1), batch(3), draft_tokens=3, **options)


def test_where_no_token_is_possible_the_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny(1), batch(3)
    expected = answers(model, given, max_length=4)
    with_logits(monkeypatch, lambda logits, at: torch.where(at[:, :, None] == 4, -torch.inf, logits))
    ours = answers(model, given, max_length=9, draft_tokens=3)
    assert [(h.tokens, h.finished) for [h] in ours] == [(h.tokens, h.finished) for [h] in expected]


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: nn.Module | list[nn.Module], **options: object) -> str:
        with pytest.raises(ValueError) as raised:
            answers(model, batch(), **{"draft_tokens": 2, **options})
        return str(raised.value)

    for count in (-1, True):
        assert refused(tiny(), draft_tokens=count) == f"draft_tokens must be an int >= 0, got {count}"
    for name, needed, given in (
        ("beam", 1, 2), ("sample", False, True), ("quantize", None, "int8"), ("cache", True, False),
        ("alignments", False, True),
    ):  # fmt: skip
        assert refused(tiny(), **{name: given}) == f"draft_tokens needs {name} {needed}, got {given!r}"
    assert refused([tiny(), tiny(1)]) == "draft_tokens=2 is not possible: expected one model, got 2"
    assert "fp32 weights on a CPU, got torch.bfloat16" in refused(tiny(dtype=torch.bfloat16))
    uncached = ReferenceTransformer(VOCAB, VOCAB, 32, 1, 4, 0.0, d_ff=48).eval()
    assert refused(uncached) == "draft_tokens=2 is not possible: there is no cached decoder for this model"
    monkeypatch.setattr(extension, "obstacle", lambda: "no kernels here; run `make setup`")
    assert refused(tiny()) == "draft_tokens=2 is not possible: no kernels here; run `make setup`"
