"""The log of a run: a line of json a report, and on request the same for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from .checkpoint import RunFolder
from .errors import CheckpointError

GROUPS = {"valid_loss": "valid", "bleu": "valid"}  # where TensorBoard shows it; all else is "train"


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
        """Drop what was logged after the first `size` bytes, of update `step`; it will happen, and be logged, again."""
        with self._writing(self.path):
            if self.path.exists() and self.path.stat().st_size > size:
                os.truncate(self.path, size)
        if self._writer_class is not None:
            with self._writing(self._events):
                self._writer = self._writer_class(str(self._events), purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """One report, whose numbers are told by their names; "step" is the update it belongs to."""
        with self._writing(self.path), open(self.path, "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        if self._writer is not None:
            with self._writing(self._events):
                for name, value in line.items():
                    if name != "step":
                        self._writer.add_scalar(f"{GROUPS.get(name, 'train')}/{name}", value, line["step"])

    def flush(self) -> int:
        """Bring it to the disk; how many bytes `log.jsonl` has."""
        with self._writing(self.path), open(self.path, "ab") as log:
            os.fsync(log.fileno())
            size = log.tell()
        if self._writer is not None:
            with self._writing(self._events):
                self._writer.flush()
        return size

    def close(self) -> None:
        """Nothing is written after this."""
        if self._writer is not None:
            with self._writing(self._events):
                self._writer.close()

    @contextlib.contextmanager
    def _writing(self, path: Any) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError(
            "logging for TensorBoard needs the package tensorboard: pip install 'transformer_fast[tensorboard]'",
            name="tensorboard",
        ) from error
    return SummaryWriter
