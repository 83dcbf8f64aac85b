"""Tools of the Makefile: setup with progress, and the parts of the tests with one verdict."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import arm_check
import progress
import pytest
import pythons
import run_tests

TOOLS = Path(__file__).resolve().parents[2] / "tools"


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
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
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
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_red.py").write_text("def test_red(): assert False\ndef test_green(): pass\n")
    (tmp_path / "test_green.py").write_text("import os\ndef test_green(): assert os.environ['MARK'] == '1'\n")
    skipping = "import pytest\n@pytest.mark.parametrize('a', range(3))\ndef test_it(a): pytest.skip('no unit')\n"
    (tmp_path / "test_skipping.py").write_text(skipping)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    support = str(TOOLS.parent / "tests" / "support")
    plugin = {"PYTHONPATH": support, "PYTEST_PLUGINS": "short_list", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    here = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]

    def part(name: str, **variables: str) -> object:
        return run_tests.Part(name, [*here, str(tmp_path / f"test_{name}.py")], {**plugin, **variables}, counted=True)

    lint = run_tests.Part("lint", [sys.executable, "-c", "print('line too long'); raise SystemExit(2)"])
    red, green, skipped = part("red"), part("green", MARK="1"), part("skipping")
    assert run_tests.run_all([lint, red, green, skipped]) == 1
    output, verdict = capfd.readouterr().out.split("== verdict\n")
    assert "line too long" in output and "short test summary info" in output, "what each said stays on the screen"
    lines = [" ".join(line.split()) for line in verdict.splitlines()]
    assert lines[0].startswith("lint FAILED (2)")
    assert lines[1].startswith("red FAILED (1)") and lines[1].endswith("1 passed, 1 failed")
    assert lines[2].startswith("green passed") and lines[2].endswith("1 passed")
    assert lines[3].startswith("skipping passed") and lines[3].endswith("0 passed, 3 skipped")
    assert lines[4:] == ["skipped, because this machine lacks what they need:", "3 no unit", "FAILED: lint, red"]

    assert run_tests.run_all([green]) == 0
    assert capfd.readouterr().out.endswith("\nall passed\n")


def test_a_part_that_ends_before_its_tests_do_is_red(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counts = {**run_tests.NOTHING, "passed": 3, "collected": 5}
    cut = f"import pathlib, sys; pathlib.Path(sys.argv[1].partition('=')[2]).write_text({json.dumps(counts)!r})"
    assert run_tests.run_all([run_tests.Part("cut", [sys.executable, "-c", cut], counted=True)]) == 1
    assert "3 passed; 2 ended without a result\nFAILED: cut" in capfd.readouterr().out
    assert run_tests.run_all([run_tests.Part("silent", [sys.executable, "-c", ""], counted=True)]) == 1


def test_the_parts_of_make_test(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_once = functools.cache(run_tests.other_instruction_sets)
    monkeypatch.setattr(run_tests, "other_instruction_sets", asked_once)
    short, every = ({part.name: part for part in run_tests.parts("2", None, all_)} for all_ in (False, True))
    assert list(every) == [*short, "tools"] and {"lint", "tests", "interpreter"} <= short.keys()
    assert short["interpreter"].environment == {"TRITON_INTERPRET": "1"}
    assert "--all" in every["tests"].command and "--all" not in short["tests"].command
    for pattern in run_tests.KERNEL_TESTS:
        assert list(TOOLS.parent.glob(pattern)), pattern
    wheel = run_tests.parts("2", "baseline", False)[-1]
    assert wheel.environment == {"TRANSFORMER_FAST_TEST_WHEEL": "baseline"} and "-n" not in wheel.command


def test_arm_check_compiles_as_setup_does() -> None:
    flags = arm_check.kernel_flags((TOOLS.parent / "setup.py").read_text())
    assert {"-std=c++20", "-O3", "-fopenmp", "-ffp-contract=off"} <= set(flags)


def test_rows_of_pythons_are_those_of_ci_and_of_the_page_on_installing() -> None:
    names = [row.name for row in pythons.rows(["3.11", "3.12", "3.13"])]
    pinned = re.search(r"^torch==(.*)$", (TOOLS.parent / "requirements.txt").read_text(), re.MULTILINE).group(1)
    assert names[:3] == [f"python3.{minor}-torch{pinned}" for minor in (11, 12, 13)]
    assert names[3:] == [f"python3.11-torch{pythons.NEWEST_TORCH}", "python3.12-torch2.11"]
    workflow = (TOOLS.parent / ".github/workflows/ci.yml").read_text()
    rows = re.findall(r'\{ python: "(.*)", torch: "(.*)" \}', workflow)
    assert [f"python{python}-torch{torch}" for python, torch in rows] == names
    page = (TOOLS.parent / "docs" / "install.md").read_text()
    table = page.partition("## What is supported")[2].partition("## ")[0]
    for version in ("3.11", "3.12", "3.13", pinned.rpartition(".")[0], "2.11", pythons.NEWEST_TORCH):
        assert version in table, version


def test_a_row_of_pythons_has_its_versions_and_the_pins() -> None:
    pinned, _, oldest = pythons.rows(["3.12"])
    assert oldest.packages == ("torch==2.11.*", "triton==3.6.*")
    assert pythons.OLDER["numpy"] in pythons.others(oldest) and pythons.OLDER["numpy"] not in pythons.others(pinned)
    assert set(pythons.others(pinned)) <= set(pythons.requirements()) and len(pythons.others(pinned)) > 10
    for name in (*pythons.TESTS, *pythons.INTERPRETED):
        assert (TOOLS.parent / name).exists(), name
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert version in pythons.pythons()
