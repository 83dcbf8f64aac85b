"""Host time of a call of attention, a norm or dropout in microseconds, without the bare launches of their Triton
kernels.

    python benchmarks/host_cost.py [--by-triton]

A call is all of ``tfast.attention(...)`` (or ``attention_packed``, ``layer_norm``, ...) from Python: checks, the
autograd rule, the allocation of results and temporaries. "forward" is without gradients, "in training" with them, and
"backward" is one ``torch.autograd.grad`` of a kept graph. Subtracted are the driver calls of the kernels, timed alone
with ready arguments. From "backward" the time of PyTorch's engine is subtracted too, measured on a graph of one node
of as many inputs that computes nothing; the last line shows it for three inputs. With ``--by-triton`` no launch is
repeated from an earlier call: Triton looks up each kernel anew.

On a GPU, calls are made one after the other without waiting. Without a GPU, a driver that does nothing takes the
launches. There, time is that of one thread, the minimum of many short rounds, since other programs only add time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver

import transformer_fast as tfast
from transformer_fast import backends, extension, ops
from transformer_fast.triton.launch_cache import launch_cache

B, H, L, D = 4, 8, 32, 64
ROUNDS, CALLS = 400, 20


class DoesNothing:
    """Replacement of a compiled kernel's launcher that does nothing."""

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *arguments: object) -> None:
        pass


def pretend_to_have_a_gpu(launcher_cls: type = DoesNothing) -> None:
    """Let the public functions take the Triton kernels on CPU tensors, compiled for sm_90 and never run.

    launcher_cls: Triton's class of launchers, which start a compiled kernel.
    """
    from triton.backends.compiler import GPUTarget

    utils = SimpleNamespace(
        load_binary=lambda *binary: ("module", 1, 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        unload_module=lambda module: None,
    )
    driver._active = SimpleNamespace(
        utils=utils,
        launcher_cls=launcher_cls,
        get_current_device=lambda: 77,
        get_current_stream=lambda device: 1,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    backends._obstacle = lambda *_: None
    extension.module().launch_on_cpu(True)


def least(call: Callable[[], object], device: str) -> float:
    """Microseconds of one call."""
    call()
    call()
    found = float("inf")
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        found = min(found, (time.thread_time() - start) / CALLS)
    return found * 1e6


@contextmanager
def recorded(started: list[tuple]):
    """Context in which every launch goes through Triton, and the arguments of its launcher are recorded."""
    run, enabled = CompiledKernel.run, launch_cache.enabled

    def recording(kernel: CompiledKernel) -> Callable[..., object]:
        launcher = run.fget(kernel)

        def launch(*arguments: object) -> object:
            plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            started.append((launcher, (*plain[:6], None, None, None, *plain[9:])))
            return launcher(*arguments)

        return launch

    CompiledKernel.run, launch_cache.enabled = property(recording), False
    try:
        yield
    finally:
        CompiledKernel.run, launch_cache.enabled = run, enabled


def bare_launches(call: Callable[[], object], device: str) -> float:
    """Return the microseconds of the driver calls of one call."""
    started: list[tuple] = []
    call()  # what is derived from a mask is kept
    with recorded(started):
        call()
    return least(lambda: [launcher(*arguments) for launcher, arguments in started], device)


def engine(leaves: list[torch.Tensor], device: str) -> float:
    """Microseconds of a gradient that is only handed on: torch.autograd.grad of one node."""
    scalars = [torch.zeros((), device=t.device, requires_grad=True) for t in leaves]
    joined, grad = torch.stack(scalars), torch.zeros(len(leaves), device=leaves[0].device)
    return least(lambda: torch.autograd.grad(joined, scalars, grad, retain_graph=True), device)


Case = tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]
"""A call, and the shapes of its inputs."""


def cases(device: str) -> dict[str, Case]:
    """Calls by name, attention in both settings of dropout."""
    lengths = torch.randint(1, L + 1, (B,), device=device)
    padding = (torch.arange(L, device=device) < lengths[:, None])[:, None, None]
    mask = tfast.AttentionMask.lengths(lengths)
    ends = torch.arange(0, B * L + 1, L, dtype=torch.int32, device=device)
    padded = tfast.AttentionMask.keep(padding)
    calls = {
        "no mask": lambda p, *qkv: tfast.attention(*qkv, dropout_p=p),
        "lengths": lambda p, *qkv: tfast.attention(*qkv, mask, dropout_p=p),
        "lengths, causal": lambda p, *qkv: tfast.attention(*qkv, mask, causal=True, dropout_p=p),
        "keep mask": lambda p, *qkv: tfast.attention(*qkv, padded, dropout_p=p),
        "packed": lambda p, *qkv: tfast.attention_packed(*qkv, ends, ends, max_seqlen_q=L, max_seqlen_k=L, dropout_p=p),
    }
    found: dict[str, Case] = {}
    for name, call in calls.items():
        shape = (B * L, H, D) if name == "packed" else (B, H, L, D)
        for p in (0.0, 0.1):
            found[f"{name}, dropout {p}"] = (lambda *qkv, c=call, p=p: c(p, *qkv)), [shape] * 3
    rows, width = (B * L, H * D), (H * D,)
    found["LayerNorm"] = tfast.layer_norm, [rows, width, width]
    found["residual, dropout 0.1, LayerNorm"] = (
        lambda x, residual, w, b: tfast.layer_norm(x, w, b, residual=residual, dropout_p=0.1)[0],
        [rows, rows, width, width],
    )
    found["bias, ReLU, dropout 0.1"] = lambda x, b: ops.dropout(x, 0.1, bias=b, relu=True), [rows, width]
    return found


def main(by_triton: bool = False) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pretend_to_have_a_gpu()
    torch.set_num_threads(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    launch_cache.enabled = launch_cache.enabled and not by_triton
    print(f"{'us a call over its launches':32} {'forward':>9} {'in training':>12} {'backward':>9}")
    with tfast.backend("triton"):
        for name, (call, shapes) in cases(device).items():
            inputs = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
            leaves = [t.clone().requires_grad_() for t in inputs]
            out = call(*leaves)
            grad = torch.randn_like(out)

            def forward(call=call, inputs=inputs) -> torch.Tensor:
                return call(*inputs)

            def train(call=call, leaves=leaves) -> torch.Tensor:
                return call(*leaves)

            def backward(out=out, leaves=leaves, grad=grad) -> None:
                torch.autograd.grad(out, leaves, grad, retain_graph=True)

            # The leaves alone require gradients: torch.no_grad() would be the caller's cost.
            ours = [least(call, device) - bare_launches(call, device) for call in (forward, train, backward)]
            ours[2] -= engine(leaves, device)
            print("{:32} {:9.1f} {:12.1f} {:9.1f}".format(name, *ours), flush=True)
        leaves = [torch.zeros((), device=device, requires_grad=True) for _ in range(3)]
        lengths = torch.full((B,), L, dtype=torch.int32, device=device)
        q = torch.randn(B, H, 1, D, device=device, dtype=dtype)
        k, v = (torch.randn(B, H, L, D, device=device, dtype=dtype) for _ in range(2))

        def decode() -> torch.Tensor:
            return tfast.attention_decode(q, k, v, lengths)

        print(f"{'decode':32} {least(decode, device) - bare_launches(decode, device):9.1f}")
        print(f"{'taken off backward: the engine':32} {'':9} {'':12} {engine(leaves, device):9.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-triton", action="store_true", help="launch through Triton, without the launch cache")
    main(parser.parse_args().by_triton)
