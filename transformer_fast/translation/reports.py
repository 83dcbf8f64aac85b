"""Reports of a run: sums over the updates since the last report, and the log, json lines and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import RunFolder
from .errors import os_error_as_checkpoint_error
from .ranks import Ranks

VALID = ("valid_loss", "bleu", "average_")  # prefixes of names that TensorBoard shows under "valid", not "train"


class Window:
    """Loss and gradient norm over the updates since the last report, summed on the device without waiting for it.

    Args:
        device: device of the updates. ranks: the processes; each process sums its own losses.

    Attributes:
        tokens, steps: targets in all processes, and updates.
    """

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.tokens = self.steps = 0

    def add(self, loss: Tensor, norm: Tensor, tokens: int) -> None:
        """Add an update: the loss of this process, and the gradient norm of all processes."""
        self._sums[0] += loss
        self._sums[1] += norm
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1

    def sums(self) -> tuple[float, float]:
        """Sum the losses of all processes, and the norms. Every process must call this."""
        loss, norm = self._sums.tolist()
        return self._ranks.sum(loss), norm

    def begin(self) -> None:
        """Begin a new window."""
        self._sums.zero_()
        self.tokens = self.steps = 0

    def state(self) -> dict[str, Any]:
        """State for a checkpoint. Every process must call this."""
        return {"window": list(self.sums()), "window_tokens": self.tokens, "window_steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; the given state may hold more."""
        self._sums.copy_(torch.tensor(state["window"], dtype=torch.float64))
        if self._ranks.rank:
            self._sums[0] = 0  # rank 0 keeps the sum of all
        self.tokens, self.steps = state["window_tokens"], state["window_steps"]


class RunLog:
    """Writes `log.jsonl` of a run folder, and its `tensorboard/`.

    Args:
        folder: the run.
        tensorboard: also write for TensorBoard.

    Raises:
        ModuleNotFoundError: TensorBoard is asked for and not installed.
        CheckpointError: here and in every method: the log cannot be written.
    """

    def __init__(self, folder: RunFolder, *, tensorboard: bool = False) -> None:
        self.path = folder.log
        self._events = folder.root / "tensorboard"
        self._writer_class = _summary_writer() if tensorboard else None
        self._writer: Any = None

    def begin(self, size: int, step: int) -> None:
        """Cut the log to the `size` bytes that it had at update `step`; the later updates are made and logged again."""
        with _writing(self.path):
            if self.path.exists() and self.path.stat().st_size > size:
                os.truncate(self.path, size)
        if self._writer_class is not None:
            with _writing(self._events):
                self._writer = self._writer_class(str(self._events), purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Write one report to the log: numbers by name; "step" is the number of the update."""
        with _writing(self.path), open(self.path, "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        if self._writer is not None:
            with _writing(self._events):
                for name, value in line.items():
                    if name != "step":
                        group = "valid" if name.startswith(VALID) else "train"
                        self._writer.add_scalar(f"{group}/{name}", value, line["step"])

    def flush(self) -> int:
        """Flush the log to disk; return the size of `log.jsonl` in bytes."""
        if self._writer is not None:
            with _writing(self._events):
                self._writer.flush()
        with _writing(self.path), open(self.path, "ab") as log:
            os.fsync(log.fileno())
            return log.tell()

    def close(self) -> None:
        """Close the log; later writes are not allowed."""
        if self._writer is not None:
            with _writing(self._events):
                self._writer.close()


def _writing(path: Path) -> contextlib.AbstractContextManager[None]:
    return os_error_as_checkpoint_error(f"cannot write {path}")


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError(
            "logging for TensorBoard needs the package tensorboard: pip install 'transformer_fast[tensorboard]'",
            name="tensorboard",
        ) from error
    return SummaryWriter
