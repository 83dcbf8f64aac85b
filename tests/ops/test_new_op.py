"""An op has one record: a made-up op is added to a copy of the package as one new file and one import, and the choice
of a backend, ``verify``, exports and the tests of every op go through it.

The op's kernels are in Python here. docs/extend.md lists what an op in C++ touches besides.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_fast

PACKAGE, ROOT = Path(transformer_fast.__file__).parent, Path(__file__).parents[2]
OP = """
from functools import partial

import torch
import torch.nn.functional as F

from .. import backends
from .registry import Case, Op, implementation, register

LIBRARY = torch.library.Library("transformer_fast", "FRAGMENT")
LIBRARY.define("scaled_silu_(Tensor x, float scale) -> Tensor")
LIBRARY.impl("scaled_silu_", lambda x, scale: F.silu(x) * scale, "CompositeExplicitAutograd")
torch.library.register_fake("transformer_fast::scaled_silu_", lambda x, scale: torch.empty_like(x), lib=LIBRARY)


def keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def differentiate(ctx, grad):
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        return torch.autograd.grad(F.silu(x) * ctx.scale, x, grad)[0], None


torch.library.register_autograd("transformer_fast::scaled_silu_", differentiate, setup_context=keep, lib=LIBRARY)


def scaled_silu_(x, scale):
    return F.silu(x) * scale


def scaled_silu(x, scale=2.0):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"scaled_silu: x must be a tensor, got {type(x).__name__}")
    backend = backends.resolve("scaled_silu", x.device, x.dtype)
    if backend == "reference":
        return F.silu(x) * scale
    return implementation("scaled_silu_", backend)(x, scale)


def cases(draw):
    yield Case("scaled_silu", "times 3", {"x": draw.normal(7, 33)}, partial(scaled_silu, scale=3.0))


register(Op("scaled_silu", "scaled_silu", "reference", (scaled_silu_,), cases))
"""
EDITS = {
    "from .norm import layer_norm\n": "from .scaled_silu import scaled_silu\n",
    '    "positional_table",\n': '    "scaled_silu",\n',
}
"""Text of ops/__init__.py, and what follows it."""

CHECKS = """
import torch
from op_calls import calls
from test_every_op import test_every_public_op_is_in_the_table as public_ops_are_in_the_table
from test_export import test_the_record_of_an_op_has_its_plain_form as has_its_plain_form
from tests.support.op_arguments import problem_of, recorded
import transformer_fast as tfast
from transformer_fast import backends
from transformer_fast.cli import verification
from transformer_fast.ops import registry

cpu, cuda = torch.device("cpu"), torch.device("cuda")
assert backends.choose("scaled_silu", cpu, torch.float32)[0] == "native"
assert backends.choose("scaled_silu", cuda, torch.float32) == (
    "reference", "scaled_silu has no kernel for cuda devices")
[case] = [case for case in registry.op_cases(cpu) if case.op == "scaled_silu"]
rows = list(verification.check_case(case, cpu, torch.float32))
assert len(rows) == 2 and all(row.passed and row.backend == "native" for row in rows), rows
has_its_plain_form("scaled_silu")
public_ops_are_in_the_table()
with tfast.backend("reference"):
    expected = calls()["scaled_silu, times 3"].trained()
torch.testing.assert_close(calls()["scaled_silu, times 3"].trained(), expected)
[call] = recorded()["scaled_silu_"]
assert not problem_of(call), problem_of(call)
print(tfast.__file__)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package that has the op."""
    shutil.copytree(PACKAGE, tmp_path / "transformer_fast", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for library in PACKAGE.glob("*.so"):
        (tmp_path / "transformer_fast" / library.name).symlink_to(library)
    (tmp_path / "transformer_fast" / "ops" / "scaled_silu.py").write_text(OP)
    names = tmp_path / "transformer_fast" / "ops" / "__init__.py"
    text = names.read_text()
    for place, added in EDITS.items():
        assert text.count(place) == 1, place
        text = text.replace(place, place + added)
    names.write_text(text)
    return tmp_path


def test_one_record_reaches_all_that_goes_through_every_op(package: Path) -> None:
    places = (package, ROOT, ROOT / "tests" / "support", ROOT / "tests" / "ops")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHECKS], cwd=package, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(package / "transformer_fast" / "__init__.py")]
