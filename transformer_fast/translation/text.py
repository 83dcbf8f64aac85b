"""Reader of line-aligned text: one sentence per line, plain or gzipped, strictly UTF-8.

Lines end at a line feed and nowhere else. `str.splitlines` would also split at U+2028, U+0085 or a form
feed inside a sentence, and every later pair of the corpus would then be misaligned without a word.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
UTF8_BOM = b"\xef\xbb\xbf"

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class ParallelText:
    """Aligned sentences: `source[i]` translates to `target[i]`; `fingerprint` is a SHA-256 of both texts."""

    source: list[str]
    target: list[str]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.source)


@contextlib.contextmanager
def open_text(source: PathLike | IO[bytes], *, name: str = "") -> Iterator[Iterator[bytes]]:
    """Context with the lines of a text as bytes, without their line ends and the mark of UTF-8 before the first.

    Lines are read lazily. For a truncated text, all complete lines are yielded before the error.

    Args:
        source: the path of a plain or gzipped file, or an open binary stream. gzip is recognised by its first two
            bytes, not by the name.
        name: name of the stream, for messages.

    Raises:
        DataError: missing, a folder, unreadable; from the iterator, damaged or truncated gzip.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, str | os.PathLike):
            path = Path(source)
            name = str(path)
            if path.is_dir():
                raise DataError(f"{path} is a folder; expected a text file with one sentence per line (plain or .gz)")
            try:
                stream: Any = stack.enter_context(open(path, "rb"))
                start = stream.peek(2)[:2]
            except FileNotFoundError:
                raise DataError(f"{path} does not exist; expected a text file with one sentence per line") from None
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror or error}") from error
            if path.suffix == ".gz" and start and start != GZIP_MAGIC:
                raise DataError(f"{path} ends in .gz but is not a gzip file (it does not start with 1f 8b)")
        else:
            stream = source
            if not hasattr(stream, "peek"):
                stream = io.BufferedReader(stream)  # type: ignore[arg-type]
                stack.callback(stream.detach)
            # Interactive input has no complete line yet.
            start = b"" if stream.isatty() else stream.peek(2)[:2]
        packed = start == GZIP_MAGIC
        yield _lines(stack.enter_context(gzip.GzipFile(fileobj=stream)) if packed else stream, name)


def _lines(stream: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The lines of a stream without their ends; an error where the stream breaks off."""
    number = 0
    try:
        for number, line in enumerate(stream, start=1):
            text = line if number > 1 else line.removeprefix(UTF8_BOM)
            yield text.removesuffix(b"\n").removesuffix(b"\r")
    except (EOFError, OSError, zlib.error) as error:
        damage = "is a damaged or truncated gzip file" if isinstance(stream, gzip.GzipFile) else "cannot be read"
        raise DataError(f"{name} {damage}, after line {number}: {error}") from error


def read_lines(path: PathLike, *, may_be_blank: bool = False) -> list[str]:
    """All lines of a UTF-8 text file, without their line ends.

    Args:
        path: a plain or gzipped file; see `open_text`.
        may_be_blank: take a text of nothing but blank lines.

    Raises:
        DataError: as for `open_text`; also for an empty file or invalid UTF-8 (with the line number).
    """
    decoded = []
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                decoded.append(decode_line(line))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}; convert the file to UTF-8") from None
    if not decoded or not (may_be_blank or any(map(str.strip, decoded))):
        raise DataError(f"{path} is empty; expected one sentence per line")
    return decoded


def decode_line(line: bytes) -> str:
    """The text of a line.

    Raises:
        ValueError: the line is not UTF-8; says where.
    """
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise ValueError(f"not valid UTF-8 ({where})") from None


def read_parallel(source: PathLike, target: PathLike, *, may_be_blank: bool = False) -> ParallelText:
    """Two aligned files as one corpus; may_be_blank: as in `read_lines`.

    Raises:
        DataError: anything `read_lines` raises, or files of different lengths (both counts are named).
    """
    left, right = (read_lines(path, may_be_blank=may_be_blank) for path in (source, target))
    if len(left) != len(right):
        raise DataError(
            f"the files are not aligned: {source} has {len(left):,} lines, {target} has {len(right):,};"
            " line i of one must translate line i of the other"
        )
    digest = hashlib.sha256()
    for side in (left, right):
        digest.update("\n".join(side).encode("utf-8"))
        digest.update(b"\0")
    return ParallelText(left, right, digest.hexdigest())
