"""The table made without a GPU: occupancy against the rules, and floors that cannot be below what a case needs."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import roofline
from attention_cases import CUDA
from triton_kernels import Compiled


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "expected"),
    [
        (90, 128, 1024, 4, (4, 0.25, "registers")),
        (90, 33, 1024, 4, (12, 0.75, "registers")),  # given out in eights: 40
        (90, 32, 0, 4, (16, 1.0, "registers")),
        (80, 32, 80 * 1024, 8, (2, 0.25, "shared memory")),
        (90, 16, 0, 16, (4, 1.0, "warps")),
        (90, 16, 0, 1, (32, 0.5, "programs")),
        (90, 255, 0, 8, (1, 0.125, "registers")),
    ],
)
def test_occupancy_by_the_rules(arch, registers, shared, warps, expected):
    compiled = Compiled("", "", arch, registers, 0, shared, warps, 0, 0, 0, 0.0)
    assert roofline.MULTIPROCESSORS[arch].occupancy(compiled) == expected


def test_floors():
    for case in CUDA[:12]:
        padded, packed = (roofline.estimate(case, "sm90", packed) for packed in (False, True))
        for row in (padded, packed):
            assert row["operations in tiles"] >= row["operations needed"] > 0
            assert row["floor in tiles"] >= row["floor"] >= row["bytes"] / roofline.COPY
            assert all(0 < share <= 1 for share in row["tiles kept"].values())
        assert packed["bytes"] < padded["bytes"] and packed["operations needed"] < padded["operations needed"]


def test_the_committed_table_has_every_case():
    record = json.loads((roofline.RESULTS / "attention.json").read_text())
    assert [row["case"] for row in record["cases"]] == [row["case"] for row in roofline.estimates()]
    assert all(
        row["spilled"] == 0
        for row in record["kernels"]
        if "float32" not in row["kernel"] and "d256" not in row["kernel"]
    )
