"""Kernel for Hugging Face's hub, made from the package: its imports, and its results in the interpreter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hub_kernel
import pytest
from subprocesses import program

IN_THE_INTERPRETER = """
import sys, torch
{load}
assert not [name for name in sys.modules if name.split(".")[0] == "transformer_fast"], "it uses the package"
torch.manual_seed(0)
lengths = torch.tensor([5, 7])
keep = torch.rand(2, 1, 6, 7) < 0.8
seen = keep & (torch.arange(7) < lengths[:, None, None, None]) & torch.ones(6, 7, dtype=torch.bool).tril()
seen = seen & (torch.arange(6) > 0)[:, None]  # a query without keys
keep = keep & (torch.arange(6) > 0)[:, None]

def inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 2, 6, 16, requires_grad=True), *(torch.randn(2, 1, 7, 16, requires_grad=True) for _ in "kv")]

q, k, v = inputs()
out = kernel.attention(q, k, v, keep=keep, lengths=lengths, causal=True)
out.square().sum().backward()
a, b, c = inputs()
weights = (a @ b.mT / 4).masked_fill(~seen, -1e30).softmax(-1) * seen.any(-1, keepdim=True)
expected = weights @ c
expected.square().sum().backward()
torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
for mine, its in ((q, a), (k, b), (v, c)):
    torch.testing.assert_close(mine.grad, its.grad, atol=1e-5, rtol=1e-4)
one, same, other = (kernel.attention(q, k, v, dropout_p=0.5, seed=seed) for seed in (3, 3, 4))
assert torch.equal(one, same) and not torch.equal(one, other)
try:
    kernel.attention(q, k[:, :, :, :8], v)
except ValueError as error:
    assert "expected q (B, H, Lq, D)" in str(error)
else:
    raise AssertionError("a wrong shape is not refused")
print("it works")
"""
BY_PATH = """
import importlib.util
spec = importlib.util.spec_from_file_location("kernel_of_the_hub", {path!r})
kernel = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = kernel
spec.loader.exec_module(kernel)
"""
BY_KERNELS = """
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path({path!r}), backend="cpu", trust_remote_code=True)
"""


def in_the_interpreter(load: str, path: Path, folder: Path) -> str:
    code = IN_THE_INTERPRETER.format(load=load.format(path=str(path)))
    return program(code, cwd=folder, TRITON_INTERPRET="1", PYTHONPATH="", HF_HUB_OFFLINE="1")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton needs a C compiler")
def test_the_kernel_runs_without_the_package(tmp_path: Path) -> None:
    package = hub_kernel.make(tmp_path / "hub")
    assert in_the_interpreter(BY_PATH, package / "__init__.py", tmp_path).endswith("it works\n")


def test_hugging_face_reads_and_loads_it(tmp_path: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="kernels (Hugging Face's) is not installed")
    package = hub_kernel.make(tmp_path / "hub")
    build = kernels._rust.Build.open(tmp_path / "hub")
    assert [str(backend) for backend in build.general.backends] == ["cuda"]
    # As kernel-builder lays it out; for the CPU, where Triton's interpreter runs.
    variant = tmp_path / "hub/build/torch-cpu"
    shutil.copytree(package, variant)
    name = hub_kernel.NAME.replace("_", "-")
    metadata = {"id": f"_{hub_kernel.NAME}_cpu", "name": name, "version": 1, "license": "MIT", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}))
    assert in_the_interpreter(BY_KERNELS, tmp_path / "hub", tmp_path).endswith("it works\n")


def test_only_what_the_hub_allows_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = hub_kernel.needed()
    assert {"", "extension", "attention_params", "triton.attention.forward", "triton.attention.backward"} <= set(
        modules
    )
    monkeypatch.setattr(hub_kernel, "ROOT", tmp_path)
    file = tmp_path / "other.py"
    file.write_text("import torch.nn, os\nfrom numpy.linalg import norm\n")
    with pytest.raises(ValueError, match=r"other\.py imports numpy; the hub has no such module"):
        hub_kernel.imports("other", file)


def test_the_card_says_what_has_not_been_done() -> None:
    card = (hub_kernel.ROOT / "hub/README.md").read_text()
    assert "Executed in emulation, not yet on a GPU" in card
