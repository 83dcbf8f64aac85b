"""``make gpu`` with small steps: order, time limits, record, and continuation after an interrupt."""

import importlib.util
import json
import signal
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import gpu
import pytest
from gpu import ROOT, Step
from quick.record import Kernels


def small(name, code, limit=60.0, **options):
    return Step(name, limit, [sys.executable, "-c", code], **options)


SMALL = [
    small("info", "print('an H100')"),
    small("verify", "import sys; print('one is wrong'); sys.exit(3)"),
    small("measured", "print('never')", needs=("json", "xdist_of_nowhere")),
    small(
        "tests", "import os; print(os.environ['TOLD'], os.environ.get('TRITON_INTERPRET'))", environment={"TOLD": "yes"}
    ),
]


@pytest.fixture
def visit(tmp_path, monkeypatch, capsys):
    """Run make gpu on steps; return its summary by step, and its output."""

    def run(todo, *options, obstacle=None):
        monkeypatch.setattr(gpu, "steps", lambda out, resume=False, rehearse=False: todo)
        monkeypatch.setattr(gpu, "SHORTEST", 1)
        monkeypatch.setattr(gpu, "gpu_obstacle", lambda: obstacle)
        gpu.main(["--out", str(tmp_path), *options])
        summary = tmp_path / "summary.json"
        found = json.loads(summary.read_text()) if summary.exists() else []
        return {outcome["step"]: outcome for outcome in found}, capsys.readouterr().out

    return run


def test_every_step_is_reported_whatever_becomes_of_it(visit, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found, printed = visit(SMALL)
    assert {name: o["ended"] for name, o in found.items()} == {
        "info": "passed", "verify": "failed (exit status 3)", "measured": "skipped: not installed", "tests": "passed",
    }  # fmt: skip
    assert found["measured"]["last_line"] == "pip install xdist_of_nowhere"
    assert found["tests"]["last_line"] == "yes None"
    assert (tmp_path / "verify.log").read_text() == "one is wrong\n"
    assert "verify" in printed and "failed (exit status 3): one is wrong" in printed


WAITS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("written at the last moment", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def in_background():
    """Run a program as a shell runs one in the background, with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_step_over_its_limit_writes_what_it_has_and_leaves_no_process(visit, tmp_path, monkeypatch, in_background):
    monkeypatch.setattr(gpu, "GRACE", 2)
    found, _ = visit([small("tests", WAITS, 4), SMALL[0]])
    assert found["tests"]["ended"] == "stopped after its limit of 4 s" and found["info"]["ended"] == "passed"
    pid, last = (tmp_path / "tests.log").read_text().splitlines()
    assert last == found["tests"]["last_line"] == "written at the last moment"
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_without_a_gpu_the_first_line_says_so_and_only_a_rehearsal_goes_on(visit, tmp_path):
    with pytest.raises(SystemExit, match=r"^torch 2 sees no GPU: nothing was run.*--rehearse"):
        visit(SMALL, obstacle="torch 2 sees no GPU")
    assert not list(tmp_path.iterdir())
    found, printed = visit(SMALL[:1], "--rehearse", obstacle="torch 2 sees no GPU")
    assert list(found) == ["info"]
    assert printed.splitlines()[0].startswith("torch 2 sees no GPU: a rehearsal")
    _, printed = visit(SMALL[:1], "--rehearse")
    assert printed.splitlines()[0] == "info ..."


def test_a_gpu_is_asked_of_the_torch_that_runs_the_steps(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (package / "__init__.py").write_text("raise ImportError('no libcudart')")
    assert gpu.gpu_obstacle() == "torch cannot be imported (ImportError: no libcudart)"
    for count, expected in ((0, "torch 2.13.0+cpu sees no GPU on this machine"), (2, None)):
        (package / "__init__.py").write_text("__version__ = '2.13.0+cpu'\nfrom . import cuda")
        (package / "cuda.py").write_text(f"def device_count(): return {count}  #{count * ' more'}")
        assert gpu.gpu_obstacle() == expected


def test_resume_runs_what_is_left(visit, monkeypatch):
    found, printed = visit(SMALL, "--budget", "6")  # less than the grace of one step
    assert found == {} and "no time for: info, verify, measured, tests" in printed
    found, _ = visit(SMALL, "--only", "verify", "info")
    assert list(found) == ["info", "verify"]
    broken = [replace(step, command=[sys.executable, "-c", "raise SystemExit(5)"]) for step in SMALL[:2]]
    found, printed = visit([*broken, *SMALL[2:]], "--resume")
    assert [o["ended"] for o in found.values()][:2] == ["passed", "failed (exit status 3)"]
    assert set(found) == {step.name for step in SMALL} and "info ..." not in printed
    found, printed = visit([*broken, *SMALL[2:]], "--only", "info")
    assert found["info"]["ended"] == "failed (exit status 5)" and "info ..." in printed


def test_what_a_step_prints_is_seen_at_once_and_kept(visit, tmp_path):
    _, printed = visit([small("info", "print('first', flush=True); print('second')")])
    assert "info ...\n   first\n   second\n" in printed
    assert (tmp_path / "info.log").read_text() == "first\nsecond\n"


def test_a_smoke_in_which_nothing_works_ends_the_run(visit, capsys):
    smoke = small("smoke", "raise SystemExit(3)", decides=True)
    found, printed = visit([smoke, SMALL[0]])
    assert list(found) == ["smoke"] and "nothing works here" in printed and "no time for: info" in printed


def test_a_step_that_was_cut_goes_on_and_a_finished_one_does_not(visit):
    cut = small("parity", f"raise SystemExit({gpu.CUT})", resumes=True)
    found, _ = visit([cut, SMALL[0]])
    assert found["parity"]["stopped"] and not found["info"]["stopped"]
    _, printed = visit([cut, SMALL[0]], "--resume")
    assert "parity ..." in printed and "info ..." not in printed


def test_a_step_gets_its_time_and_the_budget_holds(visit):
    told = small("parity", "import sys; print(sys.argv[1])")
    told = replace(told, command=[*told.command, "{seconds}"])
    found, _ = visit([told], "--budget", "40")
    assert 15 <= int(found["parity"]["last_line"]) <= 40 - gpu.GRACE - 3
    found, _ = visit([told])
    assert found["parity"]["last_line"] == "57"  # its limit, less what it takes to end


def test_kernels_are_compiled_only_if_the_smoke_found_some_missing(visit, tmp_path):
    then = small("compile", "print('compiled')", after=gpu.MOST_COMPILED)
    cases = {str(Kernels(9, 2)): ["smoke"], str(Kernels(2, 9)): ["smoke", "compile"]}
    for said, names in cases.items():
        found, printed = visit([small("smoke", f"print({said!r})"), then])
        assert list(found) == names and "no time" not in printed


def test_one_archive_holds_what_is_known(visit, tmp_path):
    archive = tmp_path / "back" / "results.tgz"
    visit(SMALL[:1], "--archive", str(archive))
    with tarfile.open(archive) as tar:
        assert {"results/info.log", "results/summary.json"} <= set(tar.getnames())


def test_the_cache_is_unpacked_where_it_was_made(visit, tmp_path, monkeypatch):
    made = tmp_path / "made" / "triton-cache"
    made.mkdir(parents=True)
    (made / "kernel.cubin").write_text("code")
    with tarfile.open(tmp_path / "cache.tgz", "w:gz") as tar:
        tar.add(made, made.name)
    monkeypatch.setattr(gpu, "CACHE", tmp_path / "there" / made.name)
    found, _ = visit(
        [small("info", "import os; print(os.environ['TRITON_CACHE_DIR'])")], "--cache", str(tmp_path / "cache.tgz")
    )
    assert (gpu.CACHE / "kernel.cubin").read_text() == "code" and found["info"]["last_line"] == str(gpu.CACHE)


def test_the_real_steps_are_programs_of_the_repository(tmp_path):
    names = []
    for step in gpu.steps(tmp_path):
        interpreter, *command = step.command
        names.append(step.name)
        assert interpreter == sys.executable and step.limit > 0
        if command[0] == "-m" and not command[1].startswith(("benchmarks", "tools")):
            assert importlib.util.find_spec(command[1])
        else:
            script = f"{command[1].replace('.', '/')}.py" if command[0] == "-m" else command[0]
            assert (ROOT / script).is_file()
        for ignored in (part.partition("=")[2] for part in command if part.startswith("--ignore=")):
            assert (ROOT / ignored).exists(), f"{ignored} is no test"
    assert names[:5] == ["build", "smoke", "compile", "parity", "headline"] and len(set(names)) == len(names)
    assert names.index("benchmarks") < names.index("report")
    assert "gpu.py --out $(RESULTS)" in (ROOT / "Makefile").read_text()
    assert all("cpu" in step.command for step in gpu.steps(tmp_path, rehearse=True) if step.name == "headline")


def test_commands_for_the_gpu_machine_are_short_and_understood(monkeypatch):
    from tools import gpu_prepare, stand_in_gpu

    assert gpu.CACHE == stand_in_gpu.CACHE
    lines = gpu_prepare.COMMANDS.splitlines()
    assert len(lines) == 2 and all(len(line) < 2000 for line in lines)
    for line in lines:
        program, script, *options = line.split()
        assert (program, script) == ("python3", "benchmarks/gpu.py")
        monkeypatch.setattr(gpu, "gpu_obstacle", lambda: "torch sees no GPU")
        with pytest.raises(SystemExit, match="nothing was run"):  # options that are unknown end otherwise
            gpu.main(options)


def test_only_the_entries_of_this_run_are_packed(tmp_path):
    """The cache keeps the kernels of earlier sources, and the archive must travel."""
    from tools import gpu_prepare

    cache = tmp_path / "cache"
    for entry in ("used", "earlier"):
        (cache / entry).mkdir(parents=True)
        for name in ("kernel.cubin", "kernel.source"):
            (cache / entry / name).write_text(name)
    (cache / gpu_prepare.USED).write_text("used\nused\nnever made\n")
    gpu_prepare.pack(cache, tmp_path / "cache.tgz")
    with tarfile.open(tmp_path / "cache.tgz") as tar:
        assert sorted(tar.getnames()) == ["cache/used", "cache/used/kernel.cubin"]
