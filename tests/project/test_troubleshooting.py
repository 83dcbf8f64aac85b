"""The page on troubleshooting quotes existing messages, and has the words that users search for."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SEARCHED = ("Trainer", "nanoGPT", "reproducible", "OMP_NUM_THREADS", "Troubleshooting", "torch.compile", "MALLOC_")


def quoted() -> list[str]:
    """Return the parts of the messages in the first column; "..." stands for variable text."""
    rows = re.findall(r"^\| ([^|]+) \|", PAGE, re.MULTILINE)
    messages = [text for row in rows for text in re.findall(r"`([^`]*\.\.\.[^`]*)`", row)]
    return [part.strip() for message in messages for part in message.split("...") if len(part.strip()) > 1]


def test_the_messages_are_those_of_the_code() -> None:
    folders = (("transformer_fast", "*.py"), ("csrc", "*.cpp"), ("csrc", "*.h"))
    sources = "\n".join(path.read_text() for folder, names in folders for path in (ROOT / folder).rglob(names))
    said = re.sub(r'["\']\s*\n\s*f?["\']', "", sources).replace('\\"', '"')  # adjacent string literals
    parts = quoted()
    assert len(parts) > 20 and not [part for part in parts if part not in said]


def test_a_search_finds_the_page() -> None:
    assert not [word for word in SEARCHED if word not in PAGE]
