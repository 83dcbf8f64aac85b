"""Not a test: a program for `test_killed.py` that trains and is killed by SIGKILL, part after part.

    python killed_training.py < jobs

A job is a line of json, {"config": {...}, "kills": ["half:7", "time:0.3"], "threads": 1}, and is answered by a line.
torch is imported once and every part runs in a fork of it, so that many kills fit in a test. A kill is

    time:S     S seconds after the part began training, by its parent
    before:N   just before the N-th thing the part does to the disk (a flushed file, a rename, a deletion)
    half:N     in the middle of it: half of a file written, one file of a folder deleted
    after:N    just after it

A part that ends before its kill is an error unless the kill is by time. The last part is not killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from transformer_fast.translation import TrainConfig, checkpoint, train
from transformer_fast.translation.progress import Silent


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_done(name: str, *args: Any) -> None:
    if name == "write":
        path, data = args
        path.write_bytes(data[: len(data) // 2])
    elif name == "remove" and args[0].is_dir():
        for inside in list(args[0].iterdir())[:1]:
            inside.unlink()


def lay_in_wait(moment: str, number: int) -> None:
    """Kill the process at the `number`-th disk event of `checkpoint` from now on."""
    seen = 0

    def watched(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def event(*args: Any) -> Any:
            nonlocal seen
            mine, seen = seen == number, seen + 1
            if mine and moment != "after":
                if moment == "half":
                    half_done(name, *args)
                die()
            result = act(*args)
            if mine:
                die()
            return result

        return event

    remove = checkpoint._remove

    def remove_existing(path: Path) -> None:
        if path.exists():
            watched_remove(path)

    watched_remove = watched("remove", remove)
    checkpoint._write_flushed = watched("write", checkpoint._write_flushed)
    checkpoint._remove = remove_existing
    renames = {name: watched(name, getattr(os, name)) for name in ("rename", "replace")}
    checkpoint.os = SimpleNamespace(**{**vars(os), **renames})


def part(config: TrainConfig, kill: str | None, threads: int) -> int:
    """Run one part in a fork; return its wait status."""
    ready, announce = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(threads)
            moment, _, number = (kill or "").partition(":")
            if moment in ("before", "half", "after"):
                lay_in_wait(moment, int(number))
            os.write(announce, b"!")
            train(config, Silent())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.read(ready, 1)
    if kill and kill.startswith("time:"):
        time.sleep(float(kill.removeprefix("time:")))
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def run(job: dict[str, Any]) -> str:
    """Run every part of a job; return "ok", or the first deviation."""
    config, threads = TrainConfig(**job["config"]), job["threads"]
    for kill in job["kills"]:
        status = part(config, kill, threads)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and not (kill.startswith("time:") and status == 0):
            return f"the part to be killed at {kill} ended with status {status}"
    status = part(config, None, threads)
    return "ok" if status == 0 else f"the last part ended with status {status}"


def main() -> None:
    # Imports a good part of torch, once, and computes nothing: threads started here would not survive a fork.
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], fused=True)
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
