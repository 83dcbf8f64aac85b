"""PyTorch's sample inputs through the public functions, ``functional`` and ``accelerate``, forward and gradients.

Every result is held to the gate of the kernels: twice torch's error against float64, and four units in the last place.
The gradients of a call are held to it as one vector with its outputs: those that vanish have no scale of their own.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_samples as samples
from torch import Tensor, nn
from torch_samples import DTYPES, Call, outcome

import transformer_fast as tfast
from transformer_fast.function_mode import counted_calls
from transformer_fast.layers import functions
from transformer_fast.testing import assert_as_exact_as_eager, errors

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")

Outcome = tuple[list[Tensor], list[Tensor | None]]

FUNCTIONS = [name for name in samples.LEAST_SAMPLES if hasattr(F, name)]
MODULES = list(samples.LEAST_MODULE_SAMPLES)
PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
ATTENTION = "scaled_dot_product_attention"
# With few numbers torch's error may be small by luck, or ours large by bad luck at the kink of a ReLU. A result beyond
# the gate is compared with torch's largest error in RUNS runs, whose inputs are off by one unit in the last place.
RUNS = 8
MOST_SECOND_LOOKS = 0.1  # share of the results


class Gate:
    """Gate of one function or module in one dtype, over all samples."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.looks, self.results = dtype, [], 0
        self.torchs_dtype = torch.float32 if dtype == torch.float64 else dtype

    def hold(self, what: str, found: Outcome, function: Callable, call: Call, exact: Outcome) -> None:
        """Check shapes, dtypes and missing gradients against torch; check each output, and the gradients, by the
        gate.

        Args:
            function: torch's; a module has the dtype of the gate's torch.
            exact: its result in float64.
        """
        torchs = self._torchs(function, call, exact)
        for kind, ours, theirs in zip(("output", "gradient"), found, torchs, strict=True):
            assert len(ours) == len(theirs), f"{what}: {len(ours)} {kind}s, expected {len(theirs)}"
            for n, (a, e) in enumerate(zip(ours, theirs, strict=True)):
                kinds = [None if t is None else (t.shape, t.dtype) for t in (a, e)]
                assert kinds[0] == kinds[1], f"{what}: {kind} {n} is {kinds[0]}, expected {kinds[1]}"
        other_runs = functools.cache(lambda: [self._nearby(function, call, exact, run) for run in range(RUNS)])
        for n in range(len(found[0])):
            self._pass(f"{what}, output {n}", lambda of, n=n: of[0][n], found, torchs, exact, other_runs)
        if found[1]:
            self._pass(f"{what}, gradients", vector, found, torchs, exact, other_runs)

    def _pass(self, what: str, part: Callable, found: Outcome, torchs: Outcome, exact: Outcome, others) -> None:
        a, e, x = map(part, (found, torchs, exact))
        self.results += 1
        error, allowed, _ = errors(a, e, x)
        if error > allowed:
            self.looks.append(what)
            for other in map(part, others()):
                e = torch.where((other - x).abs() > (e - x).abs(), other.to(x.dtype), e.to(x.dtype))
        assert_as_exact_as_eager(a, e, x, what=what)

    def _torchs(self, function: Callable, call: Call, exact: Outcome) -> Outcome:
        """Return torch's result. In float64 its error is that of float32, in units of the last place."""
        found = outcome(function, call, self.torchs_dtype)
        if self.dtype != torch.float64:
            return found
        shrink = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        pairs = [list(zip(es, xs, strict=True)) for es, xs in zip(found, exact, strict=True)]
        outputs, grads = ([x if x is None else x + (e.double() - x) * shrink for e, x in pair] for pair in pairs)
        return outputs, grads

    def _nearby(self, function: Callable, call: Call, exact: Outcome, run: int) -> Outcome:
        """Return torch's result for inputs and parameters that are moved by one unit in the last place."""
        generator = torch.Generator().manual_seed(run)

        def off(t: Tensor) -> Tensor:
            if not isinstance(t, Tensor) or not t.is_floating_point():
                return t
            units = torch.randint(-1, 2, t.shape, generator=generator)
            return (t.double() * (1 + units * torch.finfo(self.torchs_dtype).eps)).to(self.torchs_dtype)

        if isinstance(function, nn.Module):
            function = copy.deepcopy(function)
            for parameter in function.parameters():
                parameter.data = off(parameter.data)
        args, kwargs = call
        call = tuple(map(off, args)), {name: off(value) for name, value in kwargs.items()}
        return self._torchs(function, call, exact)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        assert failed or len(self.looks) <= MOST_SECOND_LOOKS * self.results + 1, f"too often beyond: {self.looks}"


def vector(found: Outcome) -> Tensor:
    return torch.cat([t.flatten() for t in (*found[0], *found[1]) if t is not None])


def has_gradient(call: Call) -> bool:
    """Return True if torch has a gradient for a call."""
    return not (call[1].get("sparse") and call[1].get("scale_grad_by_freq"))


def calls_of(name: str, dtype: torch.dtype, scale: float = 1.0) -> Iterator[tuple[str, Call, Callable, Outcome]]:
    """Yield each sample of a function: name, arguments, torch's function and the exact result."""
    for n, (call, exact) in enumerate(zip(samples.function_samples(name, scale), truth(name, scale), strict=True)):
        with torch.set_grad_enabled(has_gradient(call)):
            yield f"{name} {n} in {dtype}", call, samples.torchs(name, call[1]), exact


@functools.cache
def truth(name: str, scale: float) -> list[Outcome]:
    results = []
    for call in samples.function_samples(name, scale):
        with torch.set_grad_enabled(has_gradient(call)):
            results.append(outcome(samples.torchs(name, call[1]), call, torch.float64))
    return results


@functools.cache
def module_truth(name: str, training: bool) -> list[Outcome]:
    with torch.set_grad_enabled(training):
        return [
            outcome(copy.deepcopy(m).double(), call, torch.float64)
            for m, call in samples.module_samples(name, training)
        ]


def scale_of(name: str) -> float:
    """Return the factor for inputs of samples. At their own scale a softmax is nearly one-hot; another test covers
    that."""
    return samples.UNIT if name == ATTENTION else 1.0


def refusals(name: str) -> list[str]:
    """Return the page's answers of our function for unsupported arguments of ``F.<name>``."""
    rows = re.findall(r"^\| `F\.(\w+)` \| [^|]+ \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert {function for function, _ in rows} <= set(samples.LEAST_SAMPLES)
    return [said for function, said in rows if function == name]


@pytest.mark.cover(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions(name: str, dtype: torch.dtype) -> None:
    assert len(samples.function_samples(name)) >= samples.LEAST_SAMPLES[name]
    expected, met = refusals(name), set()
    with Gate(dtype) as gate:
        for what, call, torchs, exact in calls_of(name, dtype, scale_of(name)):
            try:
                found = outcome(samples.OURS[name], call, dtype)
            except (TypeError, ValueError) as error:
                said = [text for text in expected if text in str(error)]
                assert said, f"{what}: {error}"
                met.update(said)
                continue
            gate.hold(what, found, torchs, call, exact)
    assert met == set(expected), f"the page lists what was not refused: {set(expected) - met}"


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", samples.IN_BLOCKS)
def test_torch_s_functions_in_a_block(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "FEW_CLASSES", 0)
    function = samples.in_a_block(name)
    with Gate(dtype) as gate, counted_calls() as calls:
        for what, call, torchs, exact in calls_of(name, dtype, scale_of(name)):
            gate.hold(what, outcome(function, call, dtype), torchs, call, exact)
    assert calls[name, True] >= samples.IN_BLOCKS[name], calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accelerated_dropout(dtype: torch.dtype) -> None:
    with Gate(dtype) as gate:
        for what, (args, options), torchs, exact in calls_of("dropout", dtype):
            model = nn.Sequential(nn.Dropout(options.get("p", 0.5)).train(options.get("training", True)))
            assert tfast.accelerate(model).swapped
            gate.hold(
                what, outcome(model[0], (args, {}), dtype), lambda x, f=torchs, o=options: f(x, **o), (args, {}), exact
            )


@pytest.mark.cover(4)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_accelerated_modules(name: str, dtype: torch.dtype, training: bool) -> None:
    given = samples.module_samples(name, training)
    assert len(given) >= samples.LEAST_MODULE_SAMPLES[name]
    fast = nn.ModuleList(copy.deepcopy(module).to(dtype) for module, _ in given)
    swapped = tfast.accelerate(fast).swapped
    assert swapped or name == "Linear"  # a linear layer is only faster by oneDNN, on some processors
    with Gate(dtype) as gate, torch.set_grad_enabled(training):
        for n, ((module, call), ours, exact) in enumerate(zip(given, fast, module_truth(name, training), strict=True)):
            torchs = copy.deepcopy(module).to(gate.torchs_dtype)
            gate.hold(f"{name} {n} in {dtype}", outcome(ours, call, dtype), torchs, call, exact)


LAYERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "Linear": lambda m: tfast.layers.Linear(m.in_features, m.out_features, m.bias is not None),
    "LayerNorm": lambda m: tfast.layers.LayerNorm(m.normalized_shape, m.eps, m.elementwise_affine, m.bias is not None),
    "RMSNorm": lambda m: tfast.layers.RMSNorm(m.normalized_shape, m.eps, m.elementwise_affine),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_ours(name: str, dtype: torch.dtype) -> None:
    with Gate(dtype) as gate:
        pairs = zip(samples.module_samples(name, True), module_truth(name, True), strict=True)
        for n, ((module, call), exact) in enumerate(pairs):
            if len(getattr(module, "normalized_shape", (1,))) > 1:  # our norms are over the last dimension only
                with pytest.raises(ValueError, match=r"normalized_shape|weight must be of shape"):
                    LAYERS[name](module)(*call[0])
                continue
            ours = LAYERS[name](module).to(dtype)
            ours.load_state_dict(module.state_dict())
            torchs = copy.deepcopy(module).to(gate.torchs_dtype)
            gate.hold(f"{name} {n} in {dtype}", outcome(ours, call, dtype), torchs, call, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sharp_softmax(dtype: torch.dtype) -> None:
    """At the samples' own scale outputs pass the gate; gradients have at most the error that the page states."""
    factor = float(re.search(r"gradients may be off by up to (\d+) times", PAGE.read_text())[1])
    worst = {"ours": 0.0, "torch's": 0.0}
    with Gate(dtype) as gate:
        for what, call, torchs, exact in calls_of(ATTENTION, dtype):
            found = outcome(tfast.scaled_dot_product_attention, call, dtype)
            with torch.no_grad():
                gate.hold(what, (found[0], []), torchs, call, (exact[0], []))
            theirs = gate._torchs(torchs, call, exact)
            for whose, grads in (("ours", found[1]), ("torch's", theirs[1])):
                differences = [(g - x).abs().max().item() for g, x in zip(grads, exact[1], strict=True)]
                worst[whose] = max(worst[whose], *differences)
    assert worst["ours"] <= factor * worst["torch's"], worst
