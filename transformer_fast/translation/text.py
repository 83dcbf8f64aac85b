"""Reading line-aligned text: one sentence a line, plain or gzipped, strictly UTF-8.

Lines end at a line feed and nowhere else. `str.splitlines` would also split at U+2028, U+0085 or a form
feed inside a sentence, and every later pair of the corpus would then be misaligned without a word.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

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


def _read_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a text file with one sentence a line (plain or .gz)")
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; expected a text file with one sentence a line") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if raw.startswith(GZIP_MAGIC):
        try:
            return gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} is a damaged or truncated gzip file: {error}") from error
    if path.suffix == ".gz" and raw:
        raise DataError(f"{path} ends in .gz but is not a gzip file (it does not start with 1f 8b)")
    return raw


def read_lines(path: PathLike) -> list[str]:
    """All lines of a UTF-8 text file, without their line ends.

    Args:
        path: a plain or gzipped file; gzip is recognised by its first two bytes, not by the name.

    Raises:
        DataError: missing, a folder, unreadable, empty, damaged gzip, or invalid UTF-8 (with the line number).
    """
    path = Path(path)
    raw = _read_bytes(path).removeprefix(UTF8_BOM)
    if not raw.strip():
        raise DataError(f"{path} is empty; expected one sentence a line")
    lines = raw.split(b"\n")
    if not lines[-1]:
        lines.pop()
    decoded = []
    for number, line in enumerate(lines, start=1):
        try:
            decoded.append(decode_line(line.removesuffix(b"\r")))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}; convert the file to UTF-8") from None
    return decoded


def decode_line(line: bytes) -> str:
    """The text of a line.

    Raises:
        ValueError: it is not UTF-8; says where.
    """
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise ValueError(f"not valid UTF-8 ({where})") from None


def read_parallel(source: PathLike, target: PathLike) -> ParallelText:
    """Two aligned files as one corpus.

    Raises:
        DataError: anything `read_lines` raises, or files of different lengths (both counts are named).
    """
    left, right = read_lines(source), read_lines(target)
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
