"""Switches that let all C++ faults be compiled at once (tools/mutant_switches.py)."""

from __future__ import annotations

import pytest
from mutant_rows.fault import Fault
from mutant_switches import number_of, switched


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        ("{\n  return a + 1;\n}", "a + 1", "a - 1", "{\n  return (on ? (a - 1) : (a + 1));\n}"),
        ("{\n  x = f(a, b * 2);\n}", "b * 2", "b", "{\n  x = f(a,(on ? ( b) : ( b * 2)));\n}"),
        ("for (i = 0; i < n; ++i) f(i);", "i < n", "i <= n", "for (i = 0;(on ? ( i <= n) : ( i < n)); ++i) f(i);"),
        ("{\n  x = a ? b : c;\n}", "a ? b : c", "b", "{\n  x =(on ? ( b) : ( a ? b : c));\n}"),
        (
            "{\n  x = 1 / (f(a) + b);\n}",
            "(f(a) + b)",
            "f(a + b)",
            "{\n  x =(on ? ( 1 / f(a + b)) : ( 1 / (f(a) + b)));\n}",
        ),
        ("{\n  x -= b;\n  g();\n}", "x -= b", "x += b", "{if (on) { \n  x += b; } else { \n  x -= b; }\n  g();\n}"),
        ("{\n  if (a) f();\n  g();\n}", "if (a) f();", "", "{if (on) { \n   } else { \n  if (a) f(); }\n  g();\n}"),
    ],
)
def test_a_switch_holds_the_expression_or_the_statement(text: str, old: str, new: str, expected: str) -> None:
    fault = Fault(name="", path="", old=old, new=new, tests=())
    changed, chosen = switched(text, [fault])
    assert chosen == [fault]
    assert changed.replace(f"planted_fault == {number_of(fault)}", "on") == expected


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("f({0, 0, a, b - a});", "0, a, b - a", "0, 0, b"),
        ("constexpr int low = 1;", "1", "2"),
        ("{\n  if constexpr (a && b) f();\n}", "a && b", "a"),
        ("{\n  if (a) f();\n  else g();\n}", "if (a) f();", "f();"),
        ("f(x);", "x", "{}"),
    ],
)
def test_what_is_neither_has_none(text: str, old: str, new: str) -> None:
    assert switched(text, [Fault(name="", path="", old=old, new=new, tests=())]) == (text, [])


def test_of_two_faults_in_one_expression_one_has_a_switch() -> None:
    faults = [Fault(name=new, path="", old="a + b", new=new, tests=()) for new in ("a", "b")]
    assert switched("{\n  return a + b;\n}", faults)[1] == faults[:1]
