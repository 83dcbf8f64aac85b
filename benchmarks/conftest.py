"""Fixture ``versus``: one case of a benchmark, ours beside its peers, recorded by pytest-benchmark."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import records
from harness import Call, Comparison, Inputs, ceilings, compare
from nvidia_smi import smi

pytest_plugins = ["every_test"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, default=0.5, help="about how long each way of each case is timed")
    parser.addoption(
        "--compile-whole", action="store_true", help="also torch.compile whole models, which takes minutes"
    )


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Return CUDA if there is a GPU, else the CPU; a run uses only one of them."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("benchmarks run on CUDA where there is one, else on CPU")
    return request.param


@pytest.fixture
def versus(benchmark: Any, request: pytest.FixtureRequest, device: str) -> Callable[..., Comparison]:
    """Compare ours with peers and record times, ratios, bytes, operations and shares of the limits."""

    def run(
        make_inputs: Callable[[], Inputs],
        calls: dict[str, Call],
        *,
        check: Callable[[Inputs], None] | None = None,
        bytes_moved: float = 0.0,
        operations: float = 0.0,
    ) -> Comparison:
        result = compare(make_inputs, calls, check=check, seconds=request.config.getoption("--seconds"), device=device)
        inputs = make_inputs()
        benchmark.pedantic(calls["ours"], args=(inputs,), rounds=5, warmup_rounds=1)
        ours = result.device["ours"].median if "ours" in result.device else result.wall["ours"].median
        limits = ceilings(device)
        benchmark.extra_info.update(
            device=device,
            times={name: dataclasses.asdict(timing) for name, timing in result.device.items()},
            wall={name: dataclasses.asdict(timing) for name, timing in result.wall.items()},
            ratios={name: timing.median / ours for name, timing in result.device.items() if name != "ours"},
            refused=result.refused,
            peak_memory=result.peak_memory,
            bytes=bytes_moved,
            operations=operations,
            share_of_copy=bytes_moved / ours / limits["copy"],
            share_of_matmul=operations / ours / limits["matmul"],
        )
        return result

    return run


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Device, driver, versions, threads, ceilings and commit go into the record."""
    machine_info.pop("node", None)  # the machine's name is nobody's business
    machine_info.update(
        records.here(),
        driver=smi("driver_version,clocks.sm,clocks.mem"),
        ceilings=ceilings("cuda" if torch.cuda.is_available() else "cpu"),
    )
