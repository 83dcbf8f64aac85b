"""Figures beside the predictions: the project's goals, and published figures for an H100."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .machine import H100
from .predictions import Prediction


@dataclass(frozen=True)
class Goal:
    """A limit for one case.

    Args:
        what: for people.
        case: as the record names it.
        limit: in `unit`: "us" at most, "TFLOP/s" or "% of a copy" at least.
    """

    what: str
    case: str
    limit: float
    unit: str = "us"

    @property
    def at_most(self) -> bool:
        return self.unit == "us"

    def value_of(self, seconds: float, kernels: Sequence[Prediction]) -> float:
        """Return the time of the case in the goal's unit."""
        if self.unit == "us":
            return seconds * 1e6
        if self.unit == "TFLOP/s":
            return sum(p.operations for p in kernels) / seconds / 1e12
        return 100 * kernels[0].moved / (seconds - H100.gap * len(kernels)) / H100.copy


_SENTENCES = "sentences-b64h16k{}-p0.1-bfloat16-train"
GOALS = (
    Goal("sentences padded to 256, B 64, H 16, p 0.1, forward + backward", _SENTENCES.format(256), 200),
    Goal("the same padded to its longest", _SENTENCES.format("max"), 110),
    Goal("the same packed", _SENTENCES.format(256) + " packed", 60),
    Goal("4k ragged, B 4, p 0.1, forward + backward", "long-b4h16k4096-p0.1-bfloat16-train", 2800),
    Goal("dense d 64, 4k, forward", "full-b4h16k4096-p0.0-bfloat16-infer", 420, "TFLOP/s"),
    *(
        Goal(f"LayerNorm of {d} columns, {way}", f"layer norm 16384x{d} {way}", 90, "% of a copy")
        for d in (512, 1024, 2048, 4096, 8192)
        for way in ("forward", "backward")
    ),
)


@dataclass(frozen=True)
class Peer:
    """A published figure."""

    what: str
    figure: str
    source: str


_FA3 = "J. Shah et al., FlashAttention-3, 2024"
PEERS = (
    Peer("FlashAttention-3, d 64, 4k forward / backward", "476 / 453 TFLOP/s", _FA3),
    Peer("cuDNN, d 64, 4k forward", "408 TFLOP/s", _FA3),
    Peer("Triton, d 64, 4k forward", "400 TFLOP/s", _FA3),
    Peer("FlashAttention-2, d 64, 4k forward", "321 TFLOP/s", _FA3),
    Peer("FlashAttention-3, d 64, 4k forward, causal", "420 TFLOP/s", _FA3),
    Peer("Triton / FlashAttention-3, d 128, 4k forward", "389 / 638 TFLOP/s", _FA3),
    Peer("FlashAttention-4, H200, d 128, 4k forward / backward", "734 / 636 TFLOP/s", "published for FlashAttention-4"),
    Peer(
        "Triton's tutorial, newer, d 128, 4k forward",
        "458, 460 TFLOP/s",
        "pytorch/benchmark, pull 2391; facebookexperimental/triton, pull 206",
    ),
    Peer("the same with producers and consumers", "501 TFLOP/s", "facebookexperimental/triton, pull 206"),
    Peer(
        "Liger LayerNorm fp32, 1,024 / 4,096 / 8,192 columns, forward",
        "1780 / 2630 / 2833 GB/s",
        "Liger's benchmark tables",
    ),
    Peer("Liger LayerNorm fp32, the same, backward", "419 / 1211 / 1287 GB/s", "Liger's benchmark tables"),
    Peer("torch LayerNorm fp32, the same, forward", "1423 / 2028 / 1758 GB/s", "Liger's benchmark tables"),
    Peer("torch LayerNorm fp32, the same, backward", "832 / 1126 / 1207 GB/s", "Liger's benchmark tables"),
    Peer(
        "cuDNN LayerNorm fp16, 1,024 / 4,096 columns, backward", "1094 / 1423 GB/s", "cudnn-frontend's benchmark tables"
    ),
    Peer("quack RMSNorm, over 4,096 columns, forward", "about 3000 GB/s", "quack's notes"),
)
