"""One thread for tests: the processes of a run share the cores, and test tensors are small."""

from __future__ import annotations

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that tests start
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
