"""Tools of the Makefile: setup with progress, and the sessions of nox."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import arm_check
import progress
import pytest
import wheel_all
from pages import PAGES

import noxfile

ROOT = Path(__file__).resolve().parents[2]


BUILD = """
import sys, time
print("transformer_fast: CPU kernels only (because)")
print("running build_ext")
print("transformer_fast: cpu_avx2 [1/12] cpu/a.cpp", flush=True)
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
    shown = tuple(
        f"   {line}"
        for line in (
            "transformer_fast: CPU kernels only (because)", "transformer_fast: cpu_avx2 [1/12] cpu/a.cpp",
            "Collecting numpy==2.0",
        )
    )  # fmt: skip
    assert [line for line in lines if line in shown] == list(shown)
    assert any(line.startswith("   ... ") for line in lines[lines.index(shown[1]) : lines.index(shown[2])])
    assert ("running build_ext" in lines) == ("error: x" in lines) == (code == 3), "all of it, if it failed"
    assert lines[-1].startswith("build: " + ("done" if code == 0 else "failed with exit code 3"))


def test_arm_check_compiles_as_setup_does() -> None:
    flags = arm_check.kernel_flags((ROOT / "setup.py").read_text())
    assert {"-std=c++20", "-O3", "-fopenmp", "-ffp-contract=off"} <= set(flags)


def test_sessions_of_nox_are_those_of_make_of_ci_and_of_the_page_on_installing() -> None:
    nox = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "--list", "--json", "-k", "not nothing"]
    listed = json.loads(subprocess.run(nox, capture_output=True, text=True, check=True).stdout)
    names = {session["name"] for session in listed}
    in_make = set(" ".join(re.findall(r"/nox -s ([a-z ]+)", (ROOT / "Makefile").read_text())).split())
    shown = set(" ".join(re.findall(r"nox -s (\w+)", "".join(page.read_text() for page in PAGES))).split())
    assert in_make <= names and names == in_make | shown | {"wheel"}, "a page names each session that make does not run"
    rows = [session for session in listed if session["name"] == "pythons"]
    (in_ci,) = re.findall(r"row: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert [f"pythons({row})" for row in in_ci.split(", ")] == [row["session"] for row in rows]
    table = (ROOT / "docs/install.md").read_text().partition("## What is supported")[2].partition("## ")[0]
    for row in rows:
        assert row["python"] in table and ".".join(row["call_spec"]["torch"].split(".")[:2]) in table


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there(path: Path) -> None:
    workflow = path.read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = re.findall(r"\bmake ([\w-]+)", workflow)
    sessions = re.findall(r'nox -s "?(\w+)', workflow)
    scripts = re.findall(r"run: (\S+/\S+)$|python (tools/\S+)", workflow, re.MULTILINE)
    assert made or sessions or scripts
    assert {*made} <= {*targets} and all(hasattr(noxfile, name) for name in sessions)
    assert all((ROOT / (first or second)).is_file() for first, second in scripts)


def test_what_sessions_run_is_there() -> None:
    for name in (*noxfile.KERNEL_TESTS, *noxfile.ROW_TESTS, *noxfile.ROW_INTERPRETED):
        assert list(ROOT.glob(name)), name


def test_the_row_of_the_oldest_torch_has_older_packages_and_all_others_the_pins() -> None:
    torches = dict.fromkeys(torch for _, torch in noxfile.rows())
    pinned, newest, oldest = map(noxfile.packages, torches)
    assert oldest[:2] == ["torch==2.11.*", "triton==3.6.*"] and noxfile.OLDER["numpy"] in oldest
    assert newest[0] == f"torch=={noxfile.NEWEST_TORCH}" and "triton" not in " ".join(newest)
    assert set(pinned) <= {*noxfile.pinned().values()} and len(pinned) > 10


def test_the_newest_torch_is_in_the_wheel_and_on_the_page() -> None:
    assert wheel_all.TORCHES[-1] == noxfile.NEWEST_TORCH.rpartition(".")[0]
    assert f"{noxfile.NEWEST_TORCH} in" in (ROOT / "docs/install.md").read_text()
