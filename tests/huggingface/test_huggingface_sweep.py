"""Every language model of the installed transformers equals eager or is refused by name, as the docs say."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import huggingface_models as models  # noqa: E402
import huggingface_sweep as sweep  # noqa: E402
import huggingface_table as page  # noqa: E402

from transformer_fast.huggingface import interface  # noqa: E402

CASES = page.cases()
VERSION, SAID = page.documented()
SAME_VERSION = transformers.__version__ == VERSION


def sample() -> list[Any]:
    """Mark models as slow, except one of each kind and verdict of the page and every tenth."""
    seen, rows = set(), []
    for number, case in enumerate(CASES):
        group = case.kind, SAID.get(page.row_of(case))
        slow = group in seen and number % 10 != 0
        rows.append(pytest.param(case, marks=pytest.mark.slow("one of three hundred models") if slow else ()))
        seen.add(group)
    return rows


@pytest.mark.cover(20)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", sample(), ids=lambda case: f"{case.kind}-{case}")
def test_equal_to_eager_or_refused_by_name(case: models.Case) -> None:
    what, why = sweep.verdict(case)
    if what == sweep.REFUSED:
        words, modules = why.replace(":", " ").split(), list(models.make(case, "eager").modules())
        known = {type(m).__name__ for m in modules} | {type(m.config).__name__ for m in modules if hasattr(m, "config")}
        assert words[2 if words[0] == "models" else 0] in known
        assert 'attn_implementation="transformer_fast"' in why and '"eager"' in why
    if what == sweep.NOT_MADE and not SAME_VERSION:
        pytest.skip(f"not made by transformers {transformers.__version__}: {why}")
    assert (what == sweep.NOT_MADE) == (case.name in models.NOT_MADE), why
    if SAME_VERSION:
        assert SAID[page.row_of(case)] == page.label(what, why, case), f"python {page.__file__} --write"


def test_the_table_has_these_models_and_no_others() -> None:
    if not SAME_VERSION:
        pytest.skip(f"the table is that of transformers {VERSION}")
    assert set(SAID) == {page.row_of(case) for case in CASES}
    assert not set(models.NOT_MADE) - {case.name for case in CASES}


def test_the_sweep_does_not_shrink() -> None:
    tried = [case for case in models.language_models() if case.name not in models.NOT_MADE]
    assert len(tried) >= 110
    if SAME_VERSION:
        equal = [place for place, said in SAID.items() if said == "equal to eager"]
        assert len(tried) >= 250 and len(equal) >= 200


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MegatronBertForMaskedLM"])
def test_a_model_that_is_refused_would_be_as_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a refused model get the mask that they know."""
    case = next(case for case in CASES if case.name == name)
    assert sweep.verdict(case)[0] == sweep.REFUSED
    monkeypatch.setattr(interface, "check", lambda config: None)
    assert sweep.verdict(case)[0] == sweep.ALONE
