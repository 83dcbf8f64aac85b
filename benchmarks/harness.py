"""Measurement of speed.

Ours and every peer run in one process, on the same inputs, interleaved round by round, so that whatever the machine
does in the meantime happens to all of them. Results are checked before anything is timed: a wrong kernel gets no
speed. On CUDA the time of a call is that of the device (a CUDA graph replayed over rotating inputs, three times the
size of the L2 cache), and the eager wall time, host cost included, stands beside it. Bytes and operations are counted
by formula and reported as shares of ceilings measured on the same machine in the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from transformer_fast.ops import linear
from transformer_fast.testing import Timing, interleaved

Inputs = Any
Call = Callable[[Inputs], Any]


@dataclasses.dataclass
class Comparison:
    """Times measured for one case.

    Attributes:
        device: time of each call (on CPU, its wall time).
        wall: eager wall time of each call on CUDA, host cost included; empty on CPU.
        refused: why a peer could not run the call, by its name.
        peak_memory: bytes allocated above the inputs, by name, on CUDA.
        spoiled: a capture failed after it had begun; torch was put back, and a new process is still the safer place
            for further cases.
    """

    device: dict[str, Timing] = dataclasses.field(default_factory=dict)
    wall: dict[str, Timing] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    peak_memory: dict[str, int] = dataclasses.field(default_factory=dict)
    spoiled: bool = False

    def ratio(self, peer: str, ours: str = "ours") -> float:
        """Time of the peer divided by our time."""
        return self.device[peer].median / self.device[ours].median


def compare(
    make_inputs: Callable[[], Inputs],
    calls: dict[str, Call],
    *,
    check: Callable[[Inputs], None] | None = None,
    seconds: float = 1.0,
    device: torch.device | str = "cpu",
) -> Comparison:
    """Time several ways to do one thing.

    Args:
        make_inputs: builds one set of inputs on the device; called several times on CUDA.
        calls: the ways, by name; ours is called "ours".
        check: raises if ours is wrong; runs before any timing.
        seconds: about how long each way is timed.
    """
    inputs = make_inputs()
    if check is not None:
        check(inputs)
    result = Comparison()
    runnable = {}
    for name, call in calls.items():
        try:
            call(inputs)
            runnable[name] = call
        except RuntimeError as error:
            if name == "ours":
                raise
            result.refused[name] = str(error).strip().splitlines()[0][:200]
    if torch.device(device).type == "cuda":
        _compare_on_cuda(make_inputs, inputs, runnable, seconds, result)
    else:
        result.device = interleaved({name: functools.partial(call, inputs) for name, call in runnable.items()}, seconds)
    return result


def _compare_on_cuda(
    make_inputs: Callable[[], Inputs], inputs: Inputs, calls: dict[str, Call], seconds: float, result: Comparison
) -> None:
    sets = [inputs]
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    while len(sets) < 32 and sum(map(_bytes_of, sets)) < 3 * l2:
        sets.append(make_inputs())

    def one_of_each(call: Call) -> None:
        for one in sets:
            call(one)

    replays = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(inputs)
        torch.cuda.synchronize()
        result.peak_memory[name] = torch.cuda.max_memory_allocated() - before
        replays[name] = _captured(functools.partial(one_of_each, call), result, name)
    replays = {name: replay for name, replay in replays.items() if replay is not None}
    for name, times in _device_times(replays, seconds).items():
        result.device[name] = Timing.of([t / len(sets) for t in times])

    def eager(call: Call) -> None:
        one_of_each(call)
        torch.cuda.synchronize()

    wall = interleaved({name: functools.partial(eager, call) for name, call in calls.items()}, seconds / 2)
    for name, timing in wall.items():
        result.wall[name] = Timing(*(t / len(sets) for t in dataclasses.astuple(timing)))


def _captured(work: Callable[[], None], result: Comparison, name: str) -> Callable[[], None] | None:
    """Return the work as a CUDA graph, or the reason why it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        result.refused[name] = f"CUDA graph: {str(error).strip().splitlines()[0][:200]}"
        result.spoiled = True
        leave_capture()
        return None
    return graph.replay


def leave_capture() -> None:
    """Put torch back after a capture that failed.

    torch 2.11 leaves the capture's stream current, and its generators in capture mode, in which every later draw on the
    device raises an error.
    """
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.default_stream())
    for generator in torch.cuda.default_generators:
        generator.graphsafe_set_state(generator.clone_state())


def _device_times(replays: dict[str, Callable[[], None]], seconds: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in replays}
    deadline = time.perf_counter() + seconds * max(1, len(replays))
    while replays and (time.perf_counter() < deadline or min(map(len, samples.values())) < 10):
        for name, replay in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3)
    return samples


def _bytes_of(inputs: Inputs) -> int:
    tensors = [t for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


@functools.cache
def ceilings(device: str) -> dict[str, float]:
    """Limits of this machine, measured now: ``copy`` in bytes/s (read plus written), ``matmul`` in operations/s.

    On CUDA the product is 8192^3 in bf16; on CPU 1024^3 in fp32, by the faster of PyTorch's two libraries.
    """
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    size = 2**30 if device == "cuda" else 2**27
    a, b = torch.randn(n, n, dtype=dtype, device=device), torch.randn(n, n, dtype=dtype, device=device)
    source, target = (torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(2))
    calls = {"copy": lambda _: target.copy_(source), "matmul": lambda _: linear(a, b)}
    if device == "cuda":
        replays = {name: functools.partial(call, None) for name, call in calls.items()}
        for replay in replays.values():
            replay()
        times = {name: statistics.median(t) for name, t in _device_times(replays, 0.3).items()}
    else:
        times = {name: t.median for name, t in compare(lambda: None, calls, seconds=0.3).device.items()}
    return {"copy": 2 * size / times["copy"], "matmul": 2 * n**3 / times["matmul"]}
