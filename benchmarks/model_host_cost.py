"""Host time of a BERT of 12 narrow layers, plain and accelerated, in milliseconds, and calls of Python functions.

    python benchmarks/model_host_cost.py

The layers have width 64, and a batch has two sentences of 8 and 2 tokens, so the kernels have nothing to do, and the
time is that of the host: one thread, the minimum of 200 calls in turn. A step is forward and backward. Autocast is
bf16.
"""

from __future__ import annotations

import copy
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

import transformer_fast as tfast

ROUNDS = 200
WAYS = {"plain, sdpa": None, "accelerate": {}, "accelerate, packed=True": {"packed": True}}


def models() -> dict[str, Any]:
    """The same model, plain and accelerated, in training."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 256}
    plain = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=8000, **sizes))
    made = {}
    for way, arguments in WAYS.items():
        made[way] = copy.deepcopy(plain).train()
        if arguments is not None:
            tfast.accelerate(made[way], **arguments)
    return made


def calls_of(function: Callable[[], Any]) -> int:
    """Number of calls of functions, those of C included."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def main() -> None:
    torch.set_num_threads(1)
    keep = torch.arange(8) < torch.tensor([[8], [2]])
    ids = torch.randint(5, 8000, keep.shape).where(keep, 0)
    batch = {"input_ids": ids, "attention_mask": keep.long(), "labels": ids.where(keep, -100)}
    made, least = models(), {}
    for mixed in (False, True):
        for _ in range(ROUNDS):
            for way, model in made.items():
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    start = time.thread_time()
                    loss = model(**batch).loss
                    forward = time.thread_time() - start
                loss.backward()
                step = time.thread_time() - start
                for name, found in (("forward", forward), ("step", step)):
                    key = way, mixed, name
                    least[key] = min(found, least.get(key, found))
    print(f"{'ms':24}{'forward':>9}{'step':>9}{'autocast: forward':>19}{'step':>9}{'calls of a forward':>20}")
    for way, model in made.items():
        times = [1e3 * least[way, mixed, name] for mixed in (False, True) for name in ("forward", "step")]
        count = calls_of(lambda model=model: model(**batch))
        print(f"{way:24}{times[0]:9.2f}{times[1]:9.2f}{times[2]:19.2f}{times[3]:9.2f}{count:20,}")


if __name__ == "__main__":
    main()
