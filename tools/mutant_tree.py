"""The tree of ``make mutants``: a copy of the sources in which faults are planted, built and tested."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path

from mutant_build import Libraries
from mutant_rows.fault import ROOT, Fault, Unfit
from mutant_switches import number_of
from pythons import ignored

INTERPRETED = "tests/interpreter"
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
WRONG_CALL, NOTHING_RUN = 4, 5  # pytest's exit codes
IMPORTED = ("hypothesis", "torch", "transformers.models.bert.modeling_bert", "triton", "xdist.plugin")
"""What a fork need not import again. Nothing of the tree may be among it."""

Ignore = Callable[[str, list[str]], set[str]]
Run = tuple[list[str], dict[str, str]]  # arguments of pytest, and what its environment has besides


class Tree:
    """Copy of the sources in which faults are planted, with its libraries as built without faults."""

    def __init__(self, folder: Path, workers: str) -> None:
        self.path, self.workers, self.servers = folder / "tree", workers, {}
        self.libraries = Libraries(self.path, folder / "build")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        others = ("TRITON_INTERPRET", "PYTHONDONTWRITEBYTECODE")
        variables = {name: value for name, value in os.environ.items() if name not in others}
        self.environment = {**variables, "PATH": path, "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"}

    def prepare(self, rows: Iterable[Fault]) -> None:
        """Update the sources, and compile libraries that are older than their sources."""
        mirror(ROOT, self.path, lambda folder, names: ignored(str(ROOT / folder), names))
        self.libraries.prepare(rows)

    @contextmanager
    def planted(self, row: Fault) -> Iterator[None]:
        """Context in which a fault is planted in the tree.

        Raises:
            Unfit: the fault cannot be planted, or not built.
        """
        if row in self.libraries.switched:
            self.environment["PLANTED"] = str(number_of(row))
            try:
                yield
            finally:
                del self.environment["PLANTED"]
            return
        file, is_compiled = self.path / row.path, row.path.startswith("csrc/")
        faulty, content, times = row.planted(self.path), file.read_text(encoding="utf-8"), file.stat()
        try:
            file.write_text(faulty, encoding="utf-8")
            if is_compiled:
                self.libraries.plant(row.path)
            yield
        finally:
            file.write_text(content, encoding="utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            Path(cache_from_source(str(file))).unlink(missing_ok=True)  # a cache is told by whole seconds and size
            if is_compiled:
                self.libraries.take_out()

    def pytest(self, runs: Iterable[Run], seconds: float) -> str:
        """Return the first test that fails, or another outcome as text; "" if all pass.

        Raises:
            Unfit: pytest cannot run the tests, or there are none.
        """
        codes = []
        for arguments, variables in runs:
            code, output = self._run_pytest(["-x", *arguments], variables, seconds)
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
        """Run some tests in the unchanged tree, and return those that fail."""
        found: set[str] = set()
        for names, variables in split(sorted(tests)):
            _, output = self._run_pytest(names, variables, seconds)
            found.update(match.strip() for match in FAILED.findall(output))
        return found

    def _run_pytest(self, arguments: list[str], variables: dict[str, str], seconds: float) -> tuple[int | None, str]:
        """Return the exit code (None after the time limit) and the output. Folders run in as many processes as there
        are workers."""
        folders = any((self.path / name).is_dir() for name in arguments)
        workers = self.workers if folders and self.workers != "1" else "0"
        server = self.servers.setdefault(str(variables), Server(self.path))
        command = ["-q", "-n", workers, "-p", "no:cacheprovider", *arguments]
        return server.run(command, {**self.environment, **variables}, seconds)


class Server:
    """A process that runs pytest in forks of itself (mutant_server.py): each has everything imported but the tree."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, None

    def run(self, arguments: list[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
        """The exit code and the output of pytest; None for one that took longer, and was ended with all it started."""
        if self.process is None:
            command = [sys.executable, "tools/mutant_server.py", *IMPORTED]
            kept = {"cwd": self.folder, "env": environment, "start_new_session": True}
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **kept)
        with tempfile.NamedTemporaryFile() as output:
            try:
                print(json.dumps([arguments, environment, output.name]), file=self.process.stdin, flush=True)
                ended = select.select([self.process.stdout], [], [], seconds)[0]
                code = int(self.process.stdout.readline()) if ended else None
            except BaseException:
                self.end()
                raise
            if code is None:
                self.end()
            return code, output.read().decode(errors="replace")

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def mirror(source: Path, target: Path, ignore: Ignore) -> None:
    """Copy files that differ in size or time, with their times, and delete files that are not in `source`."""
    wanted = set(files_of(source, ignore))
    for name in wanted:
        old, new = source / name, target / name
        if not new.exists() or _size_and_time(old) != _size_and_time(new):
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(old, new)
    for name in set(files_of(target, ignore)) - wanted:
        (target / name).unlink()


def files_of(root: Path, ignore: Ignore) -> Iterator[str]:
    """Return the files below a folder, by relative path; `ignore(folder, names)` returns the names to leave out."""
    for folder, folders, names in os.walk(root):
        own = os.path.relpath(folder, root)
        left_out = ignore(own, [*folders, *names])
        folders[:] = [name for name in folders if name not in left_out]
        yield from (os.path.normpath(os.path.join(own, name)) for name in names if name not in left_out)


def _size_and_time(file: Path) -> tuple[int, int]:
    return (found := file.stat()).st_size, found.st_mtime_ns


def split(tests: Iterable[str]) -> list[Run]:
    """Split off the tests in Triton's interpreter."""
    others = [test for test in tests if not test.startswith(INTERPRETED)]
    interpreted = [test for test in tests if test.startswith(INTERPRETED)]
    return [run for run in ((others, {}), (interpreted, {"TRITON_INTERPRET": "1"})) if run[0]]
