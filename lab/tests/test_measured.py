"""Measured beside predicted times, without a GPU: every case has its launches, the factor of a simulated GPU is
found, and small cases run in the emulator up to their times."""

import copy
import json
import os
from dataclasses import asdict, replace
from functools import partial

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are not launched", allow_module_level=True)

import gpu
import torch

from benchmarks import harness
from benchmarks.attention_cases import Case
from benchmarks.launch_tensors import META
from lab.emulation.emulated_backend import emulated_backend
from lab.prediction import comparison, measured, report, rows
from lab.prediction.comparison import TimedLaunch
from lab.prediction.machine import H100
from lab.prediction.predictions import Range
from lab.prediction.twins import PredictedLaunch, Twin, attention_case, compile_case, row_case, twins
from transformer_fast.testing import Timing

RECORD = json.loads((report.RECORDS / "predicted.json").read_text())
SXM = {"device": "NVIDIA H100 80GB HBM3", "multiprocessors": 132, "torch": "2.13", "triton": RECORD["triton"]}


@pytest.fixture(scope="module")
def cases():
    return twins(RECORD)


def test_every_prediction_has_the_launches_it_is_of(cases):
    """Kernels, tiles and numbers of launches are equal."""
    assert len(cases) == len(RECORD["calibration"]) + len(RECORD["attention"]) + len(RECORD["rows"])
    for twin in cases:
        names = [launch.name.replace(" torch.", " ") for launch in twin.make(META)]
        assert names == [launch.name for launch in twin.launches], twin.case
    goals = {goal["case"] for goal in RECORD["goals"]}
    assert {twin.case for twin in cases[2 : 2 + len(goals)]} == goals


def test_a_prediction_without_a_twin_is_refused():
    record = copy.deepcopy(RECORD)
    record["rows"][3]["case"] = "softmax 3x5"
    with pytest.raises(ValueError, match="nothing to measure it by: softmax 3x5"):
        twins(record)


def same(seconds):
    return Timing(seconds, 0.99 * seconds, 1.01 * seconds)


def of_speed(factor, twin):
    """Return a simulated GPU whose cycles take the replayed time divided by the factor; bytes take the assumed time."""
    seconds = [max(p.replayed / factor, p.copied) + H100.gap for p in twin.launches]
    return same(sum(seconds)), [TimedLaunch(p.name, same(s)) for p, s in zip(twin.launches, seconds, strict=True)]


def slower(times, twin):
    """Return a simulated GPU on which everything takes this many times the middle of its prediction."""
    each = [TimedLaunch(p.name, same(times * p.time.middle)) for p in twin.launches]
    return same(times * twin.time.middle), each


def few(record):
    """The record with its calibration and a few cases of each kind. One is bound by memory even on the slowest GPU
    of its range."""
    kept = {goal["case"] for goal in record["goals"]} | {"dropout 16384x4096"}
    kinds = {kind: [row for row in record[kind] if row["case"] in kept] for kind in ("attention", "rows")}
    return record | {kind: found[:2] + found[-2:] for kind, found in kinds.items()} | {"goals": record["goals"][:2]}


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Run the module's main on a simulated GPU; return its record."""
    (tmp_path / "predicted.json").write_text(json.dumps(few(RECORD)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(measured, "clock", lambda: 1980)
    monkeypatch.setattr(measured, "usable", lambda: True)

    def run(timer, *options, machine=SXM):
        monkeypatch.setattr(measured, "timed", lambda twin, seconds: timer(twin))
        monkeypatch.setattr(measured, "machine", lambda: machine)
        measured.main(["--out", str(tmp_path), "--predicted", str(tmp_path / "predicted.json"), *options])
        made = json.loads((tmp_path / "measured.json").read_text())
        assert (tmp_path / "measured.md").read_text() == comparison.markdown(made)
        return made

    return run


def test_the_factor_of_a_made_up_gpu_is_found(made_up, capsys):
    made = made_up(partial(of_speed, 1.25))
    found = made["summary"]
    assert [found["factor"][key] for key in ("median", "low", "high")] == pytest.approx([1.25] * 3)
    assert found["copy"]["median"] == pytest.approx(H100.copy, rel=1e-6)
    assert found["factor"]["count"] > 5 < found["cases"] and found["failed"] == 0 == len(found["notes"])
    assert "the factor to 1.25-1.25 (it is 0.76-0.95" in capsys.readouterr().out
    assert found["clock"]["median"] == 1980e6
    text = comparison.markdown(made)
    assert all(f"| {e['case']} |" in text for e in made["cases"]) and found["advice"] in text


def test_a_made_up_gpu_that_is_slower_than_predicted(made_up):
    made = made_up(partial(slower, 1.25))
    assert [made["summary"]["ratio"][key] for key in ("median", "low", "high")] == pytest.approx([1.25] * 3)
    assert all(e["ratio"] == pytest.approx(1.25) for e in made["cases"])
    assert made_up(partial(slower, 1.0))["summary"]["inside"] == len(made["cases"])


def test_a_case_that_fails_is_recorded_and_the_rest_go_on(made_up):
    def timer(twin):
        if twin.case == "layer norm 16384x512 forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried | and failed\nmore")
        return slower(1.0, twin)

    made = made_up(timer)
    (failed,) = [e for e in made["cases"] if "error" in e]
    assert failed == {
        "case": "layer norm 16384x512 forward",
        "error": "OutOfMemoryError: CUDA out of memory. Tried | and failed",
    }
    assert made["summary"]["failed"] == 1 and made["cases"][-1]["case"] != failed["case"]
    text = comparison.markdown(made)
    assert "| layer norm 16384x512 forward | failed |" in text and "Tried \\| and" in text


def test_a_stopped_measurement_goes_on(made_up, tmp_path):
    asked = []

    def stopped(twin):
        asked.append(twin.case)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return slower(1.0, twin)

    with pytest.raises(KeyboardInterrupt):
        made_up(stopped)
    assert [e["case"] for e in json.loads((tmp_path / "measured.json").read_text())["cases"]] == asked[:3]
    made = made_up(stopped, "--resume")
    assert len(made["cases"]) == len(twins(few(RECORD)))
    assert asked[3] == asked[4] and len(asked) == len(made["cases"]) + 1
    another = made_up(partial(slower, 1.0), "--resume", machine=SXM | {"triton": "3.6.0"})
    assert "Triton" in another["summary"]["notes"][0] and len(another["cases"]) == len(made["cases"])


def test_a_lost_device_is_left_to_a_new_process(made_up, monkeypatch):
    class Replaced(Exception):
        pass

    def execute(program, argv):
        raise Replaced(argv[-1])

    def broken(twin):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(measured, "usable", lambda: False)
    monkeypatch.setattr(os, "execv", execute)
    with pytest.raises(Replaced, match="--resume"):
        made_up(broken)


def test_another_gpu_is_measured_but_gives_no_advice(made_up):
    made = made_up(partial(slower, 2.0), machine=SXM | {"device": "NVIDIA A100", "multiprocessors": 108})
    assert "compare two machines" in made["summary"]["notes"][0]
    assert made["summary"]["advice"].startswith("Change no assumption")


def test_other_tiles_than_predicted_say_nothing_of_the_factor(made_up):
    def renamed(twin):
        whole, launches = of_speed(1.25, twin)
        return whole, [TimedLaunch(f"another {launch.name}", launch.timing) for launch in launches]

    found = made_up(renamed)["summary"]
    assert found["factor"] is None and found["copy"] is None
    assert found["notes"][0].startswith("Kernels other than predicted") and "No measured launch" in found["advice"]


def test_without_a_gpu_or_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        measured.main(["--out", str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measured.smi("clocks.sm") is None and measured.clock() is None


def test_make_gpu_calls_it(tmp_path):
    (step,) = [step for step in gpu.steps(tmp_path, resume=True) if step.name == "measured"]
    options = measured.arguments(step.command[3:])
    assert options.out == tmp_path and options.resume and options.predicted.is_file()


CASE = Case("sentences", 2, 1, 16, D=16, dropout_p=0.1, backward=False)
TRAINED = replace(CASE, backward=True)
SMALL = {
    "attention": partial(attention_case, CASE, False),
    "norm": partial(row_case, partial(rows.norm_forward, 64, True, rows=3)),
    "gradients of norm": partial(row_case, partial(rows.norm_backward_of, 64, True, rows=3)),
    "dropout": partial(row_case, partial(rows.dropout_forward, 64, rows=3)),
    "cross_entropy": partial(row_case, partial(rows.loss_rows, vocabulary=40, rows=3)),
}


@pytest.fixture
def on_the_emulator(monkeypatch):
    """Time a small case as on a GPU, but in the emulator, which runs every call once."""

    def once(calls, seconds):
        return {name: (call(), same(1e-5 * (1 + len(name))))[1] for name, call in calls.items()}

    monkeypatch.setattr(harness, "interleaved", once)

    def run(name):
        with emulated_backend(80) as found:
            launched = PredictedLaunch("", Range(1.0, 2.0), 1e-5, 0.0, 0, 1.0)
            twin = Twin(name, (launched,) * len(SMALL[name]("cpu")), SMALL[name])
            whole, launches = measured.timed(twin, "cpu")
            assert not found.findings
            return comparison.entry(twin, whole, launches)

    return run


@pytest.mark.parametrize("name", SMALL)
def test_a_small_case_from_its_tensors_to_its_times(on_the_emulator, name):
    """Every result is NaN before and finite afterwards."""
    e = on_the_emulator(name)
    assert e["measured"] == asdict(same(5e-5)) and not e["inside"]
    kinds = {"gradients of norm": ["norm backward", "sum of"]}
    for kind, launch in zip(kinds.get(name, [name.split()[0]]), e["launches"], strict=True):
        assert kind in launch["name"] and launch["measured"]["median"] > 0 and not launch["as_predicted"]


def test_a_result_that_was_not_written_gets_no_time(on_the_emulator, monkeypatch):
    monkeypatch.setattr(measured, "run", lambda launches, on: None)
    with pytest.raises(RuntimeError, match="not finite"):
        on_the_emulator("dropout")


def test_tensors_are_counted_once():
    launches = attention_case(TRAINED, True, "cpu")
    tokens = int(CASE.key_lengths().sum())
    of_halves = [t for t in measured.storages(launches) if t.dtype == CASE.dtype]
    assert len(of_halves) == 8  # q, k, v, out and their gradients
    assert all(t.numel() == tokens * CASE.H * CASE.D for t in of_halves)


def test_what_is_compiled_before_is_not_compiled_again(monkeypatch, tmp_path):
    """Triton finds the kernel in its cache at the launch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compile_case(SMALL["dropout"])
    before = sorted(tmp_path.iterdir())
    with emulated_backend(90):
        on_device = SMALL["dropout"]("cpu")
        measured.run(on_device, measured.storages(on_device)[0])
    assert before and sorted(tmp_path.iterdir()) == before
