"""Timer for interleaved calls, so that other load on the machine slows all calls alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median, and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Summarise measured seconds, at least two."""
        cuts = statistics.quantiles(samples, n=10)
        return cls(statistics.median(samples), cuts[1], cuts[7])


def interleaved(calls: Mapping[str, Callable[[], object]], seconds: float, at_least: int = 7) -> dict[str, Timing]:
    """Time several calls in turn, one sample per call and round.

    Args:
        calls: the calls by name. On a GPU each must wait for its own result (``torch.cuda.synchronize``).
        seconds: approximate total time per call. A sample takes at least 2 ms; short calls are repeated.
        at_least: minimum number of samples per call.

    Returns:
        Wall time per call, by name.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repeats[name] = max(1, round(0.002 / max(once, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    spent = 0.0
    while spent < seconds * len(calls) or min(map(len, samples.values())) < at_least:
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            elapsed = time.perf_counter() - start
            samples[name].append(elapsed / repeats[name])
            spent += elapsed
    return {name: Timing.of(times) for name, times in samples.items()}
