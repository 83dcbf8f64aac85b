"""Measurements of a GPU machine that is there for a quarter of an hour: parity, headline times, whole steps, tiles.

Each module is a command, which goes through its cases in order of worth, ends within `--seconds`, writes each result
when it is known, and skips the results that its record has already. ``benchmarks/gpu.py`` runs them.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend(str(ROOT / place) for place in (".", "benchmarks"))
