"""Compare generation with int8 weights to fp32: BLEU on the sentences of a file, with a trained model.

    python benchmarks/compare_quantized.py --model runs/en-de --source val.en --target val.de --out results

Both translate the same lines, greedily and by beam search. The exit code is 1 if int8 loses more than --loss BLEU.
With --out, compare_quantized.json is written there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import records
import torch

from transformer_fast.translation import Trained, load_trained, read_lines
from transformer_fast.translation.evaluate import corpus_bleu
from transformer_fast.translation.translator import Translator


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one type of weights in one search."""

    search: str
    weights: str
    bleu: float
    same: float  # share of lines that are translated as in fp32


def compare(trained: Trained, source: list[str], target: list[str], beam: int) -> list[Result]:
    """Results in fp32 and in int8."""
    results: list[Result] = []
    exact: list[str] = []
    for weights in ("fp32", "int8"):
        quantize = None if weights == "fp32" else weights
        config = dataclasses.replace(trained.generation, beam=beam, quantize=quantize)
        said = list(Translator(trained.model, trained.tokenizer, config=config).translate(source))
        exact = exact or said
        same = sum(one == other for one, other in zip(said, exact, strict=True)) / len(said)
        score = corpus_bleu(said, target, lowercase=trained.tokenizer.lowercase).score
        results.append(Result(f"beam {beam}", weights, score, same))
        print(f"| beam {beam} | {weights} | {score:.2f} | {same:.1%} |", flush=True)
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that `train --save` wrote")
    parser.add_argument("--source", required=True, help="file of sentences, one per line, plain or .gz")
    parser.add_argument("--target", required=True, help="file of translations, line by line")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 5], help="beam widths; 1 is greedy (default: 1 5)")
    parser.add_argument(
        "--loss", type=float, default=0.2, help="largest loss of BLEU that passes (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of threads (default: all cores)"
    )
    parser.add_argument("--out", type=Path, help="folder for compare_quantized.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    trained = load_trained(args.model)
    source, target = read_lines(args.source), read_lines(args.target)
    print("| search | weights | BLEU | lines as in fp32 |\n| --- | --- | --- | --- |")
    results = [result for beam in args.beams for result in compare(trained, source, target, beam)]
    if args.out:
        run = {
            "what": "translations with quantised weights against fp32",
            "sentences": len(source),
            "model": {name: getattr(trained.config, name) for name in ("d_model", "heads", "layers", "d_ff")},
            "results": [dataclasses.asdict(result) for result in results],
        }
        records.save(args.out / "compare_quantized.json", run)
    exact = {result.search: result.bleu for result in results if result.weights == "fp32"}
    return int(any(result.bleu < exact[result.search] - args.loss for result in results))


if __name__ == "__main__":
    sys.exit(main())
