"""BERT in evaluation beside runtimes for inference: onnxruntime, OpenVINO and CTranslate2.

6 layers, d_model 512, 8 heads, d_ff 2048, 8,000 tokens, random weights. One sentence of 32 tokens, a batch of four of
128, 90, 60 and 34 tokens, and one of 16, of which 44 % is padding. "kept" is ``keep_weights=True``, "packed" is
``packed=True``; "by sentence" runs one sentence after the other, without padding. Each runtime gets the model's own
weights. Before anything is timed, the states at tokens are compared with those of the plain model in fp32. A runtime
that is not installed, or that has no such type on this processor, is listed with the reason. In int8, NNCF quantises
OpenVINO's model statically, with sentences as its calibration; all others quantise their inputs in each call.

    pip install openvino nncf onnxruntime onnxscript ctranslate2
    OMP_NUM_THREADS=1 pytest benchmarks/bench_runtimes.py --seconds 10 --benchmark-json runtimes.json
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate import Int8

SMALL_CASE = "test_bert[cpu-1x32-bf16]"
try:
    import transformers
except ImportError:
    transformers = None

VOCAB, WIDTH, LAYERS, HEADS, D_FF = 8000, 512, 6, 8, 2048
BATCHES = {
    "1x32": [32],
    "4x128": [128, 90, 60, 34],
    "16x128": [128, 16, 120, 24, 112, 32, 104, 40, 96, 48, 88, 56, 80, 64, 72, 72],
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
TOLERANCE = {"fp32": 1e-4, "bf16": 0.12, "int8": 0.25}
"""Largest difference of a state from that of the plain model in fp32; states are of size 1."""

Given = tuple[Tensor, Tensor]
Run = Callable[[Given], Tensor]


def bert() -> nn.Module:
    """A BERT of transformers with random weights, in evaluation."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": D_FF}
    return transformers.BertModel(transformers.BertConfig(vocab_size=VOCAB, **sizes), add_pooling_layer=False).eval()


def batch(lengths: list[int]) -> Given:
    """Ids and their mask, (B, L) each."""
    torch.manual_seed(1)
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.randint(5, VOCAB, keep.shape).where(keep, 0), keep.long()


class States(nn.Module):
    """A model with the last hidden states as its only output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Apply the model: ids and mask (B, L) -> (B, L, d_model)."""
        return self.model(ids, mask).last_hidden_state


def by_torch(model: nn.Module) -> Run:
    def run(given: Given) -> Tensor:
        with torch.no_grad():
            return model(*given)[0]

    return run


def ours(dtype: torch.dtype, **options: bool) -> Run:
    if dtype != torch.int8:
        model = bert().to(dtype)
        tfast.accelerate(model, **options)
    elif "keep_weights" in options:
        raise RuntimeError("int8 weights are kept anyway")
    else:
        model = bert()
        tfast.accelerate(model, quantize=Int8(free=True), **options)
    return by_torch(model)


def eager(dtype: torch.dtype) -> Run:
    if dtype == torch.int8:
        return by_torch(torch.ao.quantization.quantize_dynamic(bert(), {nn.Linear}))
    return by_torch(bert().to(dtype))


def frozen(dtype: torch.dtype) -> Run:
    """``torch.compile`` with the weights as constants, which Inductor lays out when it compiles."""
    if dtype == torch.int8:
        raise RuntimeError("Inductor quantises no fp32 model")
    model = States(bert().to(dtype))
    compiled = torch.compile(model, options={"freezing": True}, dynamic=False)

    def run(given: Given) -> Tensor:
        with torch.no_grad():
            return compiled(*given)

    return run


def onnx(dtype: torch.dtype) -> Run:
    import onnxruntime

    if dtype == torch.bfloat16:
        raise RuntimeError("onnxruntime has no bf16 products on a CPU")
    example, batch_and_length = batch(BATCHES["4x128"]), {0: torch.export.Dim("B"), 1: torch.export.Dim("L", max=512)}
    program = torch.onnx.export(
        States(bert()), example, dynamo=True, dynamic_shapes=(batch_and_length,) * 2, verbose=False
    )
    program.save(data := io.BytesIO())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    model: bytes | str = data.getvalue()
    with tempfile.TemporaryDirectory() as folder:
        if dtype == torch.int8:
            from onnxruntime.quantization import quantize_dynamic

            exact, model = Path(folder, "fp32.onnx"), str(Path(folder, "int8.onnx"))
            exact.write_bytes(data.getvalue())
            quantize_dynamic(exact, model)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda given: torch.from_numpy(session.run(None, {n: t.numpy() for n, t in zip(names, given)})[0])


def openvino(dtype: torch.dtype) -> Run:
    import openvino

    with torch.no_grad():
        model = openvino.convert_model(States(bert()), example_input=batch([8, 5]))
    if dtype == torch.int8:
        import nncf

        ids, mask = batch(BATCHES["16x128"])
        rows = [(ids[i : i + 1, :n].numpy(), mask[i : i + 1, :n].numpy()) for i, n in enumerate(mask.sum(1).tolist())]
        kind = nncf.ModelType.TRANSFORMER
        model = nncf.quantize(model, nncf.Dataset(rows), model_type=kind, subset_size=len(rows))
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "bf16" if dtype == torch.bfloat16 else "f32",
        "ENABLE_CPU_PINNING": False,
    }
    request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
    return lambda given: torch.from_numpy(request.infer([t.numpy() for t in given])[0])


def ctranslate(dtype: torch.dtype) -> Run:
    import ctranslate2
    import numpy

    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "model")
        model = bert()
        model.config.position_embedding_type = "absolute"  # CTranslate2 reads what transformers no longer writes
        model.save_pretrained(saved)
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCAB - 5))]
        (saved / "vocab.txt").write_text("\n".join(words))
        transformers.BertTokenizer(str(saved / "vocab.txt")).save_pretrained(saved)
        ctranslate2.converters.TransformersConverter(str(saved)).convert(str(Path(folder, "converted")))
        name = str(dtype).removeprefix("torch.")
        try:
            encoder = ctranslate2.Encoder(
                str(Path(folder, "converted")), compute_type=name, intra_threads=torch.get_num_threads()
            )
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    def run(given: Given) -> Tensor:
        ids, mask = given
        found = encoder.forward_batch([row[:n] for row, n in zip(ids.tolist(), mask.sum(1).tolist())])
        return torch.from_numpy(numpy.array(found.last_hidden_state))

    return run


def by_sentence(run: Run) -> Run:
    """Run each sentence alone; the states of tokens, (1, T, d_model)."""

    def each(given: Given) -> Tensor:
        ids, mask = given
        rows = [(ids[i : i + 1, :n], mask[i : i + 1, :n]) for i, n in enumerate(mask.sum(1).tolist())]
        return torch.cat([run(row).clone() for row in rows], dim=1)

    return each


WAYS: dict[str, Callable[[torch.dtype], Run]] = {
    "ours": lambda dtype: ours(dtype),
    "ours packed": lambda dtype: ours(dtype, packed=True),
    "ours kept": lambda dtype: ours(dtype, keep_weights=True),
    "ours packed, kept": lambda dtype: ours(dtype, packed=True, keep_weights=True),
    "eager": eager,
    "compiled, frozen": frozen,
    "onnxruntime": onnx,
    "OpenVINO": openvino,
    "OpenVINO by sentence": lambda dtype: by_sentence(openvino(dtype)),
    "CTranslate2": ctranslate,
}
"""Functions that make each way to run the model in a type."""


def tokens(states: Tensor, mask: Tensor) -> Tensor:
    """States of the tokens, (T, d_model), in fp32."""
    states = states.float()
    return states[0] if states.shape[:2] != mask.shape else states[mask.bool()]


@pytest.mark.skipif(transformers is None, reason="needs transformers")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", BATCHES)
def test_bert(versus, benchmark, request, size, dtype, device):
    """The last hidden states of a BERT, on a CPU."""
    if device != "cpu":
        pytest.skip("the runtimes are compared on a CPU")
    given = batch(BATCHES[size])
    expected = tokens(by_torch(bert())(given), given[1])
    runs, missing = {}, {}
    for name, make in WAYS.items():
        if name == "compiled, frozen" and not request.config.getoption("--compile-whole"):
            continue
        try:
            run = make(TYPES[dtype])
            found = tokens(run(copy.deepcopy(given)), given[1])
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error).strip().splitlines()[0][:200]
            continue
        assert (found - expected).abs().max() < TOLERANCE[dtype], name
        runs[name] = run
    versus(lambda: given, runs)
    benchmark.extra_info["refused"] |= missing
