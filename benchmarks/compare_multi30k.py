"""Train `transformer_fast.Transformer` and `torch.nn.Transformer` of one shape with one recipe, and compare.

    python benchmarks/compare_multi30k.py --source train.en --target train.de \\
        --valid-source val.en --valid-target val.de --out results --cpu-minutes 25

Both train through `transformer_fast.translation.train`, with the same tokenizer, batches, initial distribution,
optimizer, schedule, loss and threads. Only the model class differs. Each gets the same CPU time
(`time.process_time`, the sum over all threads), validation and checkpoints included, in a process of its own: one after
the other, or at once (--together, with --threads 1 on two cores). Then the best checkpoint of each translates the
validation set with the same decoder.

The table is printed. OUT gets compare.json and the two run folders with their learning curves (log.jsonl). An
interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import records
import torch
from torch import Tensor, nn

from transformer_fast import AttentionMask, positional_table
from transformer_fast.translation import ConfigError, TrainConfig, load_trained, read_lines, train
from transformer_fast.translation.evaluate import corpus_bleu
from transformer_fast.translation.model import init_weights
from transformer_fast.translation.tokenizer import PAD
from transformer_fast.translation.translator import Translator

MODELS = ("transformer_fast", "torch")


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` behind the interface of `transformer_fast.Transformer`, given every advantage it knows:
    fused attention with `is_causal`, no target padding mask (targets are right padded), one positional table.

    Args:
        config: shape and dropout; vocab: pieces of the joint vocabulary.
    """

    def __init__(self, config: TrainConfig, vocab: int):
        super().__init__()
        self.scale = math.sqrt(config.d_model)
        self.embed = nn.Embedding(vocab, config.d_model, padding_idx=PAD)
        self.dropout = nn.Dropout(config.dropout)
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")  # of no use to pre-norm layers
        self.core = nn.Transformer(
            config.d_model,
            config.heads,
            config.layers,
            config.layers,
            config.d_ff,
            config.dropout,
            batch_first=True,
            norm_first=config.norm_first,
        )
        if not config.norm_first:  # torch keeps a final norm after post-norm layers, the paper's model has none
            self.core.encoder.norm = self.core.decoder.norm = None
        self.out = nn.Linear(config.d_model, vocab)
        if config.tie_weights:
            self.out.weight = self.embed.weight
        self.register_buffer("pe", positional_table(5000, config.d_model), persistent=False)
        init_weights(self, config.d_model)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embed(ids) * self.scale + self.pe[: ids.shape[1]])

    def encoder(self, src: Tensor, src_mask: AttentionMask | Tensor | None) -> Tensor:
        return self.core.encoder(self._embed(src), src_key_padding_mask=_blocked(src_mask, src.shape[1]))

    def decoder(
        self, trg: Tensor, memory: Tensor, src_mask: AttentionMask | Tensor | None, trg_mask: AttentionMask | Tensor
    ) -> Tensor:
        # Both callers, the loss and the decoding, look ahead-free at right-padded prefixes: causal says it all.
        causal = nn.Transformer.generate_square_subsequent_mask(trg.shape[1], device=trg.device)
        return self.core.decoder(
            self._embed(trg),
            memory,
            tgt_mask=causal,
            tgt_is_causal=True,
            memory_key_padding_mask=_blocked(src_mask, memory.shape[1]),
        )

    def forward(
        self, src: Tensor, trg: Tensor, src_mask: AttentionMask | Tensor | None, trg_mask: AttentionMask | Tensor
    ) -> Tensor:
        return self.out(self.decoder(trg, self.encoder(src, src_mask), src_mask, trg_mask))


def _blocked(mask: AttentionMask | Tensor | None, keys: int) -> Tensor | None:
    """`(B, keys)` bool, True = padding, as nn.Transformer wants it; None where there is none to hide."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        blocked = ~mask.squeeze(1)
    else:
        blocked = torch.arange(keys, device=mask.key_lengths.device) >= mask.key_lengths[:, None]
    return blocked if bool(blocked.any()) else None


def recipe(args: argparse.Namespace, name: str) -> TrainConfig:
    """Return the shared recipe; 25 CPU minutes are about 2,000 updates."""
    return TrainConfig(
        source=args.source,
        target=args.target,
        valid_source=args.valid_source,
        valid_target=args.valid_target,
        save=str(Path(args.out) / name),
        max_time=60 * args.cpu_minutes,
        d_model=args.d_model,
        heads=args.heads,
        layers=args.layers,
        d_ff=args.d_ff,
        dropout=args.dropout,
        vocab_size=args.vocab_size,
        max_length=128,
        batch_tokens=args.batch_tokens,
        lr=args.lr,
        warmup=args.warmup,
        valid_every=args.valid_every,
        bleu_sentences=0,
        keep_last=2,
        seed=args.seed,
        device="cpu",
    )


def run_one(args: argparse.Namespace, name: str) -> dict[str, object]:
    """Train one of the two and measure it: tokens per second of training, loss and BLEU on the validation set."""
    torch.set_num_threads(args.threads)
    config = recipe(args, name)
    wall, cpu = time.perf_counter(), time.process_time()
    options = {} if name == "transformer_fast" else {"build": TorchTransformer}
    result = train(config, clock=time.process_time, **options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    trained = load_trained(config.save, **options)
    translator = Translator(trained.model, trained.tokenizer, beam=args.beam)
    start = time.perf_counter()
    lines = list(translator.translate(read_lines(args.valid_source)))
    bleu = corpus_bleu(lines, read_lines(args.valid_target))
    (Path(config.save) / "valid.hyp").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    speed = training_speed(Path(config.save) / "log.jsonl")
    return {
        "model": name,
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "updates": result.step,
        "target_tokens": result.tokens,
        "cpu_seconds_budgeted": result.seconds,
        "cpu_seconds_this_process": cpu,
        "wall_seconds_this_process": wall,
        "tokens_per_cpu_second": speed,
        "tokens_per_wall_second": speed * cpu / wall,
        "best_step": result.best_step,
        "valid_loss": result.best_scores.get("valid_loss"),
        "bleu": bleu.score,
        "beam": args.beam,
        "bleu_signature": bleu.signature,
        "translation_wall_seconds": time.perf_counter() - start,
    }


def training_speed(log: Path) -> float:
    """Median over all reports of a run of target tokens per second, by the clock that the run was given."""
    reports = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rates = sorted(r["tokens_per_second"] for r in reports if "tokens_per_second" in r)
    if not rates:
        raise ConfigError("the budget ended before the first report; give more --cpu-minutes")
    return rates[len(rates) // 2]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--source", "--target", "--valid-source", "--valid-target", "--out"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--cpu-minutes", type=float, default=25.0, help="CPU minutes of training per model")
    for flag, value in (
        *(("--d-model", 256), ("--heads", 4), ("--layers", 3), ("--d-ff", 1024), ("--vocab-size", 4000)),
        *(("--batch-tokens", 1024), ("--warmup", 400), ("--valid-every", 500), ("--seed", 0), ("--beam", 5)),
        ("--threads", min(2, os.cpu_count() or 1)),
    ):
        parser.add_argument(flag, type=int, default=value, help="default: %(default)s")
    for flag, value in (("--dropout", 0.1), ("--lr", 1e-3)):
        parser.add_argument(flag, type=float, default=value, help="default: %(default)s")
    parser.add_argument(
        "--together", action="store_true", help="train both at once, so that the load of the machine is the same"
    )
    parser.add_argument("--only", choices=MODELS, help="train and measure this model only, and print its JSON")
    return parser.parse_args()


def print_table(rows: list[dict]) -> None:
    columns = ("updates", "target_tokens", "tokens_per_cpu_second", "tokens_per_wall_second", "valid_loss", "bleu")
    print(f"\n{'':<24}" + "".join(f"{row['model']:>18}" for row in rows) + f"{'ratio':>9}")
    for name in columns:
        values = [row[name] for row in rows]
        shown = "".join(f"{value:>18,.2f}" if isinstance(value, float) else f"{value:>18,}" for value in values)
        ratio = f"{values[0] / values[1]:.2f}" if values[1] else ""
        print(f"{name:<24}{shown}{ratio:>9}")
    print(rows[0]["bleu_signature"], f"beam {rows[0]['beam']}")


def _recorded(value: object) -> object:
    """Return the name of a file, because its folder does not belong into a record."""
    return Path(value).name if isinstance(value, str) else value


def main() -> None:
    args = arguments()
    if args.only:
        print(json.dumps(run_one(args, args.only)))
        return
    processes = []
    for name in MODELS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        if not args.together:
            processes[-1].wait()
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("one of the two did not finish; run the same command again to continue")
    rows = [json.loads(text) for text in printed]
    run = {
        "what": "same recipe, batches, initial distribution and CPU time; only the model class differs",
        "recipe": {key: _recorded(value) for key, value in vars(args).items() if key not in ("out", "only")},
        "results": rows,
    }
    records.save(Path(args.out, "compare.json"), run)
    print_table(rows)


if __name__ == "__main__":
    main()
