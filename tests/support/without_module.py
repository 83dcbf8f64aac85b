"""Programs that run without the module of eager calls, as on a Python for which a wheel has none."""

from __future__ import annotations

import os
import sys

from subprocesses import program

HIDDEN = """
import importlib.machinery, warnings
importlib.machinery.EXTENSION_SUFFIXES[:] = [".cpython-999-x86_64-linux-gnu.so"]
import torch
import transformer_fast as tfast
from transformer_fast import backends, extension
assert extension.load() and extension.module() is None, extension.status()
warnings.filterwarnings("error", message=".*runs on the eager reference")
"""


def hidden(code: str, *arguments: str) -> str:
    """Return what a program prints. The modules of the tests can be imported there."""
    given = f"import sys; sys.argv[1:] = {list(arguments)!r}\n"
    return program(given + HIDDEN + code, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
