"""Small calls on the compiled Triton kernels, in the emulator. ``nox -s lab`` runs all of them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled", allow_module_level=True)

from lab import ptx_emulator
from lab.emulation import cases as emulation_cases
from lab.emulation import emulated_backend, emulated_cuda, mutant_runs, record, run
from lab.ptx_emulator import judge, mutants

import transformer_fast as tfast
from tests.support.cuda_sources import nvcc
from transformer_fast import backends
from transformer_fast.triton.launch_cache import launch_cache

NORM = "norm bf16 layer 37x20, residual, dropout"
LOSS = "loss bf16 70x40, vocabulary 50"
ATTENTION = "attention bf16 lengths, causal, dropout"
FACTOR_IN_REGISTERS = "packed bf16 relative, softcap"  # arithmetic for it moved below a wgmma.fence


CALLS = [(80, name) for name in emulation_cases.QUICK] + [(90, name) for name in (ATTENTION, NORM, FACTOR_IN_REGISTERS)]


@pytest.mark.parametrize(("arch", "name"), CALLS)
def test_a_call_holds_the_gate_without_a_finding(arch, name):
    outcome = run.run_case(name, arch)
    assert outcome.passed, run.described(outcome)
    assert 0.0 < outcome.worst <= 1.0 and outcome.results > 0
    assert outcome.launches >= len(outcome.kernels) > 0 < outcome.instructions


@pytest.mark.skipif(nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("name", emulation_cases.QUICK_CUDA)
def test_a_call_of_cuda_kernels_holds_the_gate_without_a_finding(name):
    outcome = run.run_case(name, 80)
    assert outcome.passed, run.described(outcome)
    assert outcome.launches > 0 and outcome.kernels


@pytest.mark.skipif(nvcc() is None, reason="there is no nvcc on this machine")
def test_quick_calls_launch_every_cuda_kernel():
    launched = {kernel for name in emulation_cases.QUICK_CUDA for kernel in run.run_case(name, 80).kernels}
    assert launched == emulated_cuda.all_kernels() and len(launched) == 6


@pytest.mark.skipif(nvcc() is None, reason="there is no nvcc on this machine")
def test_a_cuda_kernel_that_reads_other_memory_is_seen():
    """A tensor made outside is memory that nobody gave to the kernel."""
    ids = torch.tensor([[0, 1, 2]])
    with emulated_cuda.emulated_cuda(80) as (operators, report, _):
        weight = torch.ones(3, 20)
        assert torch.equal(operators.embed(ids + 0, weight, None, 2.0, 0, None, None, 0.0, None, True)[0], 2 * weight)
        assert not report.findings
        operators.embed(ids, weight, None, 2.0, 0, None, None, 0.0, None, True)  # these ids were made outside
        assert {finding.kind for finding in report.findings} == {"global access out of bounds"}


def test_two_runs_agree_bit_for_bit():
    outcome = run.run_case(LOSS, 80, ("lockstep", "lockstep", "serial"))
    assert outcome.passed, run.described(outcome)


def faulty(monkeypatch: pytest.MonkeyPatch, kind: str, within: str) -> run.Outcome:
    """Run a call whose kernels lack all instructions of a kind, and return what comes of it."""

    def without(ptx: str) -> str:
        every = mutants.mutants(mutants.RecordedLaunch(ptx, (1, 1, 1), 32, 0, ()))
        for mutant in reversed([m for m in every if m.kind == kind and within in m.instruction]):
            ptx = mutant.of(ptx)
        return ptx

    backend = functools.partial(emulated_backend.emulated_backend, mutate=without)
    monkeypatch.setattr(run, "emulated_backend", backend)
    return run.run_case(LOSS, 80, ("lockstep",))


def test_a_wrong_result_fails(monkeypatch):
    """A result that a kernel should have written is still NaN."""
    outcome = faulty(monkeypatch, "store", "global")
    assert not outcome.passed and "AssertionError" in outcome.error
    assert outcome.error in run.described(outcome) and f"--only {LOSS!r}" in run.described(outcome)


def test_a_finding_fails_although_the_result_is_right(monkeypatch):
    """All warps run in step: nothing goes wrong without barriers, but their shared memory is a race."""
    outcome = faulty(monkeypatch, "barrier", "")
    assert outcome.error is None and outcome.findings and not outcome.passed


def test_other_bits_in_another_order_fail(monkeypatch):
    case = emulation_cases.EmulationCase("drawn", lambda: run.verification.errors(*torch.rand(3, 4)), True)
    monkeypatch.setattr(run, "cases", lambda *_: {"drawn": case})
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    assert "other bits" in run.run_case("drawn", 80).error


def test_a_case_that_launches_nothing_fails(monkeypatch):
    case = emulation_cases.EmulationCase("nothing", lambda: None)
    monkeypatch.setattr(run, "cases", lambda *_: {"nothing": case})
    assert "no kernel was launched" in run.run_case("nothing", 80).error


def test_everything_is_as_before_afterwards():
    before = backends._obstacle, launch_cache.enabled, tfast.backends.current(), emulated_backend.launcher.run
    with emulated_backend.emulated_backend(80):
        assert tfast.backends.current() == "triton" and not launch_cache.enabled
    assert before == (
        backends._obstacle,
        launch_cache.enabled,
        tfast.backends.current(),
        emulated_backend.launcher.run,
    )
    with pytest.raises(backends.BackendError), tfast.backend("triton"):
        tfast.layer_norm(torch.zeros(2, 8), None, None)


def test_names_of_cases():
    cases = emulation_cases.cases()
    cuda = emulation_cases.QUICK_CUDA if nvcc() else ()
    assert {*emulation_cases.QUICK, *emulation_cases.MUTATED, *cuda} <= set(cases)
    assert set(emulation_cases.cases(5, 3)) == {*cases, "random 5 0", "random 5 1", "random 5 2"}


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    """Cases that passed are not run again. Failed ones are, and those left open by a damaged line or other kernels."""
    wrong, ran = {"dropout bf16 5x64"}, []

    def run_case(name, arch, *_):
        ran.append(name)
        return run.Outcome(name, arch, kernels=["k"], error="wrong" if name in wrong else None)

    @contextlib.contextmanager
    def pool(workers):
        with ThreadPoolExecutor(workers) as executor:
            yield executor

    monkeypatch.setattr(run, "run_case", run_case)
    monkeypatch.setattr(run, "pool", pool)
    path = tmp_path / "kept" / "passed.jsonl"

    def emulate(*flags):
        ran.clear()
        flags = ("--only", "dropout bf16 5x64*", "--arch", "80", "--continue", str(path), *flags)
        monkeypatch.setattr(sys, "argv", ["emulation", *flags])
        return run.main(), sorted(ran)

    names = ["dropout bf16 5x64", "dropout bf16 5x64, bias, ReLU", "dropout bf16 5x64, bias, residual"]
    assert emulate() == (1, names)
    assert emulate() == (1, names[:1])
    wrong.clear()
    assert emulate() == (0, names[:1])
    capsys.readouterr()
    assert emulate() == (0, []) and "3 cases have passed before" in capsys.readouterr().out
    assert emulate("--seed", "1") == (0, names)
    path.write_text(path.read_text()[:-20])
    assert len(emulate("--seed", "1")[1]) == 1 and emulate("--seed", "1") == (0, [])
    monkeypatch.setattr(record, "state", lambda: "kernels of another day")
    assert emulate("--seed", "1") == (0, names)


def test_the_state_of_a_record_is_that_of_kernels_and_cases():
    files = {str(path.relative_to(record.ROOT)) for pattern in record.DECISIVE for path in record.ROOT.glob(pattern)}
    assert {
        *("transformer_fast/triton/attention/backward_q.py", "transformer_fast/reference/attention.py"),
        *("tools/lab/ptx_emulator/codegen.py", "tools/lab/emulation/cases.py", "transformer_fast/masks/parts.py"),
    } <= files
    assert all(any(record.ROOT.glob(pattern)) for pattern in record.DECISIVE)


def test_a_kernel_that_no_case_launches_is_named():
    kernels = sorted(run.all_kernels())
    outcomes = [run.Outcome("first", 80, kernels=kernels[:5]), run.Outcome("second", 80, kernels=kernels[4:-1])]
    assert run.never_launched(outcomes) == set(kernels[-1:])
    assert f"{len(kernels) - 1} of {len(kernels)} kernels" in run.summary(outcomes, 60.0)


PTX = """
.version 8.7
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 .ptr .global .align 1 a)
{
	.reg .pred %p<2>; // a comment; of two parts
	.loc	1 18 9 // add.py:18:9
	bar.sync 	0;
	// begin inline asm
	@%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
	// end inline asm
$L__1: @!%p0 bra $L__1;
	cp.async.cg.shared.global [ %r3 + 0 ], [ %rd1 + 0 ], 0x10, %r4;
	cp.async.wait_group 	0x0;
	{ st.shared.b32 [ %r1 ], %r2; bar.warp.sync 0xffffffff; }
	ret;
}
"""


def test_the_mutants_of_a_text():
    launch = mutants.RecordedLaunch(
        PTX,
        (1, 1, 1),
        32,
        0,
        (ptx_emulator.Argument("a", "*fp32", torch.zeros(3)), ptx_emulator.Argument("n", "i32", 3)),
    )
    found = mutants.mutants(launch)
    assert [(m.kind, m.line, m.instruction) for m in found] == [
        ("barrier", 9, "bar.sync 0"),
        ("guard", 11, "@%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ]"),
        ("guard", 14, "cp.async.cg.shared.global [ %r3 + 0 ], [ %rd1 + 0 ], 0x10, %r4"),
        ("cp.async wait", 15, "cp.async.wait_group 0x0"),
        ("store", 16, "st.shared.b32 [ %r1 ], %r2"),
        (mutants.SHORT, 0, "a"),
    ]
    texts = [m.of(PTX) for m in found]
    assert "bar.sync" not in texts[0] and "\tld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];" in texts[1]
    assert "0x10;" in texts[2] and "wait_group" not in texts[3] and "{  bar.warp.sync" in texts[4] and texts[5] == PTX
    shorter = mutants.shortened(launch.arguments, 0)
    assert shorter[0].value.numel() == 2 and shorter[1] is launch.arguments[1]


@pytest.fixture(scope="module")
def recorded():
    """The launches of a norm and a loss, each with its judge."""
    found = []
    for name in (NORM, LOSS):
        with emulated_backend.emulated_backend(80), mutants.recorded() as launches:
            emulation_cases.cases()[name].check()
        found += [judge.Judge(launch) for launch in launches if launch.kernel != "_backward_kernel"]
    return found


def of_effect(own: judge.Judge, kind: str) -> list[mutants.Mutant]:
    idle = own.idle_mutants()
    return [mutant for mutant in own.executed_mutants() if mutant.kind == kind and mutant not in idle]


@pytest.mark.parametrize(("kind", "which"), [("barrier", 1), ("guard", 1), ("store", 0), (mutants.SHORT, 1)])
def test_faults_are_seen(recorded, kind, which):
    verdicts = [own.verdict(of_effect(own, kind)[which]) for own in recorded]
    assert len(verdicts) == 3 and all(verdict.seen for verdict in verdicts), verdicts


def test_waits_for_copies_are_seen():
    with emulated_backend.emulated_backend(80), mutants.recorded() as launches:
        emulation_cases.cases()[ATTENTION].check()
    own = judge.Judge(next(launch for launch in launches if "wait_group" in launch.ptx))
    waits = of_effect(own, "cp.async wait")
    assert waits and any(own.verdict(wait).seen for wait in waits)


def test_what_changes_nothing_is_not_seen(recorded):
    """Run stores of the loss whose guard keeps every lane out."""
    idle = recorded[-1].idle_mutants()
    assert len(idle) > 2 and {mutant.kind for mutant in idle} == {"store"}, idle
    assert len(of_effect(recorded[-1], "store")) > 2
    for mutant, reason in idle.items():
        verdict = recorded[-1].verdict(mutant, ("lockstep",))
        assert not verdict.seen and not verdict.noted, (mutant, reason, verdict)


def test_the_sample_of_mutants_is_a_function_of_the_seed(recorded):
    launches = [mutant_runs.recorded(own.launch) for own in recorded]
    first, again, other = (mutant_runs.sampled(launches, seed) for seed in (1, 1, 2))
    assert first == again != other
    everything = [launch.mutants for launch in launches]
    assert mutant_runs.sampled(launches, None) == everything
    assert all(set(some) <= set(own) for some, own in zip(first, everything, strict=True))


def test_the_summary_counts_every_mutant(recorded):
    """Each mutant that was made is left out for one reason, or run."""
    launch = mutant_runs.recorded(recorded[-1].launch)
    made = [mutant.kind for mutant in mutants.mutants(recorded[-1].launch)]
    assert len(made) == launch.left_out.total() + len(launch.mutants)
    verdicts = [
        judge.Verdict("kernel", "guard", 3, "@%p1 st", True, "wrong result"),
        judge.Verdict("kernel", "guard", 4, "@%p2 st", False, "it makes no difference"),
    ]
    outcome = mutant_runs.Outcome(Counter(made), launch.left_out, verdicts)
    said = mutant_runs.mutant_summary({90: outcome}, 30.0)
    total = next(line for line in said.splitlines() if line.split()[0] == "all").split()
    executed = len(recorded[-1].executed_mutants())
    assert total[1:] == [*map(str, (len(made), executed, len(launch.mutants), 2, 1)), "50%", "0"]
    assert "its guard keeps every lane out" in said and "it makes no difference" in said
    assert "1 of 2 mutants seen" in said and mutant_runs.seen_share(verdicts) == 0.5


PARENT = """
import os, time
from lab.emulation import run

if __name__ == "__main__":
    with run.pool(1) as executor:
        print(executor.submit(os.getpid).result(), flush=True)
        executor.submit(time.sleep, 600).result()
"""


def test_processes_end_with_their_parent(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": f"{record.ROOT}{os.pathsep}{record.ROOT / 'tools'}"}
    with subprocess.Popen([sys.executable, str(program)], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
        parent.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("a process of the pool outlived the one that was killed")
