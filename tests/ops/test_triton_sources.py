"""Rules that Triton's kernels keep so that every supported version compiles them, checked on the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "transformer_fast" / "triton"
FILES = sorted(KERNELS.rglob("*.py"))


def is_jitted(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def names_that_may_be_none() -> set[str]:
    """Names that a kernel somewhere compares with None: what a call may leave out."""
    found = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and is_jitted(node):
                for part in ast.walk(node):
                    if isinstance(part, ast.Compare) and isinstance(part.ops[0], (ast.Is, ast.IsNot)):
                        found.add(ast.unparse(part.left).rpartition(".")[2])
    return found


def none_in_tuples(source: str, optional: set[str]) -> list[str]:
    """Return statements of jitted functions whose tuple holds None, or a name that may be None."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not is_jitted(node):
            continue
        for part in ast.walk(node):
            values = part.value.elts if isinstance(part, ast.Return) and isinstance(part.value, ast.Tuple) else []
            for value in values:
                constant = isinstance(value, ast.Constant) and value.value is None
                if constant or (isinstance(value, ast.Name) and value.id in optional):
                    found.append(f"{node.name}, line {part.lineno}: {ast.unparse(part)}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(KERNELS)))
def test_no_helper_returns_none_in_a_tuple(file):
    """Triton 3.6 makes a tensor of every constant in a returned tuple, and cannot make one of None."""
    assert not none_in_tuples(file.read_text(), names_that_may_be_none())


def test_the_rule_sees_what_did_not_compile():
    source = """
@triton.jit
def positions(first, window, BOTTOM_RIGHT):
    if BOTTOM_RIGHT:
        return first + 1, None
    return first, window
"""
    optional = names_that_may_be_none()
    assert {"window", "bias", "lengths"} <= optional
    assert len(none_in_tuples(source, optional)) == 2
