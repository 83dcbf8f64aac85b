"""The H100 of the predictions: one table with every assumption and its source."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from tools.multiprocessors import MULTIPROCESSORS

_GUIDE = "CUDA C++ programming guide, arithmetic throughput of compute capability 9.0"
_LIMITS = "CUDA C++ programming guide, limits of compute capability 9.0, a multiprocessor"
_LUO = "assumed, near what microbenchmarks report (W. Luo et al., arXiv 2402.13499)"
_FITTED = "assumed; what it gets wrong is in the calibration"


def _assumed(value: float, unit: str, source: str):
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Machine:
    """Assumptions about an H100 SXM. A sub-partition is a quarter of a multiprocessor, with one scheduler."""

    multiprocessors: int = _assumed(132, "", "H100 SXM datasheet")
    clock: float = _assumed(1.755e9, "Hz", "assumed: below the 1.83 GHz that the datasheet's 989 TFLOP/s follow from")
    copy: float = _assumed(3.0e12, "byte/s", "a plain copy on an H100 SXM, published; the datasheet says 3.35e12")
    gap: float = _assumed(1.0e-6, "s", "between two kernels of a replayed CUDA graph; assumed")
    start: int = _assumed(400, "cycles", "from the end of a program to the next one's first instruction; " + _FITTED)
    issue: float = _assumed(1, "cycles a warp instruction and sub-partition", "one scheduler each")
    fp32: float = _assumed(2, "cycles, on either of two pipes", f"{_GUIDE}: 128 results a cycle")
    integer_multiply: float = _assumed(2, "cycles, on one of these pipes", f"{_GUIDE}: 64 results a cycle")
    wide_multiply: float = _assumed(4, "cycles, on the same pipe", "IMAD.WIDE and .HI at half that rate; " + _FITTED)
    alu: float = _assumed(2, "cycles", f"{_GUIDE}: 64 results a cycle of compare, logic, shift, add")
    mufu: float = _assumed(8, "cycles", f"{_GUIDE}: 16 results a cycle of exp2, log2, rsqrt")
    uniform: float = _assumed(2, "cycles", _FITTED)
    shuffle: float = _assumed(4, "cycles", f"{_GUIDE}: 32 results a cycle")
    shared_width: float = _assumed(128, "bytes a cycle and multiprocessor", "32 banks of 4 bytes")
    tensor: float = _assumed(0.5, "cycles a column of a 64-row wgmma", "4,096 FLOP a cycle: 989 TFLOP/s at 1.83 GHz")
    mma_sync: float = _assumed(6.5, "cycles a 16x8x16 mma.sync", f"slower than a wgmma; {_LUO}")

    mma_sync_latency: int = _assumed(33, "cycles", _LUO)
    mufu_latency: int = _assumed(18, "cycles beyond its turn", _FITTED)
    uniform_latency: int = _assumed(12, "cycles beyond its turn", _FITTED)
    shared_latency: int = _assumed(29, "cycles", _LUO)
    shuffle_latency: int = _assumed(24, "cycles", _FITTED)
    constant_latency: int = _assumed(35, "cycles", _FITTED)
    memory_latency: int = _assumed(700, "cycles", "assumed: what DRAM takes beside other programs")
    cached_latency: int = _assumed(300, "cycles", f"loads of up to 8 bytes a lane, which hit the L2; {_LUO}")
    loaded_latency: int = _assumed(
        1100, "cycles", "assumed: where DRAM is busy; slow end of kernels without a main loop"
    )
    copy_issue_latency: int = _assumed(20, "cycles until cp.async has read its address", _FITTED)
    wgmma_latency: int = _assumed(30, "cycles from the last product to its results", _FITTED)
    wgmma_arrive: int = _assumed(4, "cycles", _FITTED)
    barrier_latency: int = _assumed(20, "cycles after the last warp arrived", _FITTED)
    fence_latency: int = _assumed(30, "cycles", _FITTED)
    branch_latency: int = _assumed(6, "cycles", _FITTED)
    mbarrier_latency: int = _assumed(25, "cycles", _FITTED)


H100 = Machine()


def assumptions(machine: Machine = H100) -> list[dict[str, object]]:
    """Every number of the table, and the limits of a multiprocessor: name, value, unit, source."""
    limits = fields(MULTIPROCESSORS[90])
    shared = [
        {"name": f.name, "value": getattr(MULTIPROCESSORS[90], f.name), "unit": "", "source": _LIMITS} for f in limits
    ]
    return [{"name": f.name, "value": getattr(machine, f.name), **f.metadata} for f in fields(machine)] + shared
