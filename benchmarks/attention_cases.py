"""Calls of attention that are measured, and the resources that each needs.

Sentence batches have lognormal lengths with a median of 24 tokens and a sigma of 0.62, at most 256: of a batch of 64
padded to its longest, some 12 % of the scores are of real pairs; padded to 256, some 2 %. Long batches have lengths
uniform between a quarter of the padded length and all of it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

MEDIAN, SIGMA, LONGEST = 24.0, 0.62, 256
LONGEST_STORED = 4096
"""Peers that store every score are left out of cases with more keys than this."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes:
        lengths: "sentences", "long" (see the module) or "full" (no padding).
        B, H, D: batch, heads, head size.
        L: padded length; None for the longest sequence of the batch.
        Lq: padded number of queries, if other than L; then only keys have lengths.
        causal: a look-ahead mask on top, aligned to the last key where Lq differs.
        cross: queries and keys have lengths of their own, as in the attention of a decoder to an encoder.
    """

    lengths: str
    B: int
    H: int
    L: int | None
    D: int = 64
    Lq: int | None = None
    causal: bool = False
    cross: bool = False
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    backward: bool = True

    def __str__(self) -> str:
        kind = self.lengths + " cross" * self.cross + " causal" * self.causal
        size = f"b{self.B}h{self.H}" + (f"q{self.Lq}" if self.Lq is not None else "")
        padded = "max" if self.L is None else self.L
        dtype = str(self.dtype).removeprefix("torch.")
        d = "" if self.D == 64 else f"d{self.D}"
        return f"{kind}-{size}k{padded}{d}-p{self.dropout_p}-{dtype}-{'train' if self.backward else 'infer'}"

    def key_lengths(self) -> Tensor:
        """int32 (B,) on the CPU: keys of each sequence, the same in every run."""
        return self._draw(seed=1)

    def query_lengths(self) -> Tensor:
        """int32 (B,) on the CPU: real queries of each sequence; padded, the other rows are computed too."""
        if self.Lq is not None:
            return torch.full((self.B,), self.Lq, dtype=torch.int32)
        return self._draw(seed=2) if self.cross else self.key_lengths()

    def _draw(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.lengths == "sentences":
            drawn = (torch.randn(self.B, generator=generator) * SIGMA).exp() * MEDIAN
            return drawn.round().clamp(1, self.L or LONGEST).to(torch.int32)
        if self.lengths == "long":
            return torch.randint(self.L // 4, self.L + 1, (self.B,), generator=generator).to(torch.int32)
        return torch.full((self.B,), self.L, dtype=torch.int32)

    @property
    def queries(self) -> int:
        """Padded number of queries."""
        return self.Lq or self.L or int(self.query_lengths().max())

    @property
    def keys(self) -> int:
        """Padded number of keys."""
        return self.L or int(self.key_lengths().max())

    @property
    def causal_offset(self) -> int | None:
        """Causal offset for ``AttentionMask.causal``; None without look-ahead."""
        return (0 if self.Lq is None else self.keys - self.Lq) if self.causal else None

    def pairs(self) -> int:
        """(query, key) pairs of one head with a score that counts, over the batch, rows of padding included."""
        total = 0
        for n in self.key_lengths().tolist():
            if self.causal:
                last = torch.arange(self.queries) + self.causal_offset + 1
                total += int(last.clamp(0, n).sum())
            else:
                total += self.queries * n
        return total

    def useful_pairs(self) -> int:
        """Number of :meth:`pairs` without padded rows, which a packed batch computes."""
        total = 0
        for m, n in zip(self.query_lengths().tolist(), self.key_lengths().tolist(), strict=True):
            if self.causal:
                last = torch.arange(m) + self.causal_offset + 1
                total += int(last.clamp(0, n).sum())
            else:
                total += m * n
        return total

    def operations(self, pairs: int) -> int:
        """Floating-point operations of the products: two forward, five backward, 2 D each for a pair and head."""
        return (14 if self.backward else 4) * self.H * pairs * self.D

    def bytes_moved(self, queries: int, keys: int) -> int:
        """Bytes that must be read and written, for these numbers of rows of q and of k in all sequences.

        Keys and values past a length are not read, but their gradients are written.
        """
        real_keys = int(self.key_lengths().sum())
        rows = 2 * queries + 2 * real_keys  # q and out, k and v
        if self.backward:
            rows += 4 * queries + 2 * real_keys + 2 * keys  # q, out and their gradients; k, v; theirs
        return rows * self.H * self.D * self.dtype.itemsize


F32, F16 = torch.float32, torch.float16


def _sentences(B: int, H: int, *, backwards: tuple[bool, ...] = (False, True), **options: object) -> list[Case]:
    return [
        Case("sentences", B, H, L, dropout_p=p, backward=backward, **options)
        for L in (None, LONGEST)
        for p in (0.0, 0.1)
        for backward in backwards
    ]


CUDA = [
    *_sentences(64, 16),
    *_sentences(256, 8),
    *_sentences(64, 8, backwards=(True,)),
    *_sentences(256, 16, backwards=(True,)),
    *(Case("sentences", 64, 16, LONGEST, dropout_p=p, dtype=t) for t in (F16, F32) for p in (0.0, 0.1)),
    *(Case("sentences", 64, 16, LONGEST, causal=True, dropout_p=p) for p in (0.0, 0.1)),
    *(Case("sentences", 64, 16, LONGEST, cross=True, dropout_p=p) for p in (0.0, 0.1)),
    *(Case("long", 4, 16, 4096, dropout_p=p, backward=b) for p in (0.0, 0.1) for b in (False, True)),
    *(Case("long", 2, 8, 16384, dropout_p=p) for p in (0.0, 0.1)),
    Case("long", 4, 16, 4096, causal=True, dropout_p=0.1),
    *(Case("full", 4, 16, 4096, dropout_p=p) for p in (0.0, 0.1)),
    Case("full", 4, 16, 4096, backward=False),
    Case("full", 4, 8, 4096, D=128, backward=False),
    *(Case("full", 4, 16, 4096, causal=True, backward=b) for b in (False, True)),
    Case("full", 16, 16, 1024),
]

CPU = [
    *(Case("sentences", 64, 8, None, dropout_p=p, dtype=F32) for p in (0.0, 0.1)),
    *(Case("sentences", 64, 8, LONGEST, dropout_p=p, dtype=F32) for p in (0.0, 0.1)),
    Case("sentences", 64, 8, None, dtype=F32, backward=False),
    Case("sentences", 64, 8, None, causal=True, dropout_p=0.1, dtype=F32),
    Case("sentences", 64, 8, None, cross=True, dropout_p=0.1, dtype=F32),
    Case("sentences", 64, 8, None, dropout_p=0.1),
    Case("long", 2, 8, 1024, dropout_p=0.1, dtype=F32),
    Case("full", 64, 8, 64, dtype=F32),
    Case("full", 64, 8, 64),
    Case("full", 1, 8, 512, causal=True, dtype=F32),
    Case("full", 2, 8, 1024, causal=True, dtype=F32, backward=False),
    Case("sentences", 64, 8, LONGEST, Lq=1, dtype=F32, backward=False),
    Case("full", 1, 1, 5, D=8, Lq=1, dtype=F32, backward=False),
]

CASES = {"cpu": CPU, "cuda": CUDA}
