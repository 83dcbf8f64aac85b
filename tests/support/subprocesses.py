"""Programs of the tests in a new process of this Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments and environment variables, in the repository by default."""
    environment = {**os.environ, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def program(code: str, cwd: Path = ROOT, **variables: str) -> str:
    """Return the output of a program, which must end with exit code 0."""
    done = python("-c", code, cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout
