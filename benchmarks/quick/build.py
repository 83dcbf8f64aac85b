"""Use the extension that is here if it loads, and compile it for this GPU otherwise.

python -m benchmarks.quick.build
"""

from __future__ import annotations

import os
import subprocess
import sys

from . import ROOT

LOAD = """
import torch
from transformer_fast import extension
loaded = extension.load()
cuda = loaded and torch._C._dispatch_has_kernel_for_dispatch_key("transformer_fast::embed", "CUDA")
print(extension.status())
raise SystemExit(not loaded or (torch.cuda.is_available() and torch.version.cuda is not None and not cuda))
"""


def main() -> int:
    if subprocess.run([sys.executable, "-c", LOAD], cwd=ROOT).returncode == 0:
        print("nothing was compiled")
        return 0
    import torch

    variables = {**os.environ, "TRANSFORMER_FAST_CPU_SETS": "baseline"}
    if torch.cuda.is_available():
        variables["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability())
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=variables
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
