"""Every size at which the package changes its path, by its place in the code, with the op that tests it.

A name that ``test_thresholds.py`` finds in the code must stand in one of the two tables.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.generation.sampling import Sampler
from transformer_fast.generation.weights import prepack
from transformer_fast.inference.int8 import pack
from transformer_fast.layers import Linear
from transformer_fast.ops.attention_call import check_head_dim
from transformer_fast.ops.cross_entropy import CHUNK_ELEMENTS
from transformer_fast.ops.dropout import dropout
from transformer_fast.ops.weight_layout import WeightLayout
from transformer_fast.reference.quantized_linear import int8_linear
from transformer_fast.swap.int8 import FEW_OUTPUTS
from transformer_fast.swap.lazy_logits import LazyLogits
from transformer_fast.tensor_cache import WHOLE, stamp_of
from transformer_fast.testing import ULPS, assert_as_exact_as_eager, fixed_dropout_seed

ROOT = Path(__file__).parents[2]


def constants(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the integer constants of a C++ file: ``constexpr int64_t kTile = 64, kSmall = int64_t{1} << 20;``."""
    for declaration in path.read_text().split("constexpr ")[1:]:
        for declared in declaration.partition(";")[0].split(","):
            name, _, value = declared.partition(" = ")
            base, _, shift = value.replace("int64_t{1}", "1").partition("<<")
            name = name.rpartition(" ")[2]
            with contextlib.suppress(ValueError):  # another expression
                if name.startswith("k"):
                    yield name, int(float(base)) << int(shift or 0)


def found() -> Iterator[tuple[str, int]]:
    """Return the names of the numbers in the code of ops, with their values there."""
    for path in sorted(p for folder in ("cpu", "inference", "ops") for p in (ROOT / "csrc" / folder).rglob("*.*")):
        for name, value in constants(path):
            yield f"{path.relative_to(ROOT)}:{name}", value
    for folder in ("generation", "huggingface", "inference", "layers", "ops", "swap", "."):
        for path in sorted((ROOT / "transformer_fast" / folder).glob("*.py")):
            assigned = [node.targets[0] for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
            names = [target.id for target in assigned if isinstance(target, ast.Name) and target.id.isupper()]
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) if names else None
            for name in names:
                if type(value := getattr(module, name)) is int:
                    yield f"{path.relative_to(ROOT)}:{name}", value
    yield "transformer_fast/ops/cross_entropy.py:CHUNK_ELEMENTS", CHUNK_ELEMENTS["cpu"]


def compare(call: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Check a call and its gradients on the kernels by the gate."""
    results = []
    for backend, dtype in (("native", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in inputs]
        with tfast.backend(backend), fixed_dropout_seed(3):
            out = call(*leaves)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            results.append([out, *torch.autograd.grad((out * weights).sum(), [t for t in leaves if t.requires_grad])])
    rows = max(t.numel() // max(1, t.shape[-1]) for t in (out, *inputs) if t.dim())  # over which gradients are summed
    for place, (actual, eager, exact) in enumerate(zip(*results, strict=True)):
        assert_as_exact_as_eager(actual, eager, exact, ulps=4 * rows**0.5 if place else ULPS)


def scaled(n: int, unit: int) -> int:
    """Return rows of a unit each: one less below a multiple of the unit, and one more above it."""
    return n // unit + (n % unit == 1)


def attend(B: int = 1, H: int = 2, Lq: int = 5, Lk: int = 7, D: int = 8, mask: Any = None, p: float = 0.0) -> None:
    qkv = torch.randn(B, H, Lq, D), torch.randn(B, H, Lk, D), torch.randn(B, H, Lk, D)
    compare(lambda q, k, v: tfast.attention(q, k, v, mask, dropout_p=p), *qkv)


def queries(n: int) -> None:
    attend(Lq=n, Lk=40), attend(Lq=n, Lk=n, mask=tfast.AttentionMask.causal(), p=0.3)


def keys(n: int) -> None:
    for L in (1, 3):
        attend(Lq=L, Lk=n, p=0.3), attend(B=2, Lq=L, Lk=n, mask=tfast.AttentionMask.lengths(torch.tensor([n, n - 1])))
    attend(Lq=n + 3, Lk=n, mask=tfast.AttentionMask.window(n - 2))
    attend(Lq=130, Lk=2 * n, mask=tfast.AttentionMask.window(n - 1, 1, offset=n))


def head_dim(n: int) -> None:
    """Test head_dim: C++ kernels take any size; Triton kernels take up to 256, and the backend says so."""
    attend(D=n)
    q = torch.randn(1, 2, 5, n)
    refused = pytest.raises(ValueError, match="up to 256") if n > 256 else contextlib.nullcontext()
    with refused:
        check_head_dim("attention", "triton", q, q)


def norm(rows: int, d: int) -> None:
    x, weight, bias = torch.randn(rows, d), torch.rand(d) + 0.5, torch.randn(d)
    compare(tfast.layer_norm, x, weight, bias)
    compare(lambda x, weight: tfast.layer_norm(x, weight, None, kind="rms"), x, weight)


def dropped(rows: int, d: int) -> None:
    compare(lambda x: dropout(x, 0.3), torch.randn(rows, d))


def embedded(ids: int, d: int = 16, vocabulary: int = 50) -> None:
    given = torch.randint(0, vocabulary, (1, ids))
    compare(lambda w, table: tfast.embed(given, w, table), torch.randn(vocabulary, d), torch.randn(ids, d))


def product(rows: int, inputs: int, outputs: int) -> None:
    layer = Linear(inputs, outputs)
    compare(lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, x),
            torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs))  # fmt: skip


def loss(rows: int, vocabulary: int) -> None:
    target = torch.randint(0, vocabulary, (rows,))
    compare(
        lambda x, w: tfast.linear_cross_entropy(x, w, None, target), torch.randn(rows, 4), torch.randn(vocabulary, 4)
    )


def loss_of_logits(rows: int, vocabulary: int) -> None:
    logits, target = torch.randn(rows, vocabulary, requires_grad=True), torch.randint(0, vocabulary, (rows,))
    results = []
    for call in (lambda: F.cross_entropy(logits, target), tfast.functional()(lambda: F.cross_entropy(logits, target))):
        out = call()
        results.append([out, *torch.autograd.grad(out, logits)])
        with torch.no_grad():
            results[-1].append(call())
    torch.testing.assert_close(*results)


def step_linear(rows: int, inputs: int = 20, outputs: int = 33, most: int = 0) -> None:
    """Test the linear layer of decoding, which copies its weights for up to this many rows."""
    linear = nn.Linear(inputs, outputs)
    x = torch.randn(rows, inputs)
    with torch.no_grad():
        for layout in (WeightLayout(), WeightLayout(keep=True), WeightLayout("int8")):
            found, exact = prepack(linear, most or rows, layout)(x), linear(x)
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if layout.quantize is None else {"rtol": 0.05, "atol": 0.05}
            torch.testing.assert_close(found, exact, **tolerance)


def int8_outputs(outputs: int) -> None:
    """Test a model whose layer of this many outputs may get int8 weights."""
    model, x = nn.Sequential(nn.Linear(40, outputs)).eval(), torch.randn(5, 40)
    with torch.no_grad():
        exact = model(x)
        report = tfast.accelerate(model, quantize="int8")
        torch.testing.assert_close(model(x), exact, rtol=0.05, atol=0.05)
    assert len(report.int8) == (outputs >= FEW_OUTPUTS)


def int8_results(count: int) -> None:
    """Test int8 products with this many results."""
    x, linear = torch.randn(count, 4), nn.Linear(4, 1).requires_grad_(False)
    found = torch.ops.transformer_fast.packed_linear(x, pack(linear.weight), linear.bias, 1, "none")
    torch.testing.assert_close(found, int8_linear(x, linear.weight, linear.bias), rtol=0, atol=0)


def kept_bf16(rows: int) -> None:
    """Test a linear layer with a kept weight in bf16, on this many rows."""
    layer, x = nn.Sequential(nn.Linear(40, 33)).eval().bfloat16(), torch.randn(rows, 40).bfloat16()
    with torch.no_grad():
        exact = layer(x)
        tfast.accelerate(layer, keep_weights=True)
        torch.testing.assert_close(layer(x), exact, rtol=2e-2, atol=2e-2)


def stamped(pairs: int) -> None:
    """Test a weight of this many pairs of values: one value, then all, are written to in a way that is not counted."""
    weight = torch.randn(1, 2 * pairs)
    before = stamp_of(weight)
    weight.data[0, pairs].add_(1.0)
    if pairs <= WHOLE:
        assert stamp_of(weight) != before
    weight.numpy()[:] *= 1.5
    assert stamp_of(weight) != before


def column(rows: int) -> None:
    """Test a weight of this many rows: each column is written to in a way that is not counted."""
    weight = torch.randn(rows, 96)
    before = stamp_of(weight)
    for written in weight.numpy().T:
        written *= 1.5
        assert stamp_of(weight) != before
        before = stamp_of(weight)


def generated(rows: int, tokens: int, length: int = 5) -> None:
    """Run greedy search on the kernels and on the reference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tfast.Transformer(40, 40, 16, 1, 2, 0.0).eval()
    src = torch.randint(3, 40, (rows, length))
    answers = []
    for backend in ("native", "reference"):
        with tfast.backend(backend):
            answers.append(tfast.greedy(model, src, bos=1, eos=2, max_length=tokens))
    assert answers[0] == answers[1]


def drawn(steps: int) -> None:
    """Draw tokens of equal logits step by step, and compare with the random number of each single step."""
    config, stream = tfast.GenerationConfig(sample=True, seed=3), torch.tensor([5])
    sampler = Sampler(config, stream)
    tokens = [int(sampler(torch.zeros(1, 1000), torch.tensor([0]))) for _ in range(steps)]
    assert tokens == [int(Sampler(config, stream)._uniform(step)[0, 0] * 1000) for step in range(steps)]


def logits_left_out(count: int) -> None:
    """Train one step of a model that may skip its logits."""
    V, d = 1024, 8
    model = nn.Sequential(nn.Embedding(V, d), nn.Linear(d, V, bias=False))
    plain = copy.deepcopy(model)
    assert [row.now for row in tfast.accelerate(model, fused_loss=True).swapped][-1] == "fused loss"
    ids, results = torch.randint(0, V, (1, scaled(count, V))), []
    for m in (model, plain):
        logits = m(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        results.append([loss, *torch.autograd.grad(loss, list(m.parameters()))])
        assert (type(logits) is LazyLogits) is (m is model and ids.numel() * V >= 2**20)
    torch.testing.assert_close(*results)


THRESHOLDS: dict[str, Callable[[int], None]] = {
    # attention
    "csrc/cpu/attention/attention_params.h:kQueryTile": queries,
    "csrc/cpu/attention/attention_params.h:kFewQueries": queries,
    "csrc/cpu/attention/attention_params.h:kKeyTile": keys,
    "csrc/cpu/attention/attention_params.h:kKeyStep": keys,
    "csrc/cpu/attention/few_queries.h:kRowKeys": keys,
    "csrc/cpu/attention/tile.h:kEnoughTasks": lambda n: attend(B=n, H=1),
    "csrc/ops/attention_op_checks.cpp:kLargestHeadDim": head_dim,
    "transformer_fast/ops/attention_call.py:MAX_TRITON_HEAD_DIM": head_dim,
    # norm; rows of 256 floats are a kibibyte
    "csrc/cpu/norm/backward.cpp:kCached": lambda n: norm(scaled(n, 1024), 256),
    "csrc/cpu/norm/backward.cpp:kShort": lambda n: norm(9, n),
    "csrc/cpu/norm/backward.cpp:kFewestColumns": lambda n: norm(300, n),
    "csrc/cpu/norm/backward.cpp:kLong": lambda n: norm(9, n),
    "csrc/cpu/norm/backward.cpp:kColumns": lambda n: norm(9, n),
    "csrc/cpu/norm/backward.cpp:kRowsAtOnce": lambda n: norm(n, 24),
    "csrc/cpu/partials.h:kChunkElements": lambda n: norm(scaled(n, 64), 64),
    "csrc/cpu/partials.h:kMostChunks": lambda n: norm(n * 128 + n % 2, 64),
    # dropout, embedding, linear, loss
    "csrc/cpu/simd/philox_dropout.h:kChunkColumns": lambda n: dropped(3, n),
    "csrc/cpu/simd/prefault.h:kLeastBytes": lambda n: (dropped(scaled(n, 256), 64), embedded(scaled(n, 64))),
    "csrc/cpu/embedding/forward.cpp:kCopied": lambda n: embedded(scaled(n, 64), 64),
    "csrc/cpu/embedding/backward.cpp:kSegment": lambda n: (embedded(n), embedded(n, vocabulary=1)),
    "csrc/cpu/embedding/positional_table.cpp:kStep": lambda n: embedded(n, d=n),
    "csrc/ops/linear.cpp:kLeastRows": lambda n: product(n, 1024, 1024),
    "csrc/ops/linear.cpp:kLeastProduct": lambda n: product(64, 256, scaled(n, 64 * 256)),
    "csrc/ops/linear.cpp:kLeastTransposed": lambda n: product(64, 256, scaled(n, 64 * 256)),
    "transformer_fast/layers/functions.py:FEW_CLASSES": lambda n: loss_of_logits(9, n),
    "csrc/ops/cross_entropy.cpp:kCopied": lambda n: loss_of_logits(scaled(n, 2**13), 2**13),
    "transformer_fast/ops/cross_entropy.py:CHUNK_ELEMENTS": lambda n: loss(scaled(n, 2**17), 2**17),
    # decoding
    "csrc/cpu/linear/quantized_linear.cpp:kBlock": step_linear,
    "csrc/cpu/linear/quantized_linear.cpp:kFar": int8_results,
    "transformer_fast/inference/prepacked.py:NARROW_ROWS": kept_bf16,
    "csrc/cpu/linear/step_linear.cpp:kDepth": lambda n: step_linear(3, inputs=n),
    "csrc/inference/decoder_session.cpp:kLogitRows": lambda n: generated(n, 4),
    "transformer_fast/generation/decoding.py:ENCODED_TOKENS": lambda n: generated(4, 3, scaled(n, 4)),
    "transformer_fast/generation/search.py:MOST_STEPS": lambda n: generated(3, n),
    "transformer_fast/generation/sampling.py:STEPS_AHEAD": drawn,
    "transformer_fast/generation/cache.py:BLOCK": lambda n: generated(3, n),
    "transformer_fast/inference/prepacked.py:NARROW": lambda n: step_linear(30, inputs=n, most=100),
    "transformer_fast/inference/prepacked.py:FEW_ROWS": step_linear,
    "csrc/inference/weight_stamp.cpp:kWhole": stamped,
    "transformer_fast/tensor_cache.py:WHOLE": stamped,
    "transformer_fast/tensor_cache.py:COLUMN": column,
    "transformer_fast/inference/prepacked.py:COPIED_ROWS": step_linear,
    "transformer_fast/inference/prepacked.py:INT8_INPUTS": lambda n: step_linear(2, inputs=n, outputs=1),
    # models
    "transformer_fast/swap/int8.py:FEW_OUTPUTS": int8_outputs,
    "transformer_fast/swap/output_layer.py:WORTH_IT": logits_left_out,
}
"""Function to run for each number, with one less and with one more."""

OTHERS: dict[str, str] = {
    "transformer_fast/ops/registry.py:SEED": "the seed of random inputs",
    "csrc/cpu/attention/attention_params.h:kMaxSavedScores": "2**26 scores are too many for a short test",
    "csrc/cpu/attention/attention_params.h:kNoDiagonal": "a number that no length reaches",
    "csrc/cpu/attention/tile.h:kWorthAThread": "the number of threads, which changes no result",
    "csrc/cpu/attention/few_queries.h:kVectors": "the size of a block of registers",
    "csrc/cpu/linear/linear_kernels.h:kPanelHeader": "a layout in memory",
    "csrc/cpu/linear/ahead.h:kGroupsAhead": "how far memory is fetched ahead",
    "csrc/cpu/simd/prefault.h:kAheadBytes": "how far memory is fetched ahead",
    "csrc/cpu/simd/prefault.h:kPageBytes": "the size of a page",
    "csrc/cpu/linear/quantized_rows.h:kGroup": "bytes in a word",
    "csrc/ops/attention.h:kTensors": "a number of arguments",
    "csrc/ops/embedding_cpu.cpp:kPage": "the size of a page",
    "csrc/ops/linear.cpp:kSaved": "a number of tensors",
    "csrc/ops/door.h:kAllOfIt": "a mark for all arguments",
    "csrc/ops/door.h:kAbsent": "a mark for no argument",
    "csrc/ops/door.h:kMostParameters": "the largest number of arguments of a door",
    "csrc/ops/door.h:kMostResults": "the largest number of results of a door",
    "transformer_fast/ops/linear.py:_NO_ONEDNN": "a mark for no library",
    "csrc/inference/generation.cpp:kMost": "the largest number that an argument may be",
    "csrc/ops/linear.cpp:kBlock": "the size of a block in a copy",
    "csrc/inference/weight_stamp.cpp:kBlock": "values that are read side by side",
    "transformer_fast/swap/rows.py:LINES": "lines of a printed report",
    "transformer_fast/huggingface/heads.py:IGNORED": "a label",
    "transformer_fast/swap/check_fast.py:_DRAWS": "random inputs of a trial",
    "transformer_fast/swap/check_form.py:_COMPARED": "numbers of a gradient that a trial compares",
    "transformer_fast/swap/check_form.py:_DROPOUTS": "dropouts that a trial tries one by one",
    "transformer_fast/swap/rows.py:WIDTH": "columns of a printed report",
    "transformer_fast/swap/rows.py:_CLASSES": "columns of a printed report",
    "transformer_fast/tensor_cache.py:BLOCK": "values that are read side by side",
    "transformer_fast/tensor_cache.py:FACTOR": "a constant of a hash",
    "transformer_fast/tensor_cache.py:ENTRIES": "the size of a cache",
}  # fmt: skip
"""Numbers that choose no path by an input size. Those of csrc/cpu/simd are vector sizes."""
