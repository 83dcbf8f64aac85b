"""Random calls of attention, as configurations."""

from __future__ import annotations

import dataclasses
import itertools
import random

import torch
from hypothesis import strategies as st

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("contiguous", "heads behind", "sliced", "one head for all", "dim first")
DIALECTS = ("keep", "int keep", "blocked", "float blocked")
GIVEN = ("as they are", "refilled", "from inference mode", "of a subclass")


SEEDS = st.integers(0, 2**40)


@dataclasses.dataclass(frozen=True)
class Config:
    """One call. ``parts`` are the mask's: "dense", "padding", "lengths", "lengths per query", "causal", "window",
    "documents", "prefix", "intervals", "union", "alibi", "relative"; and "sinks"."""

    number: int
    kind: str  # "padded", "packed", "decode"
    B: int
    H: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    dtype: str
    layout: str
    dialect: str
    parts: tuple[str, ...]
    causal: int
    bias: str  # "none", "given", "learned"
    dropout_p: float
    empty_rows: str
    outputs: str  # "out", "weights", "dropped", "logsumexp"
    scale: float | None
    window: tuple[int | None, int | None, int]  # left, right and offset
    softcap: float | None = None
    documents: int = 1  # approximate number of tokens per document
    offset: int = 0  # position of the first query among the keys, for parts that depend on the distance
    given: str = GIVEN[0]  # kind of the mask's tensors; a tensor subclass is used for query, key and value too

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.number)


def config(seed: int, number: int, backend: str = "native", kind: str | None = None) -> Config:
    """Return configuration ``number`` of a seed, of any kind or of this one."""
    chance = random.Random(seed * 1_000_003 + number)
    choose = chance.choice
    drawn = choose(("padded",) * 6 + ("packed",) * 3 + ("decode",))
    kind = kind or drawn
    # The interpreter takes milliseconds for each program: fewer heads, and lengths of up to three tiles.
    interpreted = backend == "triton" and DEVICE.type == "cpu"
    longest = 70 if interpreted else 200
    Lq = choose((1, 2, 15, 17, 33, chance.randint(1, longest))) if kind != "decode" else chance.randint(1, 5)
    Hkv = choose((1, 1, 2) if interpreted else (1, 1, 2, 3))
    D = choose((1, 3, 8, 16, 20, 32, 40, 64) + (() if interpreted else (80, 128)))
    padded = kind == "padded"
    parts = tuple(
        part
        for part, p in {
            "dense": 0.35,
            "padding": 0.25,
            "lengths": 0.35,
            "lengths per query": 0.15,
            "causal": 0.35,
        }.items()
        if padded and chance.random() < p
    )
    left, right = chance.randint(0, longest), choose((0, 0, None, chance.randint(0, 20)))
    left = choose((left, left % 8, left % 20, left if right is None else None))
    window = left, right, choose((0, 0, chance.randint(-20, 20)))
    if chance.random() < 0.3:
        parts = (*parts, "window")
    others = {"documents": 0.2, "alibi": 0.15, "relative": 0.15, "sinks": 0.15}
    parts = (*parts, *[part for part, p in others.items() if chance.random() < p])
    if padded and number % 9 == 0:
        parts = (*parts, "prefix")
    if padded and number % 7 == 0:
        parts = (*parts, ("intervals", "union")[number % 2])
    return Config(
        number=number,
        kind=kind,
        B=chance.randint(1, 2 if interpreted else 3),
        H=Hkv * choose((1, 1, 2) if interpreted else (1, 1, 2, 4)),
        Hkv=Hkv,
        Lq=Lq,
        Lk=choose((Lq, 1, 31, 32, 65, chance.randint(1, longest))),
        D=D,
        Dv=choose((D, D, D, 12)) if kind != "decode" else D,
        dtype=choose(tuple(DTYPES)),
        layout=choose(LAYOUTS),
        dialect=choose(DIALECTS),
        parts=parts,
        causal=choose((0, 0, chance.randint(-Lq, longest))) if padded else choose((0, 1)),
        bias=choose(("none", "none", "given", "learned")) if padded else "none",
        dropout_p=choose((0.0, 0.0, 0.1, 0.3, 0.9)) if kind != "decode" else 0.0,
        empty_rows=choose(("uniform", "zero")),
        outputs=choose(("out", "out", "out", "weights", "dropped", "logsumexp")) if padded else "out",
        scale=choose((None, None, None, 0.5, -0.3, 1.0)),
        window=window,
        softcap=choose((None,) * 6 + (0.7, 5.0, 50.0)),
        documents=choose((1, 3, 20, 50)),
        offset=choose((0, 0, chance.randint(-20, 20))),
        given=GIVEN[0] if interpreted else choose(GIVEN),
    )


def configs(backend: str, kind: str | None = None) -> st.SearchStrategy[Config]:
    """Configurations of any seed. If hypothesis drew each part by itself, half of the calls would be alike."""
    return st.builds(config, SEEDS, st.integers(0, 9999), st.just(backend), st.just(kind))


def combinations() -> list[Config]:
    """Every combination of the parts of a mask, with a bias and without, with dropout and without, for both kinds of
    empty rows; on two tiles of keys where tiles are small. Documents, distances, sinks and a softcap come in turn."""
    lengths, rest = ((), ("lengths",), ("lengths per query",)), ("dense", "padding", "causal", "window")
    others = [part for n in range(len(rest) + 1) for part in itertools.combinations(rest, n)]
    plain = {"kind": "padded", "B": 2, "H": 2, "Hkv": 1, "Lq": 5, "Lk": 37, "D": 8, "Dv": 8, "dtype": "fp32"}
    plain |= {"layout": "contiguous", "dialect": "keep", "causal": 3, "outputs": "out", "scale": None}
    plain |= {"window": (5, 9, 8), "documents": 12}
    options = itertools.product(lengths, others, ("none", "learned"), (0.0, 0.3), ("uniform", "zero"))
    everything = ("documents", "alibi", "relative", "sinks")
    turns = [((), None), *[((part,), None) for part in everything], ((), 2.0), (everything, 2.0)]
    return [
        Config(
            number=number, parts=(*first, *second, *turn), bias=bias, dropout_p=p, empty_rows=empty_rows,
            softcap=softcap, **plain,
        )
        for number, ((first, second, bias, p, empty_rows), (turn, softcap)) in enumerate(
            zip(options, itertools.cycle(turns))
        )
    ]  # fmt: skip
