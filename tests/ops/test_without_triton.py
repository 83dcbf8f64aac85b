"""Without triton, which only a GPU needs: the import, the ops, `accelerate` and the commands."""

from __future__ import annotations

import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from subprocesses import ROOT, python

from transformer_fast import extension

HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import torch
import transformer_fast as tfast
from transformer_fast import cli
"""
PROGRAM = """
q, k, v = (torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3))
mask = tfast.AttentionMask.lengths(torch.tensor([9, 4]))
tfast.attention(q, k, v, mask, dropout_p=0.1).sum().backward()
x = torch.randn(2, 9, 32, requires_grad=True)
tfast.layer_norm(x, torch.ones(32), torch.zeros(32), residual=x, dropout_p=0.1)[0].sum().backward()
tfast.linear_cross_entropy(torch.randn(5, 32), torch.randn(7, 32), None, torch.tensor([1, 2, 3, 4, 5]))
assert q.grad.any() and x.grad.any()
assert "native" in str(tfast.explain(q, k, v, mask)).lower()

model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
report = tfast.accelerate(model, packed=True)
padding = torch.arange(9) >= torch.tensor([[9], [4]])
model(x, src_key_padding_mask=padding).sum().backward()
assert "fused in 2 of 2" in str(report)
assert "padding" in report.explain((x, None, padding))
report.undo()
assert cli.main(["info"]) == 0
try:
    with tfast.backend("triton"):
        tfast.attention(q, k, v)
except tfast.BackendError as error:
    print(error)
assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
"""


@pytest.mark.skipif(not extension.load(), reason="the kernels are not built")
def test_everything_on_a_cpu_works_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = python("-c", HIDDEN + PROGRAM)
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    assert "triton is not installed; run `pip install 'transformer_fast[gpu]'`" in said[-1]


DECLARED_ALONE = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import transformer_fast
"""


def required(requirements: list[str]) -> set[str]:
    """Return the names of the distributions that the requirements need, directly or not, but for triton."""
    found: set[str] = set()
    waiting = [*requirements]
    while waiting:
        one = Requirement(waiting.pop())
        name = canonicalize_name(one.name)
        if name not in {*found, "triton"} and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += metadata.requires(name) or []
    return found


def test_the_import_is_silent_with_the_declared_dependencies_alone() -> None:
    """PyTorch warns where NumPy is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = required(project["dependencies"]) | {"transformer-fast"}
    owners = metadata.packages_distributions().items()
    hidden = {module for module, names in owners if not allowed & {*map(canonicalize_name, names)}} | {"triton"}
    assert "pytest" in hidden and "torch" not in hidden
    done = python("-W", "error", "-c", f"hidden = {hidden!r}\n{DECLARED_ALONE}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
