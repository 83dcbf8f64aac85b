"""What `make` runs: the set-up that is never silent, and the parts of the tests with their one verdict."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def progress() -> ModuleType:
    return tool("progress")


@pytest.fixture
def run_tests() -> ModuleType:
    return tool("run_tests")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


BUILD = """
import sys, time
print("transformer_fast: CPU kernels only (because)")
print("running build_ext")
print("[1/12] c++ -MMD -MF /x/build/a.o.d -I/x/csrc -c -c /x/csrc/cpu/a.cpp -o /x/a.o", flush=True)
time.sleep(0.5)
print("Collecting numpy==2.0 (from -r requirements.txt (line 4))")
print("error: x", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_progress_shows_steps_and_is_never_silent(
    progress: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    monkeypatch.setattr(progress, "QUIET", 0.1)
    assert progress.main(["build", sys.executable, "-c", BUILD, str(code)]) == code
    lines = capfd.readouterr().out.splitlines()
    shown = ("   transformer_fast: CPU kernels only (because)", "   [1/12] csrc/cpu/a.cpp", "   Collecting numpy==2.0")
    assert [line for line in lines if line in shown] == list(shown)
    assert any(line.startswith("   ... ") for line in lines[lines.index(shown[1]) : lines.index(shown[2])])
    assert ("running build_ext" in lines) == ("error: x" in lines) == (code == 3), "all of it, if it failed"
    assert lines[-1].startswith("build: " + ("done" if code == 0 else "failed with exit code 3"))


def test_every_part_runs_and_one_red_one_makes_the_verdict_red(
    run_tests: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_red.py").write_text("def test_red(): assert False\ndef test_green(): pass\n")
    (tmp_path / "test_green.py").write_text("import os\ndef test_green(): assert os.environ['MARK'] == '1'\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    pytest_here = [sys.executable, "-m", "pytest", "--color=yes", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    red = run_tests.Part("red", [*pytest_here, str(tmp_path / "test_red.py")])
    green = run_tests.Part("green", [*pytest_here, str(tmp_path / "test_green.py")], {"MARK": "1"})
    lint = run_tests.Part("lint", [sys.executable, "-c", "print('line too long'); raise SystemExit(2)"])

    assert run_tests.run_all([lint, red, green]) == 1
    output, verdict = capfd.readouterr().out.split("== verdict\n")
    assert "line too long" in output and "short test summary info" in output, "what each said stays on the screen"
    lines = verdict.splitlines()
    assert lines[0].split()[:3] == ["lint", "FAILED", "(2)"]
    assert lines[1].split()[:3] == ["red", "FAILED", "(1)"] and "1 failed, 1 passed in " in lines[1]
    assert lines[2].split()[:2] == ["green", "passed"] and "1 passed in " in lines[2]
    assert lines[3] == "FAILED: lint, red"

    assert run_tests.run_all([green]) == 0
    assert capfd.readouterr().out.endswith("\nall passed\n")


def test_make_test_consists_of_lint_the_suite_and_the_interpreter(run_tests: ModuleType) -> None:
    parts = {part.name: part for part in run_tests.parts("2", wheel="")}
    assert list(parts)[:1] == ["lint"] and {"kernels", "others", "interpreter"} <= parts.keys()
    assert parts["interpreter"].environment == {"TRITON_INTERPRET": "1"}
    kernels = [argument for argument in parts["kernels"].command if argument.endswith(".py")]
    assert len(kernels) > 10 and {f"--ignore={path}" for path in kernels} <= set(parts["others"].command), "none twice"
    wheel = run_tests.parts("2", wheel="baseline")[-1]
    assert wheel.environment == {"TRANSFORMER_FAST_TEST_WHEEL": "baseline"} and "-n" not in wheel.command


def test_parts_share_the_minutes_and_what_is_left_of_them(
    run_tests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = {"lint": 7, "tests": 5, "interpreter": 40, "last": 1}
    clock, given = [0.0], []

    def run(part: object) -> tuple[int, str]:
        given.append(part.command[1:])
        clock[0] += 60 * took[part.name]
        return 0, ""

    monkeypatch.setattr(run_tests, "run", run)
    monkeypatch.setattr(run_tests.time, "monotonic", lambda: clock[0])
    shares = zip(took, (0, 3, 1, 1), strict=True)
    todo = [run_tests.Part(name, ["x"], share=share) for name, share in shares]
    assert run_tests.run_all(todo, minutes=20) == 0
    assert given == [[], ["--minutes=12.00"], ["--minutes=7.50"], ["--minutes=0.00"]]
    assert all(part.command == ["x"] for part in todo)


REPORT = """
tests/test_norm.py .......csrc/cpu/norm/forward.cpp:17:58: runtime error: shift exponent 32 is too large for type int
    #0 0x7f in norm csrc/cpu/norm/forward.cpp:17
    #1 0x7f  (/lib/libffi.so.8+0x6f79)

.... 12 passed in 3.00s
"""


def test_reports_of_both_sanitizers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    sanitize = tool("sanitize")
    assert sanitize.found_reports(".... 12 passed in 3.00s", tmp_path) == ""
    assert sanitize.found_reports(REPORT, tmp_path) == REPORT.strip().partition("\n\n")[0]
    (tmp_path / "report.1").write_text("AddressSanitizer: heap-buffer-overflow")
    assert sanitize.found_reports("", tmp_path) == "AddressSanitizer: heap-buffer-overflow"
    assert sanitize.SUMMARY.findall(REPORT) == ["12 passed in 3.00s"]


def test_arm_check_compiles_as_setup_does() -> None:
    flags = tool("arm_check").kernel_flags((TOOLS.parent / "setup.py").read_text())
    assert {"-std=c++20", "-O3", "-fopenmp", "-ffp-contract=off"} <= set(flags)


def test_rows_of_pythons_are_those_of_ci_and_of_readme() -> None:
    pythons = tool("pythons")
    names = [row.name for row in pythons.rows(["3.11", "3.12", "3.13"])]
    pinned = re.search(r"^torch==(.*)$", (TOOLS.parent / "requirements.txt").read_text(), re.MULTILINE).group(1)
    assert names[:3] == [f"python3.{minor}-torch{pinned}" for minor in (11, 12, 13)]
    assert names[3:] == [f"python3.11-torch{pythons.NEWEST_TORCH}", "python3.12-torch2.11"]
    workflow = (TOOLS.parent / ".github/workflows/ci.yml").read_text()
    rows = re.findall(r'\{ python: "(.*)", torch: "(.*)" \}', workflow)
    assert [f"python{python}-torch{torch}" for python, torch in rows] == names
    readme = (TOOLS.parent / "README.md").read_text()
    table = readme.partition("## What is supported")[2].partition("## ")[0]
    for version in ("3.11", "3.12", "3.13", pinned.rpartition(".")[0], "2.11", pythons.NEWEST_TORCH):
        assert version in table, version


def test_a_row_of_pythons_has_its_versions_and_the_pins() -> None:
    pythons = tool("pythons")
    pinned, _, oldest = pythons.rows(["3.12"])
    assert oldest.packages == ("torch==2.11.*", "triton==3.6.*")
    assert pythons.OLDER["numpy"] in pythons.others(oldest) and pythons.OLDER["numpy"] not in pythons.others(pinned)
    assert set(pythons.others(pinned)) <= set(pythons.requirements()) and len(pythons.others(pinned)) > 10
    for name in pythons.TESTS:
        assert (TOOLS.parent / f"tests/test_{name}.py").exists(), name
    for name in pythons.INTERPRETED:
        assert (TOOLS.parent / f"tests/interpreter/test_{name}.py").exists(), name
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert version in pythons.pythons()


def test_a_copy_for_a_row_keeps_its_build_and_loses_deleted_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pythons = tool("pythons")
    checkout, tree = tmp_path / "checkout", tmp_path / "tree"
    for file in ("setup.py", "csrc/a.cpp", "build/own", "transformer_fast/_C.so", "benchmarks/results/a", "results/b"):
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).touch()
    (tree / "build").mkdir(parents=True)
    for file in ("deleted.py", "build/kept"):
        (tree / file).touch()
    monkeypatch.setattr(pythons, "ROOT", checkout)
    pythons.copy_sources(tree)
    copied = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert copied == {"setup.py", "csrc/a.cpp", "build/kept", "benchmarks/results/a"}


def test_only_kernels_newer_than_their_sources_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pythons = tool("pythons")
    source, compiled = tmp_path / "csrc/cpu/a.cpp", tmp_path / "build/temp.x/transformer_fast._cpu_avx2/csrc/cpu/a.o"
    for file in (source, compiled):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(pythons, "ROOT", tmp_path)
    for age, usable in ((10, True), (-10, False)):
        written = source.stat().st_mtime + age
        os.utime(compiled, (written, written))
        assert (pythons.kernel_objects(tmp_path / "build") is not None) is usable
    assert pythons.kernel_objects(tmp_path) is None
