"""The tree of ``make mutants``: a copy of the sources in which faults are planted, built and tested."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mutant_rows.fault import ROOT, Row, Unfit
from pythons import ignored, setup_names

INTERPRETED = "tests/interpreter"
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
WRONG_CALL, NOTHING_RUN = 4, 5  # pytest's exit codes
BUILD_SECONDS = 7200

Ignore = Callable[[str, list[str]], set[str]]
Run = tuple[list[str], dict[str, str]]  # arguments of pytest, and what its environment has besides


class Tree:
    """A copy of the sources in which faults are planted, and its build without faults."""

    def __init__(self, folder: Path, workers: str) -> None:
        self.path, self.kept, self.log, self.workers = folder / "tree", folder / "kept", folder / "build.log", workers
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self.environment = {**variables, "PATH": path, "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"}
        self.best = setup_names(ROOT)["instruction_sets"]("host")[-1]

    def prepare(self) -> None:
        """Update the sources, and rebuild outdated objects."""
        self._restore_build()
        mirror(ROOT, self.path, lambda folder, names: ignored(str(ROOT / folder), names))
        for library in (self.path / "transformer_fast").glob("libtransformer_fast_cpu_*.so"):
            if not library.stem.endswith(f"_cpu_{self.best}"):
                library.unlink()
        self.build()
        for source, target, ignore in self._built():
            mirror(source, target, ignore)

    def build(self) -> None:
        """Build the module and the kernels for this machine's best instruction set.

        Most optimisations are off, which halves the compile time and does not change results.

        Raises:
            Unfit: the compiler refuses it.
        """
        build = {
            "TRANSFORMER_FAST_CPU_SETS": self.best,
            "TRANSFORMER_FAST_CUDA": "0",
            "TRANSFORMER_FAST_CXX_FLAGS": "-O1",
        }
        environment = {"MAX_JOBS": str(max(int(self.workers), 1)), **self.environment, **build}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        code, output = run_group(command, self.path, environment, BUILD_SECONDS)
        self.log.write_text(output)
        if code != 0:
            raise Unfit(f"it does not build; see {self.log}")

    @contextmanager
    def planted(self, row: Row) -> Iterator[None]:
        """Plant a fault, and take it out.

        Raises:
            Unfit: it cannot be planted, or not built.
        """
        before: dict[Path, tuple[bytes, os.stat_result]] = {}
        compiled = False
        try:
            for name, content in row.changes(self.path).items():
                file = self.path / name
                before[file] = file.read_bytes(), file.stat()
                file.write_bytes(content)
                compiled = compiled or name.startswith("csrc/")
            if compiled:
                self.build()
            yield
        finally:
            for file, (content, times) in before.items():
                file.write_bytes(content)
                os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            if compiled:
                self._restore_build()

    def pytest(self, runs: Iterable[Run], seconds: float) -> str:
        """Run tests; return the first failing test, or another failure as text; "" if all pass.

        Raises:
            Unfit: pytest cannot run them, or there are none.
        """
        codes = []
        for arguments, variables in runs:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", self.workers, "-p", "no:cacheprovider"]
            code, output = run_group([*command, *arguments], self.path, {**self.environment, **variables}, seconds)
            if code == WRONG_CALL:
                raise Unfit(f"pytest {' '.join(arguments)}: {output.strip()[-300:]}")
            if code not in (0, NOTHING_RUN):
                found = FAILED.search(output)
                return found[1].strip() if found else "no end" if code is None else f"exit code {code}"
            codes.append(code)
        if codes and set(codes) == {NOTHING_RUN}:
            raise Unfit("its tests are none, or all skipped")
        return ""

    def failing(self, tests: set[str], seconds: float) -> set[str]:
        """Run some tests in the tree as it is, and return those that fail."""
        found: set[str] = set()
        for names, variables in split(sorted(tests)):
            command = [sys.executable, "-m", "pytest", "-q", "-n", self.workers, "-p", "no:cacheprovider", *names]
            _, output = run_group(command, self.path, {**self.environment, **variables}, seconds)
            found.update(match.strip() for match in FAILED.findall(output))
        return found

    def _restore_build(self) -> None:
        """Restore objects and their times, so that removing a fault compiles nothing."""
        for source, target, ignore in self._built():
            if target.exists():
                mirror(target, source, ignore)

    def _built(self) -> list[tuple[Path, Path, Ignore]]:
        return [
            (self.path / "build", self.kept / "build", lambda folder, names: set()),
            (self.path / "transformer_fast", self.kept / "libraries", _all_but_libraries),
        ]


def _all_but_libraries(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not name.endswith(".so")}


def mirror(source: Path, target: Path, ignore: Ignore) -> None:
    """Copy files that differ in size or time, which they keep, and delete those that are not in `source`."""
    wanted = set(files_of(source, ignore))
    for name in wanted:
        old, new = source / name, target / name
        if not new.exists() or _size_and_time(old) != _size_and_time(new):
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(old, new)
    for name in set(files_of(target, ignore)) - wanted:
        (target / name).unlink()


def files_of(root: Path, ignore: Ignore) -> Iterator[str]:
    """The files below a folder, by their paths from there; `ignore(folder, names)` says what is left out of one."""
    for folder, folders, names in os.walk(root):
        own = os.path.relpath(folder, root)
        left_out = ignore(own, [*folders, *names])
        folders[:] = [name for name in folders if name not in left_out]
        yield from (os.path.normpath(os.path.join(own, name)) for name in names if name not in left_out)


def _size_and_time(file: Path) -> tuple[int, int]:
    return (found := file.stat()).st_size, found.st_mtime_ns


def run_group(command: list[str], cwd: Path, environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Run a command; return exit code and output, or None after a timeout, which ends the command and its children."""
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output.decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0].decode(errors="replace")
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def split(tests: Iterable[str]) -> list[Run]:
    """Split tests into those in Triton's interpreter and all others."""
    others = [test for test in tests if not test.startswith(INTERPRETED)]
    interpreted = [test for test in tests if test.startswith(INTERPRETED)]
    return [run for run in ((others, {}), (interpreted, {"TRITON_INTERPRET": "1"})) if run[0]]
