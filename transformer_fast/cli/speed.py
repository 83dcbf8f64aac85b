"""The small speed table of `demo`: the layers as people write them against the drop-in ones, on this machine.

Both sides take turns within one run, on the same inputs, so that whatever else the machine does slows both. The
eager side is `transformer_fast.reference.layers`: plain PyTorch with torch's own dropout. The full measurements are
in `benchmarks/`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from .. import layers, models, reference
from ..masks import AttentionMask

BATCH, LENGTH, WIDTH, HEADS, VOCAB = 32, 64, 256, 4, 2000


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call on each side, and how many calls each median is of."""

    name: str
    fast: float
    eager: float
    calls: int

    @property
    def ratio(self) -> float:
        """How many times as fast as eager."""
        return self.eager / self.fast


def speed(device: torch.device | str, seconds: float = 2.0) -> Iterator[Timing]:
    """Time embed, norm, attention and a training step on `device`, about `seconds` for each."""
    device = torch.device(device)
    for name, make in (
        ("embed + PE + dropout, forward", _embed),
        ("Norm, forward", _norm),
        ("attention, padding, forward + backward", _attention),
        ("training step, 2+2 layers, d 256", _training_step),
    ):
        sides = []
        for source in (layers, reference.layers):
            torch.manual_seed(0)
            sides.append(make(source, device))
        yield _take_turns(name, *sides, device, seconds)


def format_speed(rows: Iterator[Timing]) -> Iterator[str]:
    """The table as lines of text, one for each row as soon as it is known."""
    yield f"{'B 32, length 64, d 256, fp32':40} {'fast ms':>9} {'eager ms':>9} {'ratio':>7}"
    for row in rows:
        yield f"{row.name:40} {1e3 * row.fast:9.3f} {1e3 * row.eager:9.3f} {row.ratio:6.2f}x"


def _take_turns(
    name: str, fast: Callable[[], object], eager: Callable[[], object], device: torch.device, seconds: float
) -> Timing:
    times: dict[Callable[[], object], list[float]] = {fast: [], eager: []}
    for call in times:
        for _ in range(2):
            call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[fast]) < 3:
        for call, taken in times.items():
            _wait_for(device)
            start = time.perf_counter()
            call()
            _wait_for(device)
            taken.append(time.perf_counter() - start)
    return Timing(name, statistics.median(times[fast]), statistics.median(times[eager]), len(times[fast]))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Each of these builds one side: `source` is `transformer_fast.layers` or `transformer_fast.reference.layers`.


def _embed(source: ModuleType, device: torch.device) -> Callable[[], object]:
    embedder = source.Embedder(VOCAB, WIDTH).to(device)
    positions = source.PositionalEncoder(WIDTH, 0.1).to(device)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), device=device)
    fused = getattr(embedder, "with_positions", None)
    run = (lambda: fused(ids, positions)) if fused else (lambda: positions(embedder(ids)))
    return torch.no_grad()(run)


def _norm(source: ModuleType, device: torch.device) -> Callable[[], object]:
    norm, x = source.Norm(WIDTH).to(device), torch.randn(BATCH, LENGTH, WIDTH, device=device)
    return torch.no_grad()(lambda: norm(x))


def _attention(source: ModuleType, device: torch.device) -> Callable[[], object]:
    attend = source.MultiHeadAttention(HEADS, WIDTH, dropout=0.1).to(device)
    x = torch.randn(BATCH, LENGTH, WIDTH, device=device, requires_grad=True)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,), device=device)
    mask = (torch.arange(LENGTH, device=device) < lengths[:, None]).unsqueeze(1)

    def run() -> None:
        attend(x, x, x, mask).sum().backward()

    return run


def _training_step(source: ModuleType, device: torch.device) -> Callable[[], object]:
    build = models.Transformer if source is layers else source.Transformer
    model: nn.Module = build(VOCAB, VOCAB, WIDTH, 2, HEADS, 0.1, d_ff=4 * WIDTH, tie_weights=True).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    src, trg = torch.randint(VOCAB, (2, BATCH, LENGTH), device=device)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,), device=device)
    masks = AttentionMask.lengths(lengths), AttentionMask.causal()
    dense = [mask.dense(LENGTH, LENGTH, device).squeeze(1) for mask in masks]  # what eager code is given

    def run() -> None:
        logits = model(src, trg, *(masks if source is layers else dense))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), trg.flatten()).backward()
        optimizer.step()

    return run
