"""Use an installed wheel as a new user would: compare the kernels with the reference, and train a model for some steps.

    python tools/use_wheel.py 2.13
    python tools/use_wheel.py 2.13 --without-module

The argument is the minor version of torch whose extension is expected; without it none may be found. Without the module
of eager calls, as on a Python for which the wheel has none, the dispatcher calls the kernels.
"""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

import torch

WITHOUT_MODULE = "--without-module"
if WITHOUT_MODULE in sys.argv:
    importlib.machinery.EXTENSION_SUFFIXES[:] = [".cpython-999-x86_64-linux-gnu.so"]
tfast = importlib.import_module("transformer_fast")


def main(expected: str = "", option: str = "") -> None:
    home = Path(tfast.__file__).resolve()
    assert home.is_relative_to(Path(sys.prefix).resolve()), f"it is not the wheel: {home}"
    config = tfast.__config__()
    assert config["file"] == (f"libtransformer_fast_ops.torch{expected}.so" if expected else None), config
    assert bool(config["module"]) == (bool(expected) and option != WITHOUT_MODULE), config
    missing = f"there is no C++ extension for torch {torch.__version__.rpartition('.')[0]}, only for"
    assert expected or missing in config["status"], config["status"]
    assert option != WITHOUT_MODULE or "there is no module of eager calls for Python" in config["status"], config
    compare()
    train()
    print(config["status"])


def compare() -> None:
    """Compare attention's gradients with those of the reference."""
    gradients = {}
    for backend in ("auto", "reference"):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 33, 24, requires_grad=True) for _ in range(3))
        with tfast.backend(backend):
            tfast.attention(q, k, v, causal=True, dropout_p=0.1).square().sum().backward()
        gradients[backend] = torch.stack([q.grad, k.grad, v.grad])
    assert torch.allclose(*gradients.values(), atol=1e-4), "the kernels and the reference differ"


def train() -> None:
    """Train a small model until its loss is half of the first."""
    model = tfast.Transformer(src_vocab=40, trg_vocab=40, d_model=32, N=1, heads=2, dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.randint(1, 40, (8, 10))
    losses = []
    for _ in range(30):
        logits = model(tokens, tokens[:, :-1], None, tfast.AttentionMask.causal())
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses


if __name__ == "__main__":
    main(*sys.argv[1:])
