"""The tile tables suit every version of Triton that is allowed: the record of what kernels spill, by version.

tests/ops/test_triton_compile.py compiles with the version that is installed; tools/triton_front_end.py says whether
the record is of other kernels than these.
"""

from __future__ import annotations

import importlib
import json
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import recording_driver as recording
import torch
import triton
import triton_spills
from project import oldest_versions, pinned
from test_triton_compile import spill_limit
from triton_spills import CAPABILITY, Found
from triton_versions import VERSIONS

import transformer_fast as tfast
from tools.triton_kernels import front_end_digest, triton_ir
from transformer_fast.triton.versions import is_known, keeps_packed_bits, limits

RECORD = triton_spills.read()
launched, on_a_gpu = recording.launched, recording.on_a_gpu


def test_the_versions_are_those_that_are_allowed():
    pin = pinned()["triton"].partition("==")[2].partition(";")[0]
    assert VERSIONS[0].startswith(oldest_versions()["triton"]) and pin.strip() in VERSIONS
    assert all(is_known(version) for version in VERSIONS)
    major, minor, _ = map(int, VERSIONS[-1].split("."))
    for version in ("3.5.1", f"{major}.{minor + 1}.0"):
        assert not is_known(version) and "may spill" in limits(version)


def test_explain_says_what_a_version_lacks(on_a_gpu, monkeypatch):
    q = torch.zeros(1, 2, 64, 64)
    for version in (*VERSIONS, "3.10.0+git"):
        metadata = SimpleNamespace(version=lambda _, version=version: version)
        monkeypatch.setattr(importlib.import_module("transformer_fast.explain"), "metadata", metadata)
        lines = [line for line in tfast.explain(q, q, q).splitlines() if line.startswith("triton: ")]
        assert lines == ([f"triton: {version}; {limits(version)}"] if limits(version) else [])


SERIALISED = {
    "3.6.0": r"forward .* d64 128x64 8 warps 3 stages 128 registers$|forward .* d128 128x64 "
    r"|forward .* dropout documents$|grad_q .* d128 .* mapped dropout documents$",
    "3.7.1": r"grad_q .* d128 .* mapped dropout documents$",
    "3.9.0": r"forward .*(64x32 .*|mapped .*)dropout$|grad_q .* 64x32 .* packed dropout$",
}
"""By version, the cases whose products wait for one another: what ``limits`` says in words."""


def test_versions_lack_what_the_record_shows():
    waiting = [(version, name) for name, rows in RECORD.items() for version, row in rows.items() if row.serialised]
    assert {version for version, _ in waiting} == {version for version in VERSIONS if limits(version)}
    assert not [(version, name) for version, name in waiting if not re.search(SERIALISED.get(version, "^$"), name)]


def test_the_record_has_every_case_and_version():
    """Another tile is another name: after a change of the tables, run tools/triton_spills.py."""
    assert sorted(RECORD) == sorted(triton_spills.launches())
    assert all(tuple(sorted(rows)) == VERSIONS for rows in RECORD.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_no_loop_over_tiles_touches_what_is_spilled(version):
    """Kernels that run are meant; where packed batches keep no bits with a version, the record shows why."""
    found = {name: rows[version] for name, rows in RECORD.items()}
    packed = {name: found.pop(name) for name in [*found] if name.endswith("packed dropout kept")}
    assert len(packed) == 3 and any(row.hot for row in packed.values()) == (not keeps_packed_bits(version))
    assert not {name: f"{row}" for name, row in found.items() if row.hot}
    assert not {name: f"{row}" for name, row in found.items() if row.spilled > spill_limit(name)}


def test_the_table_is_the_record():
    table = triton_spills.RECORD.with_suffix(".md").read_text()
    assert table == triton_spills.markdown(RECORD)
    assert triton_spills.RECORD.read_text() == triton_spills.written(RECORD)


def test_the_record_is_of_these_kernels():
    """One launch per kernel; tools/triton_front_end.py compares all."""
    first = {launch.kernel.__name__: name for name, launch in reversed(triton_spills.launches().items())}
    assert len(first) == 3
    for name in first.values():
        digest = front_end_digest(triton_ir(triton_spills.launches()[name], CAPABILITY))
        recorded = {rows.digest for version, rows in RECORD[name].items() if version == triton.__version__}
        assert recorded <= {digest}, f"{name} is another kernel than in the record"


def test_a_case_of_another_kernel_is_compiled_again(monkeypatch, capsys):
    name, launch = next(iter(triton_spills.launches().items()))
    digest = front_end_digest(triton_ir(launch, CAPABILITY))
    compiled = []

    def compile_launch(launch, arch):
        compiled.append(launch.name)
        return type("Compiled", (), {"registers": 168, "spill_bytes": 8, "hot_spills": 0, "serialised": True})

    monkeypatch.setattr("tools.triton_kernels.compile_launch", compile_launch)
    monkeypatch.setattr(triton_spills, "launches", lambda: {name: launch})
    outcomes = []
    for known in ({}, {name: Found("another", 1, 2, 3, False)}, {name: Found(digest, 1, 2, 3, False)}):
        triton_spills.compile_all(triton.__version__, known, "")
        outcomes.append(json.loads(capsys.readouterr().out))
    again = [name, [digest, 168, 8, 0, True]]
    assert outcomes == [again, again, [name, [digest, 1, 2, 3, False]]] and compiled == [name] * 2
