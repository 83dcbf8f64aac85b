"""Compare decoding with and without a cache, on the sentences of a file and with a trained model.

    python benchmarks/compare_cached.py --model runs/en-de --source val.en --sentences 1000 --out results

Both decode the same batches, greedily and by beam search. The tokens must be equal, and the scores equal up to
rounding. The two sides round differently, so an exact tie may be resolved differently. A different answer counts as a
tie only if a second uncached search, which records its margins, proves it: at some step two candidates that it ranked
one after the other (or two of its answers) differ by less than --tie. Every other difference is an error, and so is a
score that differs by more; then the exit code is 1.

The table and the first differences are printed. With --out, compare_cached.json is written there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import records
import torch
from torch import Tensor, nn

from transformer_fast import GenerationConfig, generate
from transformer_fast.generation import Hypothesis
from transformer_fast.generation.beam import Search
from transformer_fast.translation import load_trained, read_lines

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIES = {"fp32": 1e-4, "bf16": 0.125}
"""Scores this close may change places: several times what the rounding of the logits adds up to over a sentence."""


class MarginSearch(Search):
    """Search that records, per sentence, the smallest difference between two candidates that it ordered: survivors
    of a step, the last survivor and the first dropped candidate, and the answers.

    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.margins = [float("inf")] * len(self.found)

    @property
    def _candidates_per_row(self) -> int:
        return self.candidates + 1

    def _best_per_sentence(self, total: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = total.shape[1]
        grid = total.new_full((len(self.found), self.width, width), -torch.inf)
        grid[self.sentence, self.slot] = total.masked_fill(total.isnan(), -torch.inf)
        best = grid.flatten(1).topk(min(self.candidates + 1, self.width * width), dim=1).values
        for index, scores in enumerate(best.tolist()):
            self._close(index, scores)
        return super()._best_per_sentence(total, token)

    def run(self) -> list[list[Hypothesis]]:
        found = super().run()
        for index, hypotheses in enumerate(self.found):
            ranked = sorted(hypotheses, key=self._rank)[: self.config.n_best + 1]
            # The score decides among hypotheses that were cut off, where the beam stays wide.
            self._close(index, [h.score for h in ranked if h.finished or self.keeps_slots])
        return found

    def _close(self, index: int, scores: list[float]) -> None:
        gaps = [a - b for a, b in itertools.pairwise(scores) if b > -float("inf")]
        self.margins[index] = min([self.margins[index], *gaps])


@contextlib.contextmanager
def recording(searches: list[MarginSearch]) -> Iterator[None]:
    """Let `generate` use MarginSearch for every search, greedy ones too (a beam of 1 is greedy decoding)."""
    module = importlib.import_module("transformer_fast.generation.generate")
    before = module.Search, module.GreedySearch

    def search(*arguments: Any) -> MarginSearch:
        searches.append(MarginSearch(*arguments))
        return searches[-1]

    module.Search = module.GreedySearch = search
    try:
        yield
    finally:
        module.Search, module.GreedySearch = before


def margins(decode: Callable[[], Any]) -> list[float]:
    """Return the margin of each sentence in a call of `generate` that does not sample."""
    searches: list[MarginSearch] = []
    with recording(searches):
        decode()
    return searches[0].margins


@dataclass
class Difference:
    """A different answer: the sentence's number, both answers, and the margin of the uncached search."""

    sentence: int
    cached: list[int]
    uncached: list[int]
    margin: float
    score: float


@dataclass
class Outcome:
    """Outcome of one kind of search: number of sentences, differences, and CPU seconds."""

    search: str
    sentences: int
    differences: list[Difference]
    largest_score_difference: float
    cached_seconds: float
    uncached_seconds: float

    def counts(self, tie: float) -> tuple[int, int]:
        """Numbers of ties and of wrong tokens."""
        ties = sum(d.margin <= tie for d in self.differences)
        return ties, len(self.differences) - ties


def compare(
    model: nn.Module | Sequence[nn.Module],
    batches: list[tuple[list[int], dict[str, Any]]],
    config: GenerationConfig,
    search: str,
) -> Outcome:
    """Decode every batch (numbers of its sentences, arguments of `generate`) with and without a cache."""
    outcome = Outcome(search, 0, [], 0.0, 0.0, 0.0)
    for numbers, given in batches:
        decode = {
            cache: lambda cache=cache: generate(model, config=replace(config, cache=cache), **given)  # noqa: B023
            for cache in (True, False)
        }
        found = {}
        for cache in (True, False):
            started = time.process_time()
            found[cache] = decode[cache]()
            seconds = time.process_time() - started
            outcome.cached_seconds += seconds if cache else 0
            outcome.uncached_seconds += 0 if cache else seconds
        known: list[float] = []
        for place, (ours, theirs) in enumerate(zip(found[True], found[False], strict=True)):
            outcome.sentences += 1
            if [h.tokens for h in ours] != [h.tokens for h in theirs]:
                known = known or margins(decode[False])
                answers = ours[0].tokens, theirs[0].tokens
                difference = Difference(numbers[place], *answers, known[place], ours[0].score - theirs[0].score)
                outcome.differences.append(difference)
                continue
            gaps = [abs(a.score - b.score) for a, b in zip(ours, theirs, strict=True)]
            outcome.largest_score_difference = max(outcome.largest_score_difference, *gaps)
    return outcome


def make_batches(sources: list[list[int]], size: int, **marks: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Sentences of like length together, padded."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    batches = []
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        lengths = torch.tensor([len(sources[i]) for i in numbers])
        src = nn.utils.rnn.pad_sequence([torch.tensor(sources[i]) for i in numbers], batch_first=True)
        batches.append((numbers, {"src": src, "src_lengths": lengths, **marks}))
    return batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that `train --save` wrote")
    parser.add_argument("--source", required=True, help="file of sentences, one per line")
    parser.add_argument("--sentences", type=int, default=1000, help="number of sentences (default: %(default)s)")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 5], help="beam widths; 1 is greedy (default: 1 5)")
    parser.add_argument("--batch", type=int, default=50, help="sentences per batch (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of the model (default: fp32)")
    parser.add_argument("--tie", type=float, help=f"largest difference of tied scores (default: by dtype, {TIES})")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of threads (default: all cores)"
    )
    parser.add_argument("--show", type=int, default=3, help="number of differences to print (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for compare_cached.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tie = TIES[args.dtype] if args.tie is None else args.tie

    trained = load_trained(args.model)
    model, tokenizer = trained.model.to(DTYPES[args.dtype]), trained.tokenizer
    lines = read_lines(args.source)[: args.sentences]
    sources = tokenizer.encode_source(lines)
    batches = make_batches(sources, args.batch, bos=tokenizer.bos, eos=tokenizer.eos)
    run: dict[str, Any] = {
        "what": "cached against uncached decoding; seconds of the process, all threads together",
        "sentences": len(lines),
        "dtype": args.dtype,
        "tie": tie,
        "model": {name: getattr(trained.config, name) for name in ("d_model", "heads", "layers", "d_ff")},
        "results": [],
    }
    failed = False
    print("| search | sentences | same tokens | ties | wrong | largest score difference | cached s | uncached s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for beam in args.beams:
        name = "greedy" if beam == 1 else f"beam {beam}"
        outcome = compare(model, batches, GenerationConfig(beam=beam), name)
        ties, wrong = outcome.counts(tie)
        failed |= wrong > 0 or outcome.largest_score_difference > tie
        same = outcome.sentences - len(outcome.differences)
        columns = [name, outcome.sentences, same, ties, wrong, f"{outcome.largest_score_difference:.1e}"]
        columns += [f"{seconds:.1f}" for seconds in (outcome.cached_seconds, outcome.uncached_seconds)]
        print(f"| {' | '.join(map(str, columns))} |", flush=True)
        for d in sorted(outcome.differences, key=lambda d: -d.margin)[: args.show]:
            print(f"  line {d.sentence + 1}, margin {d.margin:.1e}, score {d.score:+.1e}: {lines[d.sentence]}")
            for kind, tokens in (("cached", d.cached), ("uncached", d.uncached)):
                print(f"    {kind:8} {tokenizer.decode([tokens])[0]}")
        run["results"].append({**asdict(outcome), "ties": ties, "wrong": wrong})
    if args.out:
        records.save(args.out / "compare_cached.json", run)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
