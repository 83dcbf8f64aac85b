"""``verify`` without kernels fails, because it would compare the reference with itself."""

from __future__ import annotations

import subprocess
import sys

RUN = """
import sys, torch
from transformer_fast import extension
extension._outcome = lambda: extension._Outcome(False, "built for another torch")
from transformer_fast.cli import main, verification
row = verification.Parity("op", "", torch.float32, "out", "", 1.0, 2.0, 1.0)
verification.parity = lambda device: iter([row])
sys.exit(main(["verify", "--device", "cpu"]))
"""


def test_the_reference_beside_itself_is_no_success() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "1 of 1 passed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("no kernel ran, the reference was compared with itself: built for")
