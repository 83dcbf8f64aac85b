"""Random wrong calls of the operators of ``torch.ops.transformer_fast``: several arguments changed at once.

    python -m tests.fuzz.fuzz_arguments --seed 0 --count 2000

Each call ends in an error that names an argument, or in the right result (tests/support/op_arguments.py). A call is a
pure function of the seed and its number, so that one that fails is repeated alone:

    python -m tests.fuzz.fuzz_arguments --seed 0 --first 17 --count 1
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings

from tests.support.op_arguments import Recorded, changed_at_random, problem_of, recorded


def wrong_call(seed: int, number: int) -> tuple[Recorded, list[str]]:
    """Return call `number` of a seed, and its changes."""
    chance = random.Random(seed * 1_000_003 + number)
    name = chance.choice(sorted(recorded()))
    return changed_at_random(chance.choice(recorded()[name]), chance, chance.choice((1, 2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    start = time.monotonic()
    for number in range(options.first, options.first + options.count):
        call, said = wrong_call(options.seed, number)
        if problem := problem_of(call):
            sys.exit(f"wrong call {number} of {call.name}, {', '.join(said)}: {problem}")
    print(f"{options.count} wrong calls of {len(recorded())} operators: no problem, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
