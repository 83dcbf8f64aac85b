"""The page on troubleshooting quotes existing messages, and has the words that users search for."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import transformer_fast as tfast

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


def test_a_compiled_model_is_swapped() -> None:
    """The page says so: its modules are swapped, and it compiles again."""
    model = torch.compile(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Dropout(0.1)).eval(), backend="eager")
    x = torch.randn(3, 8)
    before = model(x)
    graphs = counters["stats"]["unique_graphs"]
    report = tfast.accelerate(model)
    assert len(report.swapped) == 2
    torch.testing.assert_close(model(x), before)
    assert counters["stats"]["unique_graphs"] > graphs
    assert "A compiled model compiles again" in PAGE and "Modules are not swapped" not in PAGE
