"""Table of resources, made without a GPU: occupancy rules, and the committed record."""

import pytest

pytest.importorskip("triton")

import resources
from pages import tables

from tools.multiprocessors import MULTIPROCESSORS


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
    assert MULTIPROCESSORS[arch].occupancy(registers, shared, warps) == expected


def test_the_committed_table():
    page = resources.RESULTS / "resources.md"
    (kernels,) = tables(page)
    assert {row["arch"] for row in kernels} == {"sm_80", "sm_90", "sm_100"}
    assert {row["kernel"].split()[0] for row in kernels} >= {"forward", "grad_q", "grad_kv", "decode"}
    assert page.read_text() == resources.markdown(kernels)
