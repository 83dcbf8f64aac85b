"""What a call of attention costs the host, in microseconds, over the bare launches of its kernels.

    python benchmarks/host_cost.py

On a GPU: calls in a row without waiting, less the same driver calls alone. Without one, a driver that does nothing
takes the launches, and what is left is all ours; one thread, the least of many short rounds, since other programs only
add.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from triton.runtime import driver

import transformer_fast as tfast
from transformer_fast import backends
from transformer_fast.kernels import launching

B, H, L, D = 4, 8, 32, 64
ROUNDS, CALLS = 400, 20


class DoesNothing:
    """In place of the launcher of a compiled kernel."""

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *arguments: object) -> None:
        pass


def pretend_to_have_a_gpu() -> None:
    """Let the doors take the Triton kernels on CPU tensors, compiled for sm_90 and never run."""
    from triton.backends.compiler import GPUTarget

    utils = SimpleNamespace(
        load_binary=lambda *binary: ("module", 1, 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        unload_module=lambda module: None,
    )
    driver._active = SimpleNamespace(
        utils=utils,
        launcher_cls=DoesNothing,
        get_current_device=lambda: 77,
        get_current_stream=lambda device: 1,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    backends._obstacle = lambda *_: None


def least(call: Callable[[], object], device: str) -> float:
    """Microseconds of one call."""
    call()
    call()
    found = float("inf")
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found = min(found, (time.perf_counter() - start) / CALLS)
    return found * 1e6


def bare_launches(call: Callable[[], object], device: str) -> float:
    """Microseconds of the driver calls of one call, and nothing else."""
    started: list[tuple] = []
    start = launching._start
    call()
    launching._start = lambda *arguments: (started.append(arguments), start(*arguments))
    try:
        call()
    finally:
        launching._start = start
    return least(lambda: [start(*arguments) for arguments in started], device)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pretend_to_have_a_gpu()
    torch.set_num_threads(1)
    lengths = torch.randint(1, L + 1, (B,), device=device)
    padding = (torch.arange(L, device=device) < lengths[:, None])[:, None, None]
    masks = {
        "no mask": None,
        "lengths": tfast.AttentionMask.lengths(lengths),
        "keep mask": tfast.AttentionMask.keep(padding),
    }
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, grad = (torch.randn(B, H, L, D, device=device, dtype=dtype) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    print(f"{'us a call over its launches':32} {'forward':>9} {'in training':>12} {'forward + backward':>19}")
    with tfast.backend("triton"):
        for name, mask in masks.items():
            for p in (0.0, 0.1):

                def forward(mask=mask, p=p) -> None:
                    with torch.no_grad():
                        tfast.attention(q, k, v, mask, dropout_p=p)

                def train(mask=mask, p=p) -> torch.Tensor:
                    return tfast.attention(*leaves, mask, dropout_p=p)

                def both(mask=mask, p=p) -> None:
                    torch.autograd.grad(tfast.attention(*leaves, mask, dropout_p=p), leaves, grad)

                ours = [least(call, device) - bare_launches(call, device) for call in (forward, train, both)]
                print("{:32} {:9.1f} {:12.1f} {:19.1f}".format(f"{name}, dropout {p}", *ours), flush=True)


if __name__ == "__main__":
    main()
