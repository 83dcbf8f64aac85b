"""Train one recipe on Multi30k with the fast ops and with eager PyTorch, side by side, for the same CPU time.

    python benchmarks/train_multi30k.py --data multi30k --out runs/multi30k --cpu-minutes 50

Both sides are `transformer_fast.translation.train` with one recipe, one seed and one thread, in a process of its own:
the same weights to begin with, the same batches in the same order. They differ in the backend: "fast" is the one that
is chosen here by itself; "eager" is backend "reference", plain PyTorch for every op. Eager draws its dropout masks with
PyTorch's own generator, as eager code does, so its curve for an update is that of another draw of dropout
(--same-dropout: the same draws, counted out in eager integer arithmetic, which costs it 40 % of its speed).

The budget is CPU time of the process (`time.process_time`), validation and checkpoints included. Then each side
translates the validation text with the mean of its last checkpoints and the recipe's beam, by its own backend.

Written to RESULTS while they train: train_multi30k.json (what is known so far; "finished" says if that is all) and
train_multi30k.png, the learning curves. OUT holds the two run folders. A run that was cut short goes on where it
stopped when the same command is given again; --report writes the record of what there is, and trains nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import transformer_fast
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
        "--data", type=Path, required=True, help="folder of train.en.gz, train.de.gz, val.en.gz, val.de.gz"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the two runs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "multi30k")
    parser.add_argument("--recipe", default="multi30k-tiny-cpu", help="default: %(default)s")
    parser.add_argument("--cpu-minutes", type=float, default=50.0, help="budget of each side (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--same-dropout", action="store_true", help="eager draws the same dropout masks, slowly")
    parser.add_argument("--report", action="store_true", help="only write the record of what there is")
    parser.add_argument("--only", choices=SIDES, help="train and measure this side")
    return parser.parse_args(argv)


def settings(args: argparse.Namespace, side: str) -> TrainConfig:
    """The recipe on the data, with the budget as its end."""
    texts = {
        name: str(args.data / file)
        for name, file in (
            *(("source", "train.en.gz"), ("target", "train.de.gz")),
            *(("valid_source", "val.en.gz"), ("valid_target", "val.de.gz")),
        )
    }
    own = {"save": str(args.out / side), "seed": args.seed, "device": "cpu", "max_time": 60 * args.cpu_minutes}
    return TrainConfig(**{**load_recipe(args.recipe).training, **texts, **own})


def ordinary_dropout_masks() -> None:
    """Let the reference draw its masks with PyTorch's generator."""
    reference.dropout.elementwise_keep = lambda seed, p, rows, d: torch.rand(rows, d) >= p
    reference.dropout.attention_keep = lambda seed, p, *shape: torch.rand(shape) >= p


def run_side(args: argparse.Namespace, side: str) -> None:
    """Train one side to the end of its budget, translate, and leave result.json and valid.hyp in its folder."""
    torch.set_num_threads(1)
    if side == "eager" and not args.same_dropout:
        ordinary_dropout_masks()
    config, recipe = settings(args, side), load_recipe(args.recipe)
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
    """What the log of a run says so far; a last line that is being written is left for the next time."""
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
    """Record and picture of what there is by now; returns the record."""
    sides = {}
    for side in SIDES:
        result = args.out / side / "result.json"
        sides[side] = progress_of(args.out / side)
        sides[side].update(json.loads(result.read_text(encoding="utf-8")) if result.exists() else {})
    record = {
        "what": "one recipe, seed and thread, the same CPU time; the backend differs",
        "finished": all("bleu_lowercased" in side for side in sides.values()),
        "recipe": load_recipe(args.recipe).name,
        "settings": load_recipe(args.recipe).training,
        "cpu_minutes": args.cpu_minutes,
        "seed": args.seed,
        "dropout_of_eager": "the same masks" if args.same_dropout else "masks of PyTorch's own generator",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"torch": torch.__version__, "transformer_fast": transformer_fast.__version__},
        "curve_columns": ["update", "CPU seconds", "loss in nats a token; of training, of smoothed labels"],
        "results": sides,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    write_atomically(args.results / f"{NAME}.json", (json.dumps(record) + "\n").encode("utf-8"))
    draw(record, args.results / f"{NAME}.png")
    return record


def draw(record: dict[str, Any], path: Path) -> None:
    """The validation loss of both sides against CPU time and against updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, column, label in zip(panels, (1, 0), ("CPU minutes", "updates")):
        for side, row in record["results"].items():
            points = row["curve"]["valid"]
            at = [point[column] / (60 if column else 1) for point in points]
            bleu = f", BLEU {row['bleu_lowercased']:.1f}" if "bleu_lowercased" in row else ""
            axes.plot(at, [p[2] for p in points], color=COLORS[side], linewidth=2, marker=".", label=f"{side}{bleu}")
        axes.set_xlabel(label)
        axes.grid(color="#e5e7eb")
        for edge in ("top", "right"):
            axes.spines[edge].set_visible(False)
    panels[0].set_ylabel("validation loss, nats a token")
    panels[0].legend(frameon=False)
    figure.suptitle(
        f"Multi30k en-de, {record['recipe']}: {record['cpu_minutes']:g} CPU minutes a side, one thread each"
    )
    figure.savefig(path, dpi=120)


def print_table(record: dict[str, Any]) -> None:
    names = ("updates", "target_tokens", "cpu_seconds", "target_tokens_a_cpu_second", "valid_loss")
    print(f"{'' if record['finished'] else 'NOT FINISHED':<28}" + "".join(f"{side:>14}" for side in SIDES))
    for name in (*names, "valid_loss_of_the_mean", "bleu_lowercased", "bleu_cased"):
        values = [record["results"][side].get(name) for side in SIDES]
        shown = ("-" if v is None else f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for v in values)
        print(f"{name:<28}" + "".join(f"{value:>14}" for value in shown))


def train_both(args: argparse.Namespace, interval: float = 20.0) -> bool:
    """Both sides at once; whether both came to their end. The record is written anew every `interval` seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        processes = {}
        for side in SIDES:
            said = files.enter_context(open(args.out / f"{side}.txt", "ab"))
            command = [sys.executable, __file__, *sys.argv[1:], "--only", side]
            # A session of its own: an interrupt reaches it once, from here, and it saves before it ends.
            processes[side] = subprocess.Popen(
                command, env=environment, stdout=said, stderr=said, start_new_session=True
            )
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while any(process.poll() is None for process in processes.values()):
                time.sleep(interval)
                print(time.strftime("%H:%M:%S"), _briefly(write_record(args)), flush=True)
        except KeyboardInterrupt:
            for process in processes.values():
                process.terminate()
        codes = {side: process.wait() for side, process in processes.items()}
    for side, code in codes.items():
        if code:
            print(f"{side} ended with {code}; it said why in {args.out / side}.txt", file=sys.stderr)
    return not any(codes.values())


def _briefly(record: dict[str, Any]) -> str:
    rows = record["results"].items()
    return "   ".join(f"{side}: update {row['updates']}, {row['cpu_seconds']:.0f} s" for side, row in rows)


def main() -> int:
    args = arguments()
    if args.only:
        run_side(args, args.only)
        return 0
    done = args.report or train_both(args)
    print_table(write_record(args))
    if not done:
        print("not both sides came to their end; give the same command again to continue", file=sys.stderr)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
