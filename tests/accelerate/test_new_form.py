"""A structure that ``accelerate`` knows is two files: a made-up one is added to a copy of the package and of
tests/support, and the search, the table of the docs and the tests of every form find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_fast

PACKAGE, ROOT = Path(transformer_fast.__file__).parent, Path(__file__).parents[2]
PATTERN = '''
"""Attention of one head with names of its own."""

import torch

from ... import ops
from .base import LINEAR, Pattern, children
from .norm import NORM, width_of


class Gaze(Pattern):
    """``out(softmax(left(y) right(y)^T / sqrt(d)) y)`` of ``y = norm(x)``."""

    parts = children(left=LINEAR, right=LINEAR, out=LINEAR, norm=NORM)
    attends = True

    def calls(self, m):
        return [(torch.randn(2, 5, width_of(m.norm)),)]

    def fused_forward(self, m, x):
        y = m.norm(x)
        return m.out(ops.attention(*(t.unsqueeze(1) for t in (m.left(y), m.right(y), y))).squeeze(1))


PATTERNS = (Gaze(),)
KNOWS = (("attention: `left`, `right`", "a made-up text"),)
'''
FORM = """
from form_arguments import ONE, D
from torch import nn


class Gaze(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = (nn.Linear(D, D) for _ in range(3))
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        y = self.norm(x)
        return self.out((self.left(y) @ self.right(y).mT * D**-0.5).softmax(-1) @ y)


FORMS = {"gaze": (Gaze, ONE)}
"""
CHECKS = """
import handwritten_forms
import tools.pattern_table as table
from test_forms import test_every_form as every_form
import transformer_fast as tfast
from transformer_fast.accelerate import patterns

names = [pattern.name for pattern in patterns.PATTERNS]
assert names.index("Gaze") > names.index("Norm")  # a child's pattern comes first
every_form("gaze")
assert "| attention: `left`, `right` | a made-up text |" in table.page(table.PAGE.read_text())
model = handwritten_forms.FORMS["gaze"][0]()
[row] = tfast.accelerate(model).attention
assert row.now == "by its structure"
print(tfast.__file__, handwritten_forms.__file__)
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with copies of the package and of the modules of the tests, which have the form."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "transformer_fast", ignore=ignored)
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "support", ignore=ignored)
    for library in PACKAGE.glob("*.so"):
        (tmp_path / "transformer_fast" / library.name).symlink_to(library)
    (tmp_path / "transformer_fast" / "accelerate" / "patterns" / "gaze.py").write_text(PATTERN)
    (tmp_path / "support" / "handwritten_gaze.py").write_text(FORM)
    return tmp_path


def test_two_files_are_a_form(copied: Path) -> None:
    places = (copied, copied / "support", ROOT, ROOT / "tests" / "accelerate")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHECKS], cwd=copied, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    package, forms = done.stdout.split()
    assert package == str(copied / "transformer_fast" / "__init__.py")
    assert forms == str(copied / "support" / "handwritten_forms.py")
