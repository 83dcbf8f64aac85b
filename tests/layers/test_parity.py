"""Every module of the four families against its oracle: the classic layers, and the dialects."""

from __future__ import annotations

import pytest
import torch
from dialect_cases import FAMILIES
from dialect_parity import Case, check_evaluation, check_training

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
