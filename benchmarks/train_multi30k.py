"""Train one recipe on Multi30k with the fast ops and with eager PyTorch, side by side, for the same CPU time.

    python benchmarks/train_multi30k.py --data multi30k --out runs/multi30k --cpu-minutes 50 --seeds 0 1 2

Both sides are `transformer_fast.translation.train` with one recipe and one thread, in a process of its own, once per
seed: the same initial weights, the same batches in the same order. The sides differ in the backend. "fast" is the
backend that is chosen by default, without padding in the layers; "eager" is backend "reference", plain PyTorch for
every op, with padding. Eager draws its dropout masks with PyTorch's generator, so at equal updates its curve has other
dropout masks. With --same-dropout the masks are equal; then both sides run with padding, and eager loses 40 % of its
speed, because it computes the masks in integer arithmetic. A difference between the sides at equal updates means
something only if it is larger than the difference between seeds of one side; the record has both.

The budget is CPU time of the process (`time.process_time`), validation and checkpoints included. Then each side
translates the validation text with the mean of its last checkpoints and the recipe's beam, on its own backend.

RESULTS gets two files during training: train_multi30k.json (what is known so far; "finished" is true at the end) and
train_multi30k.png, the learning curves: the mean of the seeds in a band from the lowest to the highest. OUT gets the
run folders. The same command continues an interrupted run. --report writes the record of existing runs and trains
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import records
import torch

from transformer_fast import GenerationConfig, backends, reference
from transformer_fast.translation import RunFolder, TrainConfig, load_recipe, load_trained, read_lines, train
from transformer_fast.translation.checkpoint import to_json, write_atomically
from transformer_fast.translation.evaluate import corpus_bleu
from transformer_fast.translation.translator import Translator

SIDES = {"fast": "auto", "eager": "reference"}
COLORS = {"fast": "#b3450d", "eager": "#0b4f8a"}
NAME = "train_multi30k"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train.en.gz, train.de.gz, val.en.gz, val.de.gz"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder for the record (default: results)"
    )
    parser.add_argument("--recipe", default="multi30k-tiny-cpu", help="default: %(default)s")
    parser.add_argument(
        "--cpu-minutes", type=float, default=50.0, help="CPU minutes of training per side (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument(
        "--same-dropout", action="store_true", help="let eager draw the same dropout masks, which is slow"
    )
    parser.add_argument("--report", action="store_true", help="train nothing; write the record of the existing runs")
    parser.add_argument("--only", choices=SIDES, help="train and measure this side only, with the first seed")
    args = parser.parse_args(argv)
    if len(set(args.seeds)) != len(args.seeds):
        parser.error(f"--seeds {' '.join(map(str, args.seeds))}: expected each seed once")
    return args


def folder_of(args: argparse.Namespace, side: str, seed: int) -> Path:
    return args.out / f"{side}-{seed}"


def settings(args: argparse.Namespace, side: str, seed: int) -> TrainConfig:
    """Return the recipe on the data, with the budget as time limit."""
    texts = {
        name: str(args.data / file)
        for name, file in (
            *(("source", "train.en.gz"), ("target", "train.de.gz")),
            *(("valid_source", "val.en.gz"), ("valid_target", "val.de.gz")),
        )
    }
    folder = folder_of(args, side, seed)
    own = {"save": str(folder), "seed": seed, "device": "cpu", "max_time": 60 * args.cpu_minutes}
    own |= {"packed": not args.same_dropout}
    return TrainConfig(**{**load_recipe(args.recipe).training, **texts, **own})


def ordinary_dropout_masks() -> None:
    """Let the reference draw its masks with PyTorch's generator."""
    reference.dropout.elementwise_keep = lambda seed, p, rows, d: torch.rand(rows, d) >= p
    reference.dropout.attention_keep = lambda seed, p, *shape: torch.rand(shape) >= p


def run_side(args: argparse.Namespace, side: str, seed: int) -> None:
    """Train one side to the end of its budget, translate, and leave result.json and valid.hyp in the run folder."""
    torch.set_num_threads(1)
    if side == "eager" and not args.same_dropout:
        ordinary_dropout_masks()
    config, recipe = settings(args, side, seed), load_recipe(args.recipe)
    with backends.backend(SIDES[side]):
        trained_as = train(config, clock=time.process_time)
        if trained_as.stopped == "interrupted":
            raise SystemExit(130)
        trained = load_trained(config.save, which="average" if config.average_last else "last")
        decode = GenerationConfig(**recipe.translation)
        start = time.process_time()
        lines = list(
            Translator(trained.model, trained.tokenizer, config=decode).translate(read_lines(config.valid_source))
        )
        seconds = time.process_time() - start
    folder, references = Path(config.save), read_lines(config.valid_target)
    write_atomically(folder / "valid.hyp", "".join(f"{line}\n" for line in lines).encode("utf-8"))
    cased, lower = (corpus_bleu(lines, references, lowercase=lowercase) for lowercase in (False, True))
    result = {
        "stopped": trained_as.stopped,
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "valid_loss_of_the_mean": trained_as.average_scores.get("valid_loss"),
        "bleu_lowercased": lower.score,
        "bleu_lowercased_signature": lower.signature,
        "bleu_cased": cased.score,
        "bleu_cased_signature": cased.signature,
        "decoding": recipe.translation,
        "decoding_cpu_seconds": round(seconds, 1),
    }
    write_atomically(folder / "result.json", to_json(result))


def progress_of(folder: Path) -> dict[str, Any]:
    """Read the log of a run so far; a last line that is being written is left for the next time."""
    log = RunFolder(folder).log
    lines = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    reports = [line for line in lines if "loss" in line]
    valid = [line for line in lines if "valid_loss" in line]
    rates = sorted(line["tokens_per_second"] for line in reports)
    last = lines[-1] if lines else {}
    return {
        "updates": last.get("step", 0),
        "target_tokens": last.get("tokens", 0),
        "cpu_seconds": round(last.get("seconds", 0.0), 1),
        "target_tokens_a_cpu_second": round(rates[len(rates) // 2]) if rates else None,
        "valid_loss": valid[-1]["valid_loss"] if valid else None,
        "curve": {
            "valid": [[v["step"], round(v["seconds"], 1), round(v["valid_loss"], 4)] for v in valid],
            "train": [[r["step"], round(r["seconds"], 1), round(r["loss"], 4)] for r in reports[::5]],
        },
    }


def write_record(args: argparse.Namespace) -> dict[str, Any]:
    """Write the record and the picture of the current results; return the record."""
    results: dict[str, dict[str, Any]] = {side: {} for side in SIDES}
    for side in SIDES:
        for seed in args.seeds:
            folder = folder_of(args, side, seed)
            result = folder / "result.json"
            found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
            results[side][str(seed)] = progress_of(folder) | found
    compare_early(results)
    record = records.about() | {
        "what": "one recipe and thread, the same seeds and CPU time; the backend differs, and pads or does not",
        "finished": all("bleu_lowercased" in run for runs in results.values() for run in runs.values()),
        "recipe": load_recipe(args.recipe).name,
        "settings": load_recipe(args.recipe).training,
        "cpu_minutes": args.cpu_minutes,
        "seeds": args.seeds,
        "dropout_of_eager": "the same masks" if args.same_dropout else "masks of PyTorch's own generator",
        "summary": summary(results),
        "results": results,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    write_atomically(args.results / f"{NAME}.json", (json.dumps(record) + "\n").encode("utf-8"))
    draw(record, args.results / f"{NAME}.png")
    return record


def compare_early(results: dict[str, dict[str, Any]]) -> None:
    """Add the loss of each run at the last validation that all have passed, which is after about the same updates."""
    runs = [run for own in results.values() for run in own.values()]
    if common := min(len(run["curve"]["valid"]) for run in runs):
        for run in runs:
            run["early_updates"], _, run["early_valid_loss"] = run["curve"]["valid"][common - 1]


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Summary of the runs: how many times as many tokens per CPU second, seed by seed; and the early validation loss of
    either side, seed by seed (:func:`compare_early`)."""
    fast, eager = (list(results[side].values()) for side in SIDES)
    speeds = [
        round(ours["target_tokens_a_cpu_second"] / theirs["target_tokens_a_cpu_second"], 3)
        for ours, theirs in zip(fast, eager, strict=True)
        if ours["target_tokens_a_cpu_second"] and theirs["target_tokens_a_cpu_second"]
    ]
    early = [run for run in (*fast, *eager) if "early_updates" in run]
    losses = {side: [run["early_valid_loss"] for run in results[side].values()] for side in SIDES} if early else None
    overlap = max(map(min, losses.values())) <= min(map(max, losses.values())) if losses else None
    return {
        "tokens_a_cpu_second_fast_over_eager": speeds,
        "updates": sorted({run["early_updates"] for run in early}) if early else None,
        "valid_loss": losses,
        "ranges_of_valid_loss_overlap": overlap,
    }


def band(runs: dict[str, Any], column: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Validations that all runs have passed: their mean place, and the lowest, mean and highest loss."""
    points = list(zip(*(run["curve"]["valid"] for run in runs.values()), strict=False))
    places = [fmean(point[column] for point in same) for same in points]
    losses = [[point[2] for point in same] for same in points]
    return places, [min(same) for same in losses], [fmean(same) for same in losses], [max(same) for same in losses]


def draw(record: dict[str, Any], path: Path) -> None:
    """The validation loss of both sides against CPU time and against updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, column, label in zip(panels, (1, 0), ("CPU minutes", "updates"), strict=True):
        for side, runs in record["results"].items():
            places, low, middle, high = band(runs, column)
            at = [place / (60 if column else 1) for place in places]
            scores = [run["bleu_lowercased"] for run in runs.values() if "bleu_lowercased" in run]
            bleu = f", BLEU {min(scores):.1f} to {max(scores):.1f}" if scores else ""
            axes.plot(at, middle, color=COLORS[side], linewidth=2, marker=".", label=f"{side}{bleu}")
            axes.fill_between(at, low, high, color=COLORS[side], alpha=0.2, linewidth=0)
        axes.set_xlabel(label)
        axes.grid(color="#e5e7eb")
        for edge in ("top", "right"):
            axes.spines[edge].set_visible(False)
    panels[0].set_ylabel("validation loss, nats a token")
    panels[0].legend(frameon=False)
    seeds = len(record["seeds"])
    figure.suptitle(
        f"Multi30k en-de, {record['recipe']}: {record['cpu_minutes']:g} CPU minutes a run on one thread, "
        f"{seeds} seed{'s' if seeds > 1 else ''} a side"
    )
    figure.savefig(path, dpi=120)


def print_table(record: dict[str, Any]) -> None:
    names = ("updates", "target_tokens", "cpu_seconds", "target_tokens_a_cpu_second", "valid_loss")
    runs = [(f"{side} {seed}", run) for side, own in record["results"].items() for seed, run in own.items()]
    print(f"{'' if record['finished'] else 'NOT FINISHED':<28}" + "".join(f"{title:>14}" for title, _ in runs))
    for name in (*names, "valid_loss_of_the_mean", "bleu_lowercased", "bleu_cased"):
        values = [run.get(name) for _, run in runs]
        shown = ("-" if v is None else f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for v in values)
        print(f"{name:<28}" + "".join(f"{value:>14}" for value in shown))
    print(*(f"{name}: {value}" for name, value in record["summary"].items()), sep="\n")


def train_both(args: argparse.Namespace, seed: int, interval: float = 20.0) -> bool:
    """Both sides at once with one seed; whether both came to their end. The record is written anew every `interval`
    seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        processes = {}
        for side in SIDES:
            if (folder_of(args, side, seed) / "result.json").exists():
                continue
            said = files.enter_context(open(args.out / f"{side}-{seed}.txt", "ab"))
            command = [sys.executable, __file__, *sys.argv[1:], "--seeds", str(seed), "--only", side]
            # A session of its own: an interrupt reaches it once, from here, and it saves before it ends.
            processes[side] = subprocess.Popen(
                command, env=environment, stdout=said, stderr=said, start_new_session=True
            )
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while any(process.poll() is None for process in processes.values()):
                time.sleep(interval)
                print(time.strftime("%H:%M:%S"), _briefly(write_record(args), seed), flush=True)
        except KeyboardInterrupt:
            for process in processes.values():
                process.terminate()
        codes = {side: process.wait() for side, process in processes.items()}
    for side, code in codes.items():
        if code:
            print(f"{side} ended with {code}; it said why in {args.out / f'{side}-{seed}.txt'}", file=sys.stderr)
    return not any(codes.values())


def _briefly(record: dict[str, Any], seed: int) -> str:
    runs = ((side, record["results"][side][str(seed)]) for side in SIDES)
    now = "   ".join(f"{side}: update {run['updates']}, {run['cpu_seconds']:.0f} s" for side, run in runs)
    return f"seed {seed}   {now}"


def main() -> int:
    args = arguments()
    if args.only:
        run_side(args, args.only, args.seeds[0])
        return 0
    done = args.report or all(train_both(args, seed) for seed in args.seeds)
    print_table(write_record(args))
    if not done:
        print("not all runs came to their end; give the same command again to continue", file=sys.stderr)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
