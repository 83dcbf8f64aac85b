"""Report of a failed test: the arguments of its call, and the command to run it again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

VARIABLES = ("TRITON_INTERPRET", "TRANSFORMER_FAST_CPU", "TRANSFORMER_FAST_BACKEND")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = (yield).get_result()
    if report.when == "call" and report.failed:
        spec = getattr(item, "callspec", None)
        given = ", ".join(f"{name}={value!r}" for name, value in spec.params.items()) if spec else ""
        variables = "".join(f"{name}={os.environ[name]} " for name in VARIABLES if name in os.environ)
        again = f"{variables}python -m pytest {shlex.quote(item.nodeid)}"
        report.sections.append(("again", f"{given}\n{again}".strip()))
