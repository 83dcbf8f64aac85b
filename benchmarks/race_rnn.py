"""An RNN encoder-decoder with additive attention against the Transformer on parallel text: same data, sizes and time.

    python benchmarks/race_rnn.py --source train.en --target train.de --valid-source val.en --valid-target val.de \\
        --cpu-minutes 5 --out results

The models are those of compare_rnn.py: two GRUs with additive attention (Bahdanau, Cho and Bengio, 2015) and the
textbook's Transformer on the fused ops. The models have the same width, number of layers and vocabulary. Both models
learn from the same batches in the same order with the same optimizer (Adam, linear warmup, gradients clipped at 1), on
one thread. The models take turns of a few seconds, so that other programs disturb both equally. Each gets the same CPU
time of the process; validation, after each turn, does not count.

The table is printed. OUT gets race_rnn.json and race_rnn.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import records
import torch
from compare_rnn import make_models
from torch import Tensor, nn

from transformer_fast.dialects import d2l
from transformer_fast.translation import read_lines
from transformer_fast.translation.tokenizer import BOS, EOS, PAD, Tokenizer

CONTESTANTS = ("GRU with attention", "Transformer, transformer_fast")
INK, QUIET, PAPER = "#22252b", "#6b7280", "white"
COLORS = dict(zip(CONTESTANTS, ("#b3450d", "#0b4f8a"), strict=True))

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass
class Track:
    """Progress of one contestant: the curve's points are (seconds, updates, target tokens, training loss of the
    turn, validation loss), losses in nats a token."""

    name: str
    parameters: int
    seconds: float = 0.0
    updates: int = 0
    tokens: int = 0
    curve: list[tuple[float, int, int, float, float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def make_batches(tokenizer: Tokenizer, source: list[str], target: list[str], size: int, longest: int) -> list[Batch]:
    """Source (B, L), its lengths (B,), and target with BOS and EOS (B, T); pairs of like length share a batch."""
    pairs = [
        (torch.tensor(s), torch.tensor([BOS, *t, EOS]))
        for s, t in zip(tokenizer.encode_source(source), tokenizer.encode(target), strict=True)
        if len(s) <= longest and len(t) <= longest
    ]
    pairs.sort(key=lambda pair: (len(pair[1]), len(pair[0])))
    batches = []
    for start in range(0, len(pairs), size):
        sources, targets = zip(*pairs[start : start + size], strict=True)
        src, trg = (nn.utils.rnn.pad_sequence(side, True, PAD) for side in (sources, targets))
        batches.append((src, torch.tensor([len(ids) for ids in sources]), trg))
    return batches


def endless(batches: list[Batch], seed: int) -> Iterator[Batch]:
    """Yield all batches in a new order, again and again; the order depends on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    src, lengths, trg = batch
    logits, _ = model(src, trg[:, :-1], lengths)
    wanted = trg[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=PAD, reduction=reduction)


class Contestant:
    """A model in training."""

    def __init__(self, name: str, model: nn.Module, batches: list[Batch], lr: float, warmup: int, seed: int) -> None:
        self.model, self._batches = model, endless(batches, seed)
        for module in model.modules():
            if isinstance(module, d2l.DecoderBlock):
                module.causal_eval = True  # validation gives it whole targets, of which it must not see what follows
        self._optimizer = torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.98))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda n: min(1.0, (n + 1) / warmup))
        self.track = Track(name, sum(p.numel() for p in model.parameters()))

    def train(self, seconds: float) -> float:
        """Update for this many CPU seconds, at least once; return the mean of the losses."""
        self.model.train()
        track, losses, began, before = self.track, [], time.process_time(), self.track.seconds
        while not losses or time.process_time() - began < seconds:
            batch = next(self._batches)
            loss = loss_of(self.model, batch)
            self._optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._schedule.step()
            losses.append(loss.item())
            track.updates += 1
            track.tokens += int((batch[2][:, 1:] != PAD).sum())
            track.seconds = before + time.process_time() - began
        return sum(losses) / len(losses)

    @torch.inference_mode()
    def validate(self, batches: list[Batch]) -> float:
        """Nats a token, end of sentence included."""
        self.model.eval()
        total = sum(float(loss_of(self.model, batch, "sum")) for batch in batches)
        return total / sum(int((trg[:, 1:] != PAD).sum()) for *_, trg in batches)


def race(contestants: list[Contestant], valid: list[Batch], seconds: float, turn: float) -> None:
    """Until each has had its seconds."""
    while any(c.track.seconds < seconds for c in contestants):
        for c in contestants:
            if c.track.seconds >= seconds:
                continue
            loss = c.train(min(turn, seconds - c.track.seconds))
            track = c.track
            point = round(track.seconds, 3), track.updates, track.tokens, round(loss, 4), round(c.validate(valid), 4)
            track.curve.append(point)


def draw(tracks: list[Track], path: Path) -> None:
    """Draw validation loss against time, and tokens per second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained", facecolor=PAPER)
    figure.suptitle("RNN encoder-decoder with attention and Transformer: same text, same time", color=INK, fontsize=13)
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    for track in tracks:
        times, losses = [p[0] / 60 for p in track.curve], [p[4] for p in track.curve]
        left.plot(times, losses, color=COLORS[track.name], linewidth=2.2)
        left.annotate(
            f"{track.name}\n{losses[-1]:.2f}",
            (times[-1], losses[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            color=COLORS[track.name],
            va="center",
            fontsize=9,
            annotation_clip=False,
        )
    left.set_xlabel("minutes of training on one thread (time of the process)", color=QUIET)
    left.set_ylabel("validation loss, nats a token", color=QUIET)
    left.set_xlim(0, None)
    left.margins(x=0)
    left.grid(axis="y", color="#e5e7eb")
    speeds = [track.tokens_per_second for track in tracks]
    bars = right.bar(range(len(tracks)), speeds, color=[COLORS[t.name] for t in tracks], width=0.6)
    right.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], color=INK, padding=3)
    right.set_xticks(range(len(tracks)), [t.name.replace(" ", "\n", 1) for t in tracks], color=QUIET, fontsize=9)
    right.set_title("target tokens per second in training", color=QUIET, fontsize=10)
    right.set_yticks([])
    for axes in (left, right):
        axes.tick_params(length=0, labelcolor=QUIET)
        for side in ("top", "right") if axes is left else ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=144)


def time_to(track: Track, loss: float) -> float | None:
    """Seconds until the validation loss was at most this, or None."""
    return next((point[0] for point in track.curve if point[4] <= loss), None)


def result(track: Track, loss: float) -> dict[str, Any]:
    """Return what is recorded of a track; loss: the one that both have reached."""
    reached = {"validation_loss": track.curve[-1][4], "seconds_to_equal_loss": time_to(track, loss)}
    return {**asdict(track), "tokens_per_second": round(track.tokens_per_second, 1), **reached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for side in ("source", "target", "valid-source", "valid-target"):
        parser.add_argument(f"--{side}", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--cpu-minutes", type=float, default=5.0, help="training time per model (default: %(default)s)")
    parser.add_argument(
        "--turn", type=float, default=15.0, help="seconds per turn; the models train in turn (default: %(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=128, help="width of the models")
    parser.add_argument("--vocab-size", type=int, default=4000, help="pieces of the vocabulary")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=60, help="largest number of tokens per sentence, on either side")
    parser.add_argument("--valid-sentences", type=int, default=500, help="number of validation sentences")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
    parser.add_argument("--warmup", type=int, default=200, help="updates of learning rate warmup")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    args = parser.parse_args()
    torch.set_num_threads(1)

    text, held_out = (
        [read_lines(getattr(args, kind + side)) for side in ("source", "target")] for kind in ("", "valid_")
    )
    tokenizer = Tokenizer.train(text[0] + text[1], vocab_size=args.vocab_size)
    train = make_batches(tokenizer, *text, args.batch, args.longest)
    valid = make_batches(tokenizer, *(side[: args.valid_sentences] for side in held_out), args.batch, args.longest)
    models = make_models(len(tokenizer), args.hidden, args.seed)
    contestants = [Contestant(n, models[n], train, args.lr, args.warmup, args.seed) for n in CONTESTANTS]
    race(contestants, valid, 60 * args.cpu_minutes, args.turn)

    tracks = [c.track for c in contestants]
    worst = max(track.curve[-1][4] for track in tracks)
    print(f"{'':32}parameters   tokens/s   updates   validation loss   minutes to {worst:.2f}")
    for t in tracks:
        minutes = time_to(t, worst) / 60
        numbers = f"{t.parameters:10,}   {t.tokens_per_second:8,.0f}   {t.updates:7,}   {t.curve[-1][4]:15.3f}"
        print(f"{t.name:32}{numbers}   {minutes:.2f}")
    run = {
        "what": "same text, batches, optimizer and thread; seconds of the process, in turns; validation not counted",
        "recipe": {key: value for key, value in vars(args).items() if isinstance(value, int | float)},
        "results": [result(track, worst) for track in tracks],
    }
    records.save(args.out / "race_rnn.json", run)
    draw(tracks, args.out / "race_rnn.png")


if __name__ == "__main__":
    main()
