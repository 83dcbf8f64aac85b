"""Every module of the four families against its oracle: the classic layers, and the dialects."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from dialect_cases import FAMILIES
from dialect_parity import Case, check_evaluation, check_training

from transformer_fast import dialects
from transformer_fast.reference import dialects as texts

ALL = [(family, case) for family, (_, _, cases) in FAMILIES.items() for case in cases]
NAMES = [f"{family}-{number}-{case.name}" for number, (family, case) in enumerate(ALL)]


@pytest.mark.parametrize(("family", "case"), ALL, ids=NAMES)
def test_outputs_weights_and_gradients(family: str, case: Case, device: torch.device) -> None:
    fast, oracle, _ = FAMILIES[family]
    check_evaluation(fast, oracle, case, device)


@pytest.mark.parametrize(("family", "case"), ALL, ids=NAMES)
def test_training_with_the_same_dropout(family: str, case: Case) -> None:
    fast, oracle, _ = FAMILIES[family]
    check_training(fast, oracle, case)


@pytest.mark.parametrize("family", [dialects.d2l, texts.d2l])
def test_a_subclass_has_the_parts_of_its_family(family: ModuleType) -> None:
    class Own(family.EncoderBlock):
        pass

    block = Own(16, 24, 4, 0.1)
    assert {type(child) for child in block.children()} == {
        family.MultiHeadAttention, family.AddNorm, family.PositionWiseFFN
    }  # fmt: skip


def by_place(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return names and defaults of the arguments that may be given by place."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY]


@pytest.mark.parametrize("family", dialects.__all__)
def test_a_fast_form_has_the_names_and_the_arguments_of_its_text(family: str) -> None:
    """A fast ``forward`` may have options by name besides; a constructor has none of its own."""
    fast, text = getattr(dialects, family), getattr(texts, family)
    cases = {case.name for case in FAMILIES[family][2]} | {"EncoderDecoder"}  # the case "Whole"
    for name in fast.__all__:
        quick = getattr(fast, name)
        slow = getattr(text, quick.__name__)
        if not inspect.isclass(quick):
            assert by_place(quick) == by_place(slow), name
            continue
        assert inspect.signature(quick).parameters.keys() == inspect.signature(slow).parameters.keys(), name
        assert by_place(quick) == by_place(slow) and quick.__module__ == fast.__name__, name
        both = ([argument.lower() for argument, _ in by_place(kind.forward)] for kind in (quick, slow))
        assert next(both) == next(both), name
        assert quick.__name__ in cases, f"{name} needs a case in dialect_cases.py"
