"""Times of the Triton kernels on an H100, predicted from their machine code."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend(str(ROOT / place) for place in (".", "benchmarks", "tools"))
