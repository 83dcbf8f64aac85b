"""accelerate leaves the rest of the program unchanged: other threads, random numbers, interrupted calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerated import surroundings
from handwritten import make_model
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import backends
from transformer_fast.swap import accelerate as engine

D = 16


class OwnDropout(nn.Module):
    """Module with the names of a classic feed-forward network and a dropout probability in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.w_1, self.w_2, self.dropout = nn.Linear(D, 32), nn.Linear(32, D), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.3, self.training)
        return self.w_2(self.dropout(self.w_1(x).relu()))


def bert() -> nn.Module:
    pytest.importorskip("transformers")
    import huggingface_models as models

    return models.make(models.named("BertForMaskedLM"), num_hidden_layers=1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.Transformer(D, 2, 1, 1, 32, batch_first=True),
    "annotated": lambda: make_model(11, 11, 1, D, 32, 2),
    "bert": bert,
    "own dropout": OwnDropout,
}
FUNCTIONAL = {"own dropout"}
"""Models that are accelerated with ``functional=True``."""


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_behind(name: str) -> None:
    """The random generators are never advanced, so other threads do not see a restored state either."""
    model, before = MODELS[name](), surroundings()
    tfast.accelerate(model, functional=name in FUNCTIONAL)
    assert surroundings() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_decides_nothing(dtype: torch.dtype) -> None:
    for make in (MODELS["annotated"], MODELS["bert"]):
        expected = tfast.accelerate(make()).rows
        torch.set_default_dtype(dtype)
        try:
            assert tfast.accelerate(make()).rows == expected
        finally:
            torch.set_default_dtype(torch.float32)


def test_four_threads_accelerate_at_once() -> None:
    names = list(MODELS) * 2
    alone = {name: tfast.accelerate(make()).rows for name, make in MODELS.items()}
    models = [MODELS[name]() for name in names]
    shared = nn.Sequential(*[MODELS["annotated"]() for _ in range(2)])
    everything, before = tfast.accelerate(nn.Sequential(*[MODELS["annotated"]() for _ in range(2)])), surroundings()
    start, reports, of_shared = threading.Barrier(4), {}, []

    def work(first: int) -> None:
        start.wait()
        for place in range(first, len(models), 4):
            reports[place] = tfast.accelerate(models[place]).rows
        of_shared.append(tfast.accelerate(shared))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert surroundings() == before and not backends._blocks
    assert [reports[place] for place in range(len(models))] == [alone[name] for name in names]
    assert sorted(len(report.swapped) for report in of_shared) == [0, 0, 0, len(everything.swapped)]


def test_a_thread_beside_it_computes_and_draws_as_ever() -> None:
    linear, end, drawn, failed = nn.Linear(8, 8), threading.Event(), [], []

    def serve() -> None:
        while not end.is_set() or len(drawn) < 50:
            try:
                linear(torch.ones(2, 8) + torch.zeros(8))
                drawn.append(torch.rand(4))
                assert backends.current() == "auto"
            except Exception as error:
                failed.append(error)
                return

    torch.manual_seed(7)
    models = [MODELS[name]() for name in ("annotated", "bert", "torch")]  # their weights are drawn too
    torch.manual_seed(7)
    thread = threading.Thread(target=serve)
    thread.start()
    for model in models:
        tfast.accelerate(model)
    end.set()
    thread.join()
    assert not failed
    torch.manual_seed(7)
    assert torch.equal(torch.stack(drawn), torch.stack([torch.rand(4) for _ in drawn]))


def state(model: nn.Module) -> list[Any]:
    """Return the classes of a model's modules, and the objects that they hold."""
    return [(type(m), {k: id(v) for k, v in m.__dict__.items()}) for m in model.modules()]


def test_an_interrupt_anywhere_is_undone() -> None:
    """Raise KeyboardInterrupt at the n-th line that runs in the files of accelerate."""
    folder = str(Path(engine.__file__).parent)
    model = nn.Sequential(bert(), nn.TransformerEncoderLayer(D, 2, 32), nn.MultiheadAttention(D, 2))
    model[0].bert.encoder.layer[0].attention.output.attn = torch.ones(1)  # something with the name of kept weights
    before, lines, stop = state(model), 0, 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line" and frame.f_code.co_name != "undo":
            lines += 1
            if lines == stop:
                raise KeyboardInterrupt
        return trace

    def traced() -> tfast.accelerate.Report:
        nonlocal lines
        lines = 0
        sys.settrace(trace)
        try:
            return tfast.accelerate(model, fused_loss=True)
        finally:
            sys.settrace(None)

    traced().undo()
    assert state(model) == before
    report = traced()  # the second time, classes are at hand
    total, kept = lines, report.rows
    report.undo()
    for stop in sorted({1, 2, total - 2, total - 1, *range(5, total, total // 40)}):
        with pytest.raises(KeyboardInterrupt):
            traced()
        assert state(model) == before, f"line {stop} of {total}"
        assert backends.current() == "auto" and torch.get_default_dtype() == torch.float32
    stop = 0
    assert traced().rows == kept
