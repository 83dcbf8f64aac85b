"""Values of the GPU that nvidia-smi tells."""

from __future__ import annotations

import subprocess


def smi(what: str) -> str | None:
    """Return one value of nvidia-smi; None without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
