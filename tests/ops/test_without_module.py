"""Without the module of eager calls, which a wheel has for some versions of Python: the library of the ops needs no
Python, and the dispatcher calls the same kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_calls import Call, assert_equal, attention_calls, calls, token_calls
from subprocesses import ROOT
from without_module import hidden

import transformer_fast as tfast
from transformer_fast import extension

pytestmark = pytest.mark.skipif(extension.module() is None, reason="there is no module to hide")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def every_call() -> dict[str, Call]:
    return {
        f"{name}, {dtype}": call for dtype in FLOATS for name, call in (calls(dtype) | attention_calls(dtype)).items()
    }


def results() -> dict[str, list[torch.Tensor]]:
    """Return outputs and gradients of the calls of every op, and outputs of those without gradients."""
    trained = {name: call.trained() for name, call in every_call().items()}
    return trained | {f"{name}, no gradient": call.outputs() for name, call in token_calls().items()}


def library() -> Path:
    return Path(extension.__file__).with_name(extension.build_info()["file"])


@pytest.mark.skipif(shutil.which("nm") is None or shutil.which("readelf") is None, reason="needs nm and readelf")
def test_the_library_of_the_ops_needs_no_python() -> None:
    def said(*command: str) -> str:
        return subprocess.run([*command, str(library())], capture_output=True, text=True, check=True).stdout

    needed = said("nm", "--dynamic", "--undefined-only", "--format=just-symbols").split()
    assert len(needed) > 100 and not [name for name in needed if re.match(r"_?Py[A-Z_]|THP|_ZN?K?8pybind11", name)]
    libraries = re.findall(r"\(NEEDED\).*\[(.*)\]", said("readelf", "--dynamic"))
    assert "libtorch_cpu.so" in libraries and not [name for name in libraries if "python" in name]


def test_every_op_computes_the_same_by_the_dispatcher(tmp_path: Path) -> None:
    saved = tmp_path / "results.pt"
    said = hidden(
        """
from test_without_module import results
with torch.profiler.profile() as profile:
    found = results()
torch.save(found, sys.argv[1])
print(*sorted({event.key for event in profile.key_averages() if event.key.startswith("transformer_fast::")}))
""",
        str(saved),
    )
    dispatched = {name.removeprefix("transformer_fast::") for name in said.split()}
    ops = {"attention", "attention_decode", "layer_norm", "dropout", "embed", "add_positional"}
    assert ops | {"linear_cross_entropy"} <= dispatched
    others, ours = torch.load(saved), results()
    assert others.keys() == ours.keys() and len(ours) > 100
    for name, tensors in ours.items():
        assert_equal(tensors, others[name], name)


def test_info_says_so() -> None:
    said = hidden(
        """
from transformer_fast import cli
assert cli.main(["info"]) == 0 and cli.main(["info", "--build"]) == 0
config = tfast.__config__()
print(config["module"], config["file"], "native" in tfast.explain(*torch.ones(3, 1, 2, 4, 8)))
try:
    with tfast.backend("triton"):
        tfast.layer_norm(torch.ones(2, 8), None, None)
except tfast.BackendError as error:
    print(error)
"""
    )
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    status = f"; but there is no module of eager calls for Python {python}, only for Python "
    assert said.count(status) == 2 and "the dispatcher calls the same kernels" in said
    slower = re.search(r"\d+ to \d+ microseconds", said)
    assert slower and slower[0] in (ROOT / "docs/install.md").read_text()
    assert f"None {library().name} True" in said and "   attention  float32   native: the default on cpu" in said
    assert "   module: None" in said


def test_the_gradient_of_weights_takes_the_reference(tmp_path: Path) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out, weights = tfast.attention(q, k, v, causal=True, return_weights=True)
    (out.sum() + weights.square().sum()).backward()
    said = hidden(
        """
q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    tfast.attention(q, k, v, causal=True, return_weights=True)
for tensor in (q, k, v):
    tensor.requires_grad_()
def both(q, k, v):
    return tfast.attention(q, k, v, causal=True, return_weights=True)
print(tfast.explain(q, k, v, causal=True, return_weights=True).partition("mask")[0])
print(tfast.explain(q, k, v, causal=True).partition("why")[0])
out, weights = torch.compile(both, fullgraph=True, backend="eager")(q, k, v)
(out.sum() + weights.square().sum()).backward()
torch.save([q.grad, k.grad, v.grad], sys.argv[1])
try:
    with tfast.backend("native"):
        tfast.attention(q, k, v, return_weights=True)
except tfast.BackendError as error:
    print(error)
""",
        str(tmp_path / "gradients.pt"),
    )
    torch.testing.assert_close(torch.load(tmp_path / "gradients.pt"), [q.grad, k.grad, v.grad])
    assert (
        "\nbackend: reference, the eager" in said and "\nwhy: the gradient of the weights: there is no module" in said
    )
    assert "\nbackend: native" in said
    refused = 'backend "native" cannot compute the gradient of the weights of attention: there is no module'
    assert said.splitlines()[-1].startswith(refused)


def test_explain_says_what_computes_weights_in_training() -> None:
    q = torch.randn(1, 2, 4, 8)
    said = "their gradient is computed by the eager reference"
    assert said not in tfast.explain(q, q, q, return_weights=True)
    q.requires_grad_()
    assert said in tfast.explain(q, q, q, return_weights=True) and said not in tfast.explain(q, q, q)
    with torch.no_grad():
        assert said not in tfast.explain(q, q, q, return_weights=True)


def test_layers_in_evaluation_and_generation() -> None:
    """Attention in one call, kept weights, int8 weights and a decoder's session: with the module they are one call."""
    hidden(
        """
import dataclasses
from transformer_fast.generation import GenerationConfig

torch.manual_seed(0)
def held(found, expected, **gate):
    torch.testing.assert_close(found, expected, **gate)

attention = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
x = torch.randn(2, 9, 32)
padding = torch.arange(9) >= torch.tensor([[9], [4]])
with torch.no_grad():
    expected = attention(x, x, x), model(x, src_key_padding_mask=padding)
    for options in ({}, {"packed": True}, {"keep_weights": True}):
        reports = tfast.accelerate(attention, **{**options, "packed": False}), tfast.accelerate(model, **options)
        held(attention(x, x, x), expected[0])
        held(model(x, src_key_padding_mask=padding)[~padding], expected[1][~padding])
        if "keep_weights" in options:
            assert "keep_weights: there is no module of eager calls" in str(reports[1])
            assert not any(row.now == "kept weights" for row in reports[1].rows), reports[1].rows
        for report in reports:
            report.undo()
    report = tfast.accelerate(model, quantize="int8")
    assert "int8: " in str(report)
    held(model(x, src_key_padding_mask=padding)[~padding], expected[1][~padding], rtol=0.1, atol=0.1)

model = tfast.Transformer(20, 20, d_model=16, N=1, heads=2, dropout=0.0).eval()
src = torch.tensor([[5, 6, 7], [8, 9, 0]])
given = dict(pad=0, bos=1, eos=2)
model.requires_grad_(False)
for options in ({}, {"beam": 3}, {"keep_weights": True}, {"quantize": "int8"}):
    config = GenerationConfig(max_length=6, **options)
    answers = [tfast.generate(model, src, **given, config=config) for _ in range(2)]
    if "quantize" not in options:
        plain = dataclasses.replace(config, cache=False, keep_weights=False)
        answers.append(tfast.generate(model, src, **given, config=plain))
    assert len({str([[h.tokens for h in found] for found in each]) for each in answers}) == 1
"""
    )


def test_a_packed_bert_trains_and_evaluates() -> None:
    pytest.importorskip("transformers", "5", reason="the table is of transformers 5")
    hidden(
        """
import copy
from transformers import BertConfig, BertModel

sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50)
plain = BertModel(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
fast = copy.deepcopy(plain)
report = tfast.accelerate(fast, packed=True)
assert "2 of 2" in str(report), report
ids, mask = torch.randint(1, 50, (3, 9)), torch.arange(9) < torch.tensor([[9], [4], [1]])
outputs, gradients = [], []
for model in (plain, fast):
    with torch.profiler.profile() as profile:
        out = model(ids, mask.long()).last_hidden_state[mask]
        (out * torch.linspace(-1, 1, 32)).square().sum().backward()
    outputs.append(out)
    gradients.append([p.grad for p in model.parameters() if p.grad is not None])
assert "transformer_fast::attention_backward" in {event.key for event in profile.key_averages()}
torch.testing.assert_close(*outputs)
torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
"""
    )
