"""Counts the attention classes of installed packages that ``accelerate`` recognises, and compares their numbers.

``python tools/scan_attention.py vit_pytorch timm.models`` imports every module of the packages, builds each class of
them that is named as attention, with small sizes guessed from the names of the arguments, and accelerates it. A class
that cannot be built so is not counted. ``--without NamedAttention`` leaves a pattern out. Outputs and gradients are
compared for each class that is swapped as attention.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import inspect
import io
import pkgutil
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate import engine
from transformer_fast.accelerate.patterns.base import pattern_of

SIZES: tuple[tuple[str, Any], ...] = (
    (r"drop|prob|_p$|^p$", 0.0),
    (r"window_size|ws$|^win|sr_ratio", 4),
    (r"dim_head|head_dim|d_k$|d_v$|head_size|key_dim|dim_k", 16),
    (r"^(num_|n_|n)?(heads?|head_num|num)$|heads?$", 4),
    (r"dim|d_model|size|feat|width|channels|embed|units|hid|^c$|model|in_$|out_$|feature", 64),
    (r"bias|causal|norm_first|qk_norm", False),
    (r"len|resolution|patch|seq", 16),
    (r"eps", 1e-5),
)
"""Values of arguments without a default, by their names."""


def classes(packages: list[str]) -> Iterator[tuple[str, type[nn.Module]]]:
    """Yield the attention classes of packages, by name."""
    seen = set()
    for package in packages:
        for name in [package, *_modules(package)]:
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    module = importlib.import_module(name)
            except (Exception, SystemExit):  # a module that needs another package
                continue
            for key, kind in list(vars(module).items()):
                own = isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == name
                if own and re.search("attention|attn", key, re.IGNORECASE) and kind not in seen:
                    seen.add(kind)
                    yield f"{name}.{key}", kind


def _modules(package: str) -> list[str]:
    try:
        root = importlib.import_module(package)
    except Exception:
        return []
    found = pkgutil.walk_packages(getattr(root, "__path__", []), f"{package}.", onerror=lambda _: None)
    return [each.name for each in found if not each.name.endswith("__main__")]


def built(kind: type[nn.Module]) -> nn.Module | None:
    """Module of a class; None if its sizes cannot be guessed."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = next((value for pattern, value in SIZES if re.search(pattern, name)), None)
        if parameter.default is parameter.empty or re.search(r"^(num_|n_)?heads$|^dim_head$", name):
            given[name] = value
    for window in (4, (4, 4)):
        given = {name: window if "window" in name else value for name, value in given.items()}
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            return kind(**given).eval()
    return None


def difference(module: nn.Module, fast: nn.Module) -> str:
    """Largest difference of outputs and of gradients, relative, over the test calls of the pattern."""
    worst, calls = [0.0, 0.0], 0
    for call in pattern_of(fast).calls(copy.deepcopy(module)):  # type: ignore[union-attr]
        args = [
            a.requires_grad_() if isinstance(a, Tensor) and a.dim() == 3 and a.is_floating_point() else a for a in call
        ]
        with contextlib.suppress(RuntimeError, TypeError):
            results = [_results(m, args) for m in (module, fast)]
            if not results[0][0].isnan().any():
                for place in (slice(1), slice(1, None)):
                    size = max(float(theirs.abs().max()) for theirs in results[0][place])
                    errors = [float((a - b).abs().max()) for a, b in zip(*(r[place] for r in results), strict=True)]
                    worst[place.start is not None] = max(worst[place.start is not None], max(errors) / size)
                calls += 1
    return f"{calls} calls, outputs {worst[0]:.0e}, gradients {worst[1]:.0e}"


def _results(m: nn.Module, args: list[Any]) -> list[Tensor]:
    out = m(*args)
    out = out[0] if isinstance(out, tuple) else out
    trained = [t for t in (*args, *m.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    grads = torch.autograd.grad(out.square().sum(), trained, allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]


def main() -> int:
    """Print a row per class and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--without", default="", help="name of a pattern to leave out")
    options = parser.parse_args()
    engine.PATTERNS = tuple(p for p in engine.PATTERNS if p.name != options.without)
    torch.manual_seed(0)
    counts = {"by its structure": 0, "by the function": 0, "left": 0}
    for name, kind in classes(options.packages):
        if (module := built(kind)) is None or not list(module.parameters()):
            continue
        fast = copy.deepcopy(module)
        row = tfast.accelerate(fast).rows
        row = next((row for row in row if row.path == ""), None)
        pattern = pattern_of(fast)
        if pattern is not None and pattern.attends:
            counts["by its structure"] += 1
            print(f"{name}: {row.now}: {difference(module, fast)}")
        elif row is not None and row.now and "scaled_dot" in row.now:
            counts["by the function"] += 1
            print(f"{name}: {row.now}")
        else:
            counts["left"] += 1
            print(f"{name}: left: {row.reason if row else ''}; children {sorted(module._modules)}")
        sys.stdout.flush()
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
