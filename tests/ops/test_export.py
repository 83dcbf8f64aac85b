"""Exported models (torch.export, and the ONNX exporter on it) consist of PyTorch's own operators.

The graph is made with one batch and length, and computes the same for another: no mask and no size is a constant of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_models import VOCABULARY, D, Padded
from export_cases import MODELS, OPS, Call, Case, Inputs, ids, keep, transformer_inputs
from export_compat import COMPAT, OFFSETS, SDPA
from op_calls import Operators
from pages import DOCS
from subprocesses import program
from test_compile_held import BY_NAME, Form, held_by, inputs_of, result, sizes_of
from test_public_errors import VALID
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

import transformer_fast as tfast
from transformer_fast.ops import registry
from transformer_fast.ops.registry import implementation


def every_tensor(form: Form) -> Case:
    """A call in which a tensor of one shape fills one argument or part of a mask, with all sizes open."""

    def inputs(batch: int, length: int) -> Inputs:
        sizes = sizes_of(form, BATCHES.index((batch, length)), held=False)
        return *inputs_of(form, sizes).values(), *held_by(form, sizes)

    def call(*tensors: Tensor) -> Tensor:
        names = list(inputs_of(form, sizes_of(form, 0, held=False)))
        return result(form, dict(zip(names, tensors, strict=False)), list(tensors[len(names) :]))

    return lambda: Call(call), inputs


TENSORS = {name: every_tensor(form) for name, form in BY_NAME.items()}
CASES = OPS | COMPAT | OFFSETS | SDPA | MODELS | TENSORS
BATCHES = (3, 7), (2, 11)
"""Batch size and length of the graph, and others."""


def all_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def made(case: Case) -> tuple[nn.Module, list[Inputs], list[list[Tensor]]]:
    """Return a model in evaluation mode, inputs of two batches, and its outputs."""
    make, inputs = case
    model, args = make().eval(), [inputs(*batch) for batch in BATCHES]
    with torch.no_grad():
        return model, args, [all_of(model(*given)) for given in args]


def assert_same(found: Any, expected: list[Tensor]) -> None:
    torch.testing.assert_close(all_of(found), expected, atol=1e-5, rtol=1e-5)


def open_sizes(args: list[Inputs]) -> list[dict[int, Any]]:
    """Return, per input, the dimensions that differ between the two batches."""
    pairs = zip(*args, strict=True)
    return [{d: torch.export.Dim.AUTO for d in range(a.dim()) if a.shape[d] != b.shape[d]} for a, b in pairs]


def exported(model: nn.Module, args: list[Inputs]) -> torch.export.ExportedProgram:
    sizes = open_sizes(args)
    by_name = (tuple(sizes),) if isinstance(model, Call) else tuple(sizes)  # Call has *args
    with torch.no_grad():
        return torch.export.export(model, args[0], dynamic_shapes=by_name)


def test_every_function_of_compat_has_a_case() -> None:
    functions = [getattr(tfast.compat, name) for name in tfast.compat.__all__]
    taking = {f.__name__ for f in functions if any("Tensor" in str(kind) for kind in f.__annotations__.values())}
    assert "varlen_attn" in taking
    assert taking <= {name.split(",")[0] for name in COMPAT}


READ_BEFORE = "flex_attention, a block mask"
"""A call that torch.export refuses: a block mask has to be read before."""
CALLS = [name for name in COMPAT | OFFSETS | SDPA if name != READ_BEFORE]
DECOMPOSED = [name for name in CASES if name not in (READ_BEFORE, "packed attention")]
"""All but two: a graph cannot read the longest length from a tensor, which "packed attention" does not give."""
IN_ONNX = [name for name in OPS | MODELS if name != "packed attention"] + CALLS


def to_decompose() -> Iterator[Any]:
    """Cases of DECOMPOSED; slow ones run with --all."""
    long = "parts of a mask", "parts of a mask, packed and decoding", "packed attention, lengths given", "packed"
    for name in DECOMPOSED:
        yield pytest.param(name, marks=pytest.mark.slow("torch.export needs seconds") if name in long else ())


@pytest.mark.cover(6)
@pytest.mark.parametrize("name", list(to_decompose()))
def test_decomposed(name: str) -> None:
    model, args, expected = made(CASES[name])
    graph = exported(model, args)
    assert "transformer_fast" in str(graph.graph), "without decompositions the program has the fused ops"
    for given, results in zip(args, expected, strict=True):
        assert_same(graph.module()(*given), results)
    graph = graph.run_decompositions(tfast.decompositions())
    assert "transformer_fast" not in str(graph.graph)
    for given, results in zip(args, expected, strict=True):
        assert_same(graph.module()(*given), results)


def run_by_onnx(path: Path, args: Inputs) -> list[Tensor]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {i.name: t.numpy() for i, t in zip(session.get_inputs(), args, strict=True)}
    return [torch.from_numpy(result) for result in session.run(None, given)]


def check_onnx(path: Path, args: list[Inputs], expected: list[list[Tensor]]) -> None:
    for given, results in zip(args, expected, strict=True):
        assert_same(run_by_onnx(path, given), results)


@pytest.mark.cover(2)
@pytest.mark.parametrize("name", IN_ONNX)
@pytest.mark.filterwarnings("ignore")
def test_onnx(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, args, expected = made(CASES[name])
    sizes, path = tuple(open_sizes(args)), tmp_path / "model.onnx"
    by_name = (sizes,) if isinstance(model, Call) else sizes
    torch.onnx.export(model, args[0], path, dynamo=True, dynamic_shapes=by_name, verbose=False)
    check_onnx(path, args, expected)


def test_a_block_mask_has_to_be_read_before_an_export() -> None:
    model, args, _ = made(CASES[READ_BEFORE])
    with pytest.raises(ValueError, match="cannot read a BlockMask; convert it before, and pass the AttentionMask"):
        exported(model, args)


def test_the_page_says_what_is_tested() -> None:
    """docs/export.md has this table; the lines of it that differ are in the message."""
    rows = {"each op": list(OPS), "each tensor of an attention call, in each shape": list(TENSORS)}
    rows["an offset that is computed from sizes"] = list(OFFSETS)
    rows["`scaled_dot_product_attention`, other numbers of axes"] = list(SDPA)
    for name in COMPAT:
        rows.setdefault(f"`compat.{name.split(',')[0]}`", []).append(name)
    rows["models"] = list(MODELS)
    ways = {"ONNX": IN_ONNX, "exported program": DECOMPOSED}
    table = [f"| calls | {' | '.join(ways)} |"]
    for what, names in rows.items():
        counts = [sum(name in tested for name in names) for tested in ways.values()]
        cells = ["all" if n == len(names) else f"{n} of {len(names)}" for n in counts]
        table.append(f"| {what}: {len(names)} | {' | '.join(cells)} |")
    page = (DOCS / "export.md").read_text().splitlines()
    start = next(n for n, line in enumerate(page) if line.startswith("| calls |"))
    found = [page[start], *itertools.takewhile(lambda line: line.startswith("|"), page[start + 2 :])]
    assert found == table, "\n".join(table)


@pytest.mark.slow("the exporter works for ten seconds")
@pytest.mark.parametrize("name", ["bert", "parts of a mask"])
@pytest.mark.filterwarnings("ignore")
def test_onnx_of_an_exported_program(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, args, expected = made(CASES[name])
    graph = exported(model, args).run_decompositions(tfast.decompositions())
    path = tmp_path / "model.onnx"
    torch.onnx.export(graph, f=path, dynamo=True, verbose=False)
    check_onnx(path, args, expected)


IN_A_FRESH_PROCESS = """
import sys, torch
model = torch.{load}({path!r}){module}
args, expected = torch.load({data!r})
for given, results in zip(args, expected):
    torch.testing.assert_close(model(*given), results[0], atol=1e-5, rtol=1e-5)
assert not any(name.startswith("transformer_fast") for name in sys.modules)
"""


@pytest.mark.slow("torch.export needs ten seconds")
def test_a_saved_graph_runs_without_this_package(tmp_path: Path) -> None:
    model, args, expected = made(MODELS["Transformer"])
    path, data = str(tmp_path / "model.pt2"), str(tmp_path / "data.pt")
    torch.save((args, expected), data)
    torch.export.save(exported(model, args).run_decompositions(tfast.decompositions()), path)
    program(IN_A_FRESH_PROCESS.format(load="export.load", path=path, module=".module()", data=data), cwd=tmp_path)


def test_a_saved_program_of_fused_ops_needs_the_import_alone(tmp_path: Path) -> None:
    model, args, expected = made(MODELS["post-norm layer"])
    path, data = str(tmp_path / "model.pt2"), str(tmp_path / "data.pt")
    torch.save((args, expected), data)
    torch.export.save(exported(model, args), path)
    code = IN_A_FRESH_PROCESS.format(load="export.load", path=path, module=".module()", data=data)
    code = "import transformer_fast" + code.replace("assert not", "assert")
    program(code)


def test_a_graph_in_training_is_refused() -> None:
    args = transformer_inputs(3, 7)
    graph = exported(Padded(), [args, args])
    with pytest.raises(RuntimeError, match=r"embed: .* cannot write dropout .* is 0\.1; call model\.eval\(\)"):
        graph.run_decompositions(tfast.decompositions())


@pytest.mark.parametrize("name", sorted(VALID))
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_function_is_not_recorded_by_torchscript(name: str) -> None:
    call = {key: value for key, value in VALID[name].items() if key != "dropout_p"}
    tensors = {key: value for key, value in call.items() if isinstance(value, Tensor)}

    def record(x: Tensor, *given: Tensor) -> Tensor:
        out = getattr(tfast.ops, name)(**call | dict(zip(tensors, given)))
        return x + (out[0] if isinstance(out, tuple) else out).sum()

    with pytest.raises(RuntimeError, match=rf"^{name}: torch\.jit\.trace, .* expected torch\.export"):
        torch.jit.trace(record, (torch.zeros(()), *tensors.values()))
    record(torch.zeros(()), *tensors.values())  # later calls run


@pytest.mark.parametrize("call", [
    lambda x: tfast.attention(x, x, x, causal=x.shape[2] - 1),
    lambda x: tfast.compat.flash_attn_func(x, x, x, causal=True),
    lambda x: tfast.embed(x[0, 0].long() * 0, x[0, 0, :1], x[0, 0], offset=x.shape[0]),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_number_from_sizes_is_not_recorded_by_torchscript(call: Any) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace, .* expected torch\.export"):
        torch.jit.trace(call, torch.randn(2, 2, 8, 8))


@pytest.mark.cover(1)
@pytest.mark.filterwarnings("ignore")
def test_bert_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tfast.integrations.transformers.register()
    sizes = {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=VOCABULARY, attn_implementation="transformer_fast", **sizes)
    bert_model = transformers.BertModel(config)
    model, args, expected = made(
        (
            lambda: Call(lambda m, i, k: m(input_ids=i, attention_mask=k).last_hidden_state * k[..., None], bert_model),
            lambda b, n: (ids(b, n), torch.ones(b, n).long() if n == 7 else keep(b, n).long()),
        )
    )
    path, sizes = tmp_path / "model.onnx", tuple(open_sizes(args))
    torch.onnx.export(model, args[0], path, dynamo=True, dynamic_shapes=(sizes,), verbose=False)
    found = [run_by_onnx(path, given) for given in args]
    for results, wanted in zip(found, expected, strict=True):
        assert_same(results, wanted)


@pytest.mark.cover(6)
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("bert", "nn.", "hand-written"))])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_dynamic_quantisation(name: str) -> None:
    """Quantised linear layers give close results, and the fused ops still run.

    ``tests/swap/test_quantised.py`` has models that are accelerated afterwards.
    """
    model, (_, args), (_, expected) = made(MODELS[name])
    quantised = quantize_dynamic(model, {nn.Linear}, torch.qint8)
    assert any(isinstance(m, torch.ao.nn.quantized.dynamic.Linear) for m in quantised.modules())
    with torch.no_grad(), Operators() as operators:
        results = all_of(quantised(*args))
    assert operators.ours
    for found, wanted in zip(results, expected, strict=True):
        assert not torch.equal(found, wanted)
        torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.05)


def test_a_quantised_model_translates() -> None:
    model = tfast.Transformer(VOCABULARY, VOCABULARY, 32, 1, 2, 0.0, d_ff=24).eval()
    quantised = quantize_dynamic(model, {nn.Linear}, torch.qint8)
    source = ids(2, 7)
    options = {"bos": 1, "eos": 2, "max_length": 6}
    cached, uncached = (tfast.greedy(quantised, source, cache=cache, **options) for cache in (True, False))
    assert cached == uncached and len(cached) == 2
    # Activations are quantised by the range of a step, which differs between decoding with and without a cache.
    cached, uncached = (tfast.beam_search(quantised, source, cache=cache, **options) for cache in (True, False))
    for a, b in zip(cached, uncached, strict=True):
        assert a[0].tokens == b[0].tokens and a[0].log_prob == pytest.approx(b[0].log_prob, abs=0.1)


RECORDED = {case.op: case for case in registry.op_cases(torch.device("cpu")) if "dropout" not in case.name}
"""A case of each op that has one without dropout: a graph of plain operators is not for training."""


@pytest.mark.parametrize("op", RECORDED)
def test_the_record_of_an_op_has_its_plain_form(op: str) -> None:
    case = RECORDED[op]
    inputs = tuple(case.inputs.values())
    model = Call(lambda *given: case.run(**dict(zip(case.inputs, given, strict=True))))
    program = torch.export.export(model, inputs)
    assert "transformer_fast" in str(program.graph)
    plain = program.run_decompositions(tfast.decompositions())
    assert "transformer_fast" not in str(plain.graph)
    torch.testing.assert_close(plain.module()(*inputs), case.run(**case.inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "std", "rms"])
def test_a_decomposed_norm_returns_the_statistics_of_the_op(kind: str) -> None:
    options = None, None, None, 1e-5, kind, 0.0, None
    x = torch.randn(5, 24)
    ours = torch.ops.transformer_fast.layer_norm(x, *options)
    torch.testing.assert_close(implementation("layer_norm", "plain")(x, *options), ours)
