"""Compare generation with int8 weights to fp32: BLEU on the sentences of a file, with a trained model.

    python benchmarks/compare_quantized.py --model runs/en-de --source val.en --target val.de --out results

Both translate the same lines, greedily and by beam search. The exit code is 1 if int8 loses more than --loss BLEU.
With --out, compare_quantized.json is written there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

import transformer_fast
from transformer_fast import extension
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
        report: dict[str, Any] = {
            "what": "translations with quantised weights against fp32",
            "sentences": len(source),
            "vector_unit": extension.build_info().get("instruction_set"),
            "model": {name: getattr(trained.config, name) for name in ("d_model", "heads", "layers", "d_ff")},
            "versions": {"torch": torch.__version__, "transformer_fast": transformer_fast.__version__},
            "results": [dataclasses.asdict(result) for result in results],
        }
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "compare_quantized.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    exact = {result.search: result.bleu for result in results if result.weights == "fp32"}
    return int(any(result.bleu < exact[result.search] - args.loss for result in results))


if __name__ == "__main__":
    sys.exit(main())
