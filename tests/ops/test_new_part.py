"""A mask part is two files of code: a made-up part is added to a copy of the package, and runs on every kernel.

``AttentionMask.every(step)`` lets a query see the keys at multiples of a step from it. docs/extend.md says what a part
needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_fast

PACKAGE = Path(transformer_fast.__file__).parent
EDITS = {
    "masks/mask.py": {
        "    unions: tuple[tuple[AttentionMask, ...], ...] = ()\n": "    step: int | None = None\n",
        "        return self.first_keys is not None or ": "self.step is not None or ",
        "            others.append(inside(self.first_keys, self.end_keys, Lk))\n": (
            "        if self.step is not None:\n"
            "            i = torch.arange(Lq, device=device)[:, None] + shift\n"
            "            others.append((i - torch.arange(Lk, device=device)) % self.step == 0)\n"
        ),
        "        return cls(additive_bias=checks.four_dimensions(bias))\n": (
            "\n    @classmethod\n    def every(cls, step: int) -> AttentionMask:\n        return cls(step=step)\n"
        ),
    },
    "masks/parts.py": {
        '        "unions": a.unions + b.unions,\n': '        "step": combine("step", a.step, b.step, math.lcm),\n',
        "import dataclasses\n": "import math\n",
    },
}
"""By file: text, and what follows it."""

CALL = """
import sys
import torch
import transformer_fast as tfast
from transformer_fast import AttentionMask

backends = sys.argv[1:]
length = 40 if "triton" in backends else 130
mask = (AttentionMask.every(3) | AttentionMask.window(1)) & AttentionMask.lengths(torch.tensor([length, 20]))
mask = mask & AttentionMask.every(1)
i = torch.arange(length)
apart = i[:, None] - i
seen = ((apart % 3 == 0) | ((apart >= 0) & (apart <= 1))) & (i < torch.tensor([length, 20])[:, None, None, None])
assert torch.equal(mask.dense(length, length), seen)
q, k, v = (torch.randn(2, 4, length, 16, requires_grad=True) for _ in range(3))
assert "keep mask" in tfast.explain(q, k, v, mask) and "every" not in repr(AttentionMask.causal())
for backend in backends:
    results = []
    for name, given in ((backend, mask), ("reference", AttentionMask.keep(seen))):
        torch.manual_seed(4)
        with tfast.backend(name):
            out = tfast.attention(q, k, v, given, dropout_p=0.2, causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=3e-5, rtol=3e-5)
print(tfast.__file__, repr(AttentionMask.every(6)))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package that has the part."""
    root = tmp_path_factory.mktemp("part")
    shutil.copytree(PACKAGE, root / "transformer_fast", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for library in PACKAGE.glob("*.so"):
        (root / "transformer_fast" / library.name).symlink_to(library)
    for name, edits in EDITS.items():
        path = root / "transformer_fast" / name
        text = path.read_text()
        for place, added in edits.items():
            assert text.count(place) == 1, (name, place)
            text = text.replace(place, place + added)
        path.write_text(text)
    return root


@pytest.mark.parametrize("backends", [("native", "reference"), ("triton",)], ids=["native", "triton"])
def test_a_part_in_two_files_runs_on_every_kernel(package: Path, backends: tuple[str, ...]) -> None:
    """Output and gradients with dropout, in a union, beside lengths and a look-ahead."""
    if "triton" in backends:
        pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(package), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CALL, *backends], cwd=package, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(package / "transformer_fast" / "__init__.py"), "step(6)"]
