"""Time whole training steps on a GPU: forward, loss, backward and AdamW under autocast to bf16, as users run them.

    python -m benchmarks.quick.step --out results --seconds 150
    python -m benchmarks.quick.step --only base

"base" is the base Transformer of the paper, with 64 sentences of up to 128 tokens, 37.5 % padding; "base256" has 256
sentences. "bert" is BERT-base of transformers with 64 sequences of up to 256 tokens, 43.75 % padding. A way in a
"graph" replays the whole step as one CUDA graph, without the host's time. The ways run in one process, one after the
other. What compiles or is captured has a process of its own, and so has what comes after a failure. A line of
step.jsonl has the median and the least of 40 steps, tokens per second without padding, the peak memory, and the losses
of the first and the last step.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .record import CUT, Deadline, Record, parser, settle_keys, versions

WAYS = {
    "base": (
        "ours", "ours packed", "eager", "nn.Transformer", "compiled by layer", "ours, graph", "compiled whole",
        "eager, graph", "nn.Transformer, graph",
    ),
    "bert": ("ours packed", "ours", "sdpa", "eager", "sdpa compiled", "ours compiled"),
    "base256": ("ours", "ours packed", "eager", "nn.Transformer"),
}  # fmt: skip
"""In order of worth; the models take turns."""
LIMIT = 45.0
"""Seconds of one way, with the start of its process."""
LIMITS = {"compiled whole": 130.0, "sdpa compiled": 100.0, "ours compiled": 100.0, "compiled by layer": 80.0}
"""Seconds of the ways that compile."""
WARM_UP, STEPS = 5, 40

BASE = {"cuda": (512, 6, 8, 2048, 64, 128, 32_000, 0.1), "cpu": (64, 1, 4, 128, 4, 16, 500, 0.1)}
"""The Transformer's sizes, as in bench_model.SHAPES, by device; on a CPU for a rehearsal."""
BATCH = 4
"""Place of the batch in the sizes."""
GRAPH = ", graph"
"""End of the name of a way that is replayed."""
BERT = {"cuda": (12, 768, 12, 3072, 64, 256), "cpu": (1, 64, 4, 128, 4, 32)}
"""Layers, width, heads, inner width, batch and length of BERT."""

Work = tuple[Any, Callable[[], Any], int, int]
"""A module, the function that computes its loss, and the number of tokens without and with padding."""


def base(way: str, device: str, times: int = 1) -> Work:
    import bench_model
    import torch

    sizes = BASE[device]
    bench_model.SHAPES["base"] = (*sizes[:BATCH], sizes[BATCH] * times, *sizes[BATCH + 1 :])
    models, make_inputs, _ = bench_model.build("base", device)
    if way == "compiled by layer":
        models[way] = bench_model.compiled_by_layer(models, "base", device)
    if way == "compiled whole":
        models[way] = models["eager"]._replace(loss=torch.compile(models["eager"].loss, dynamic=False))
    model, inputs = models[way], make_inputs()
    return model.module, lambda: model.loss(inputs), int(inputs[2].sum()), inputs[0].numel()


def bert(way: str, device: str) -> Work:
    import bench_packed
    import torch
    import transformers

    import transformer_fast as tfast

    layers, width, heads, inner, B, L = BERT[device]
    bench_packed.B, bench_packed.L, bench_packed.TOKENS = B, L, B * L * 9 // 16
    config = transformers.BertConfig(
        vocab_size=bench_packed.VOCAB, num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=inner,
    )  # fmt: skip
    config._attn_implementation = "sdpa" if way.startswith("sdpa") else "eager"
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).to(device)
    if way.startswith("ours"):
        tfast.accelerate(model, packed=way.endswith("packed"))
    given = {name: t.to(device) for name, t in bench_packed.batch().items()}
    call = torch.compile(model, dynamic=False) if way.endswith("compiled") else model
    return model, lambda: call(**given).loss, bench_packed.TOKENS, B * L


MODELS = {"base": base, "bert": bert, "base256": partial(base, times=4)}


def measure(what: str, way: str, device: str) -> dict[str, Any]:
    """Run and time the steps of one way in this process."""
    import torch

    settle_keys()
    on_gpu, in_graph = device == "cuda", way.endswith(GRAPH)
    if on_gpu:
        gc.collect()  # what an earlier way left
        torch.cuda.empty_cache()
    model, loss_of, tokens, places = MODELS[what](way.removesuffix(GRAPH), device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu, capturable=on_gpu and in_graph)

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16, cache_enabled=not in_graph):
            loss = loss_of()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def finish() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    started = time.perf_counter()
    first = step()
    for _ in range(WARM_UP - 1):
        step()
    if on_gpu and in_graph:
        from transformer_fast.generation.graphs import record

        step = record(step)
    warm = finish() - started
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS if on_gpu else 3):
        start = finish()
        last = step()
        times.append(finish() - start)
    median = statistics.median(times)
    tenths = statistics.quantiles(times, n=10)
    return {
        "what": what,
        "way": way,
        **versions(device),
        "ms": round(median * 1e3, 3),
        "least": round(min(times) * 1e3, 3),
        "p20_p80": [round(tenths[i] * 1e3, 3) for i in (1, 7)],
        "tokens_per_second": round(tokens / median),
        "padding": 1 - tokens / places,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "losses": [float(first), float(last)],
        "warm_up_seconds": round(warm, 1),
    }


def alone(way: str) -> bool:
    """Return True for a way that has a process of its own."""
    return "compiled" in way or way.endswith(GRAPH)


def run_one(record: Record, what: str, way: str, device: str) -> None:
    """Measure a way and add it to the record."""
    row = measure(what, way, device)
    record.add(row)
    speed = f"{row['ms']} ms, {row['tokens_per_second']} tokens/s, peak {row['peak_bytes']} bytes"
    print(f"{row['what']} {row['way']}: {speed}, losses {row['losses']}", flush=True)


def main(given: list[str] | None = None) -> int:
    options_parser = parser(__doc__, 150)
    options_parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="models")
    options_parser.add_argument("--these", nargs="+", metavar="MODEL:WAY", help="measure these in this process")
    options = options_parser.parse_args(given)
    record = Record(options.out / "step.jsonl", "what", "way")
    if options.these:
        for name in options.these:
            run_one(record, *name.split(":"), options.device)
        return 0
    ways = sorted((index, what, way) for what in options.only for index, way in enumerate(WAYS[what]))
    left = [(what, way) for _, what, way in ways if (what, way) not in record.done()]
    deadline = Deadline(options.seconds)
    while left and deadline.left() >= 10:
        group = left[:1] if alone(left[0][1]) else [one for one in left if not alone(one[1])]
        limit = min(deadline.left(), sum(LIMITS.get(way, LIMIT) for _, way in group))
        command = [sys.executable, "-m", "benchmarks.quick.step", "--out", options.out, "--device", options.device]
        child = subprocess.Popen(
            [*map(str, command), "--these", *map(":".join, group)], stderr=subprocess.PIPE, text=True
        )
        try:
            errors = child.communicate(timeout=limit)[1]
            why = f"FAILED: {' | '.join(errors.strip().splitlines()[-2:])[:400]}"
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            why = f"stopped after {limit:.0f} s"
        left = [one for one in left if one not in record.done()]
        if failed := next((one for one in group if one in left), None):
            print(f"{' '.join(failed)}: {why}", flush=True)
            if deadline.left() > 0:
                left.remove(failed)
    for what, way in left:
        print(f"no time for {what} {way}", flush=True)
    return CUT if left else 0


if __name__ == "__main__":
    sys.exit(main())
