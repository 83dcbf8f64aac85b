"""Translate a whole text: one batch at a time, several batches at a time, and with CTranslate2's translate_file.

    python benchmarks/compare_translate.py --model runs/en-de --source val.en --target val.de --out results

The lines of SOURCE are repeated up to LINES. All sides have the weights of the run and the same search: greedy, or
beam 5 with the slots and length penalty of CTranslate2 (docs/serve.md). The time of transformer_fast includes
splitting text into pieces and joining them; CTranslate2 reads and writes pieces, so its time does not. CTranslate2 is
timed with each batch size of PEER_TOKENS, once with all threads on one batch and once with one thread per batch; the
fastest counts. transformer_fast has its default batch size, with one worker and with one worker per thread.

Each side runs in its own process (apart.py). The sides take turns, ROUNDS times, and the fastest round of each counts.
Answers are compared by BLEU, and by the share of lines equal to those of transformer_fast.

With --out, compare_translate.json is written there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import records
import torch
from apart import Apart, from_thread_that_ends

from transformer_fast import GenerationConfig
from transformer_fast.translation import Trained, load_trained, read_lines
from transformer_fast.translation.checkpoints import export_ctranslate2
from transformer_fast.translation.evaluate import corpus_bleu
from transformer_fast.translation.translator import Translator

PEER_TOKENS = (1024, 4096, 16384)
SLOTS: dict[str, Any] = {"slots": "keep", "early_stop": True, "length_norm": "power", "renormalize": True}
SEARCHES = {
    "greedy": GenerationConfig(beam=1),
    "beam 5": GenerationConfig(beam=5, length_penalty=1.0, **SLOTS),
}
MOST_TOKENS = 256
"""Of an answer."""

Side = Callable[[], list[str]]


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one side of a search: seconds per round, BLEU, and the share of lines equal to ours."""

    search: str
    precision: str
    side: str
    seconds: list[float]
    bleu: float
    same: float


def ours(run_folder: str, lines: list[str], config: GenerationConfig, workers: int) -> Side:
    """Translate the lines with Translator, this many batches at a time."""
    trained = load_trained(run_folder)
    trained.model.requires_grad_(False)

    def run() -> list[str]:
        say = Translator(trained.model, trained.tokenizer, config=config)
        return list(say.translate(lines, workers=workers))

    return run


def peer(folder: Path, config: GenerationConfig, precision: str, tokens: int, threads: int, batches: int) -> Side:
    """Translate the file of :func:`write_pieces` with CTranslate2, from the folder of `export`, with this many
    batches at a time and threads per batch."""
    import ctranslate2

    compute_type = {"fp32": "float32", "int8": "int8_float32"}[precision]
    options: dict[str, Any] = {"compute_type": compute_type, "intra_threads": threads, "inter_threads": batches}
    library = from_thread_that_ends(lambda: ctranslate2.Translator(str(folder), **options))
    source, target = folder / "source", folder / "target"

    def run() -> list[str]:
        library.translate_file(
            str(source), str(target), max_batch_size=tokens, batch_type="tokens", beam_size=config.beam,
            length_penalty=config.length_penalty, min_decoding_length=0, max_decoding_length=config.max_length,
        )  # fmt: skip
        return target.read_text(encoding="utf-8").splitlines()

    return run


def write_pieces(trained: Trained, lines: list[str], path: Path) -> None:
    """Each line as its pieces, with spaces between them."""
    tokenizer = trained.tokenizer
    pieces = (tokenizer.source_pieces(ids[:-1]) for ids in tokenizer.encode_source(lines))
    path.write_text("".join(" ".join(line) + "\n" for line in pieces), encoding="utf-8")


def texts(lines: Iterable[str]) -> list[str]:
    """Pieces with spaces between them -> text."""
    kept = ([piece for piece in line.split(" ") if piece not in ("<s>", "<pad>")] for line in lines)
    return ["".join(pieces).replace("\u2581", " ").strip() for pieces in kept]


def compare(
    run_folder: str, folder: Path, lines: list[str], target: list[str], search: str, precision: str, rounds: int
) -> list[Result]:
    """Every side of one search in one precision, each answer against the translations of the first lines."""
    quantize = None if precision == "fp32" else precision
    tokenizer, threads = load_trained(run_folder).tokenizer, torch.get_num_threads()
    more = {"quantize": quantize, "suppress": tokenizer.never, "max_length": MOST_TOKENS, "keep_weights": True}
    config = dataclasses.replace(SEARCHES[search], **more)
    sides = {
        "ours": Apart(ours, run_folder, lines, config, 1),
        f"ours, {threads} workers": Apart(ours, run_folder, lines, config, threads),
    }
    for batches, tokens in itertools.product(dict.fromkeys((1, threads)), PEER_TOKENS):
        given = folder, config, precision, tokens, threads // batches, batches
        sides[f"CTranslate2, {batches} x {tokens} tokens"] = Apart(peer, *given, threads=1)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    said: dict[str, list[str]] = {}
    for name, run in itertools.chain.from_iterable([sides.items()] * rounds):
        start = time.perf_counter()
        answers = run()
        seconds[name].append(round(time.perf_counter() - start, 3))
        said[name] = (answers if name.startswith("ours") else texts(answers))[: len(target)]
        print(f"| {search} | {precision} | {name} | {len(lines) / seconds[name][-1]:.0f} |", flush=True)
    found = []
    for name, side in sides.items():
        side.close()
        bleu = corpus_bleu(said[name], target, lowercase=tokenizer.lowercase).score
        same = sum(one == other for one, other in zip(said[name], said["ours"], strict=True)) / len(target)
        found.append(Result(search, precision, name, seconds[name], round(bleu, 2), round(same, 4)))
    return found


def summary(results: list[Result], lines: int) -> str:
    """Return a table: lines per second, and how many times faster ours is."""
    rows = ["| search | precision | side | lines/s | ours is faster by | BLEU | lines as ours |", "| --- " * 7 + "|"]
    for key, group in itertools.groupby(results, lambda result: (result.search, result.precision)):
        own = list(group)
        for result in own:
            faster = min(result.seconds) / min(own[0].seconds)
            rows.append(
                f"| {key[0]} | {key[1]} | {result.side} | {lines / min(result.seconds):.0f} | {faster:.2f} | "
                f"{result.bleu} | {result.same:.1%} |"
            )
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that `train --save` wrote")
    parser.add_argument("--source", required=True, help="file of sentences, one per line, plain or .gz")
    parser.add_argument("--target", required=True, help="file of translations, line by line")
    parser.add_argument("--lines", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument(
        "--search", nargs="+", choices=SEARCHES, default=list(SEARCHES), help="searches to compare (default: all)"
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("fp32", "int8"),
        default=["fp32", "int8"],
        help="precisions to compare (default: both)",
    )
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of threads (default: all cores)"
    )
    parser.add_argument("--out", type=Path, help="folder for compare_translate.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    trained = load_trained(args.model)
    source, target = read_lines(args.source), read_lines(args.target)
    lines = list(itertools.islice(itertools.cycle(source), args.lines))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "ctranslate2"
        export_ctranslate2(args.model, folder)
        write_pieces(trained, lines, folder / "source")
        for search, precision in itertools.product(args.search, args.precision):
            results += compare(args.model, folder, lines, target[: len(lines)], search, precision, args.rounds)
    print(summary(results, len(lines)))
    if args.out:
        run = {
            "what": "a text translated line by line, in seconds per round",
            "lines": len(lines),
            "model": {name: getattr(trained.config, name) for name in ("d_model", "heads", "layers", "d_ff")},
            "results": [dataclasses.asdict(result) for result in results],
        }
        records.save(args.out / "compare_translate.json", run, "ctranslate2")


if __name__ == "__main__":
    main()
