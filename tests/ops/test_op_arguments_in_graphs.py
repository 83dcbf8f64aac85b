"""Wrong arguments of the operators in graphs: compiled, exported, and by the public functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from tests.support.op_arguments import Recorded, Wrong, has_kernel, operators, outcome, recorded, wrong_calls
from transformer_fast import extension

pytestmark = pytest.mark.skipif(not extension.load(), reason="the operators are in the extension")
OPERATORS = [name for name in operators() if has_kernel(name)]


class Graph(nn.Module):
    """A recorded call as a function of its tensors."""

    def __init__(self, call: Recorded) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call.op(**self.call.arguments | dict(zip(self.names, tensors, strict=True)))

    @property
    def names(self) -> list[str]:
        return [name for name, value in self.call.arguments.items() if isinstance(value, Tensor)]

    def tensors(self, call: Recorded | None = None) -> list[Tensor]:
        """Return the tensors of a call with the same arguments, of the recorded one by default."""
        return [(call or self.call).arguments[name].clone() for name in self.names]


class Function(nn.Module):
    """A function of one tensor, with an example of it."""

    def __init__(self, function: Callable[[Tensor], Tensor], example: Tensor) -> None:
        super().__init__()
        self.function, self.example = function, example

    def forward(self, given: Tensor) -> Tensor:
        return self.function(given)

    def tensors(self) -> list[Tensor]:
        return [self.example]


def compiled(graph: Graph | Function) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(graph, backend="aot_eager", fullgraph=True)


def exported(graph: Graph | Function) -> Callable[..., Any]:
    return torch.export.export(graph, tuple(graph.tensors())).module()


def inductor(graph: Graph | Function) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(graph, fullgraph=True)


def by_value(call: Recorded) -> list[Wrong]:
    """Wrong calls that a graph of the right call can be run with."""
    return [
        wrong
        for wrong in wrong_calls(call)
        if wrong.by_value and isinstance(wrong.call.arguments[wrong.argument], Tensor)
    ]


def checked_like_eager(graph: Graph, run: Callable[..., Any], wrong: Wrong) -> None:
    """Assert that a graph has the result, or the error, of the eager call."""
    expected, error = outcome(wrong.call.run)
    found, said = outcome(run, *graph.tensors(wrong.call))
    assert said == error, f"{wrong.argument}, {wrong.what}"
    for a, b in zip(found or [], expected or [], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("door", [compiled, exported])
@pytest.mark.parametrize("name", OPERATORS)
def test_values_are_checked_where_a_graph_runs(name: str, door: Callable[[Graph], Callable[..., Any]]) -> None:
    for n, call in enumerate(recorded()[name]):
        right, wrong = Wrong(call, "", "nothing", by_value=True), by_value(call)
        if n == 0 or wrong:
            graph = Graph(call)
            run = door(graph)
            for each in (right, *wrong):
                checked_like_eager(graph, run, each)


def made_and_run(door: Callable[[Graph], Callable[..., Any]], graph: Graph) -> Any:
    return door(graph)(*graph.tensors())


@pytest.mark.parametrize("door", [compiled, exported])
@pytest.mark.parametrize("name", OPERATORS)
def test_sizes_are_checked_where_a_graph_is_made(name: str, door: Callable[[Graph], Callable[..., Any]]) -> None:
    seen = set()
    for wrong in wrong_calls(recorded()[name][0]):
        if not wrong.by_value and wrong.argument not in seen and outcome(wrong.call.run)[1]:
            seen.add(wrong.argument)
            _, said = outcome(made_and_run, door, Graph(wrong.call))
            assert any(re.search(rf"\b{name}\b", said) for name in wrong.call.arguments), f"{wrong.argument}: {said}"


STARTS, TOKENS = torch.tensor([0, 5, 12], dtype=torch.int32), torch.randn(3, 12, 2, 8)
QUERY, CACHE = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 2, 6, 8)
PAGED, PAGES = torch.randn(2, 4, 3, 2, 8), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def packed(starts: Tensor) -> Tensor:
    return tfast.attention_packed(*TOKENS, starts, starts, max_seqlen_q=7, max_seqlen_k=7)


def decoded(lengths: Tensor) -> Tensor:
    return tfast.attention_decode(QUERY, *CACHE, lengths)


def paged(pages: Tensor) -> Tensor:
    return tfast.attention_decode(QUERY, *PAGED, torch.tensor([4, 6]), page_table=pages)


def masked(lengths: Tensor) -> Tensor:
    return tfast.attention(QUERY, *CACHE, tfast.AttentionMask.lengths(lengths))


PUBLIC = {
    "lengths past the keys": (
        masked,
        torch.tensor([4, 6]),
        torch.tensor([4, 7]),
        r"lengths must lie in \[0, Lk = 6\], got 4 to 7",
    ),
    "lengths past int32": (masked, torch.tensor([4, 6]), torch.tensor([4, 2**32 + 1]), "got 4 to 4294967297"),
    "negative lengths": (masked, torch.tensor([4, 6]), torch.tensor([-4, 6]), "got -4 to 6"),
    "past the tokens": (
        packed,
        STARTS,
        torch.tensor([0, 7, 14], dtype=torch.int32),
        "cu_seqlens_q must rise from 0 to",
    ),
    "too few tokens": (packed, STARTS, torch.tensor([0, 5, 9], dtype=torch.int32), "cu_seqlens_q must rise from 0 to"),
    "longer than max_seqlen_q": (packed, STARTS, torch.tensor([0, 3, 12], dtype=torch.int32), "at most 7 tokens"),
    "falling": (packed, STARTS, torch.tensor([0, -1, 12], dtype=torch.int32), "cu_seqlens_q must rise from 0 to"),
    "a full cache": (decoded, torch.tensor([4, 6]), torch.tensor([4, 7]), r"lengths must lie in \[0, 6\].*got 4 to 7"),
    "a page that is not there": (paged, PAGES, PAGES + 1, r"page_table must name pages in \[0, 4\)"),
}


@pytest.mark.parametrize("door", [compiled, exported, inductor])
@pytest.mark.parametrize("case", PUBLIC)
def test_public_functions_in_graphs_check_values(case: str, door: Callable[..., Callable[..., Any]]) -> None:
    function, right, wrong, says = PUBLIC[case]
    run = door(Function(function, right))
    torch.testing.assert_close(run(right), function(right), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=says):
        run(wrong)
