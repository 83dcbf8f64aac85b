"""A query whose keys are all blocked, where other libraries give NaN, zeros, or the mean of all values.

The plain model is the oracle, at every position, for each implementation of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
PARTS = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "init_std": 0.3,
    "max_position_embeddings": 16, "pad_token_id": 31, "decoder_start_token_id": 31,
}  # fmt: skip
T5 = {
    "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "pad_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip


def make(name: str, attention: str, **config: Any) -> nn.Module:
    """Return a model with random weights of its own seed."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config, attn_implementation=attention)).eval()


@torch.no_grad()
def check(name: str, attention: str, config: dict[str, Any], inputs: dict[str, Tensor]) -> Tensor:
    """Compare an accelerated model with the plain one, at every position; return what came out."""
    plain, model = make(name, attention, **config), make(name, attention, **config)
    assert any(row.now and "attn_implementation" in row.now for row in tfast.accelerate(model).rows)
    out = model(**inputs)[0]
    torch.testing.assert_close(out, plain(**inputs)[0], atol=1e-5, rtol=1e-5)
    return out


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_sentence_of_padding_alone(attention: str) -> None:
    ids = torch.arange(3, 15).view(2, 6)
    mask = torch.tensor([[1] * 6, [0] * 6])
    check("BertModel", attention, SIZES, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padding_of_a_causal_model(attention: str) -> None:
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    inputs = {"input_ids": torch.arange(3, 15).view(2, 6), "attention_mask": mask}
    check("LlamaForCausalLM", attention, {**SIZES, "num_key_value_heads": 1}, inputs)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float])
def test_a_mask_of_four_axes_with_an_empty_row(kind: torch.dtype, attention: str) -> None:
    """An eager model adds a bool mask, so that True is 1 there; the accelerated one must do the same."""
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[:, :, 2], keep[:, :, :, 4:] = False, False
    mask = keep if kind == torch.bool else torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float).min)
    check("BertModel", attention, SIZES, {"input_ids": torch.arange(3, 15).view(2, 6), "attention_mask": mask})


@torch.no_grad()
def test_a_bool_mask_of_four_axes_keeps_where_it_is_true() -> None:
    """In our attention; a model with eager attention adds the mask, and does not stay causal."""
    tfast.integrations.transformers.register()
    ids = torch.arange(3, 9)[None].repeat(2, 1)
    ids[1, 4:] += 8
    keep = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    changed = {}
    for attention in ("transformer_fast", "sdpa", "eager"):
        first, second = make("BertModel", attention, **SIZES)(input_ids=ids, attention_mask=keep)[0][:, :4]
        changed[attention] = not torch.allclose(first, second, atol=1e-5)
    assert changed == {"transformer_fast": False, "sdpa": False, "eager": True}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "MarianMTModel"])
def test_the_first_position_of_a_decoder(name: str, attention: str) -> None:
    """The start token is the padding token, and a mask of the padding blocks it: the plain model may see the target."""
    config, seen = (T5 if name.startswith("T5") else PARTS), []
    for end in ([7, 8, 9], [10, 11, 12]):
        ids = torch.tensor([[config["decoder_start_token_id"], 5, 6, *end]])
        mask = (ids != config["pad_token_id"]).long()
        inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": ids, "decoder_attention_mask": mask}
        seen.append(check(name, attention, config, inputs))
    torch.testing.assert_close(seen[0][:, 1:3], seen[1][:, 1:3], atol=1e-4, rtol=1e-4)


ROWS: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda q, k, v, m: tfast.attention(q, k, v, tfast.AttentionMask.keep(m)),
    "zero": lambda q, k, v, m: tfast.attention(q, k, v, tfast.AttentionMask.keep(m), empty_rows="zero"),
    "sdpa": tfast.scaled_dot_product_attention,
}
EXPORTS = {"newer, 18": (True, 18), "newer, 23": (True, 23), "older, 18": (False, 18)}


class Calling(nn.Module):
    """Module that calls a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def exported(model: nn.Module, args: tuple[Tensor, ...], path: Path, exporter: str) -> dict[str, Tensor]:
    """Return the output of each runtime for the graph that an exporter makes."""
    onnxruntime = pytest.importorskip("onnxruntime")
    reference = pytest.importorskip("onnx.reference")
    newer, opset = EXPORTS[exporter]
    names = [f"in{place}" for place in range(len(args))]
    torch.onnx.export(model, args, path, input_names=names, dynamo=newer, opset_version=opset)
    feed = {name: t.numpy() for name, t in zip(names, args)}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    runs = {"onnxruntime": session.run, "onnx.reference": reference.ReferenceEvaluator(str(path)).run}
    return {name: torch.from_numpy(run(None, feed)[0]) for name, run in runs.items()}


@pytest.mark.parametrize("exporter", EXPORTS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [torch.bool, torch.float])
def test_in_graphs_of_onnx(kind: torch.dtype, rows: str, exporter: str, tmp_path: Path) -> None:
    if kind == torch.float and rows != "sdpa":
        pytest.skip("a keep mask is bool")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[2] = False
    mask = keep if kind == torch.bool else torch.zeros(4, 4).masked_fill(~keep, float("-inf"))
    args = q, k, v, mask
    expected = ROWS[rows](*args)
    for runtime, out in exported(Calling(ROWS[rows]), args, tmp_path / "rows.onnx", exporter).items():
        torch.testing.assert_close(
            out, expected, atol=1e-5, rtol=1e-5, msg=lambda text, name=runtime: f"{name}: {text}"
        )


@pytest.mark.parametrize("exporter", EXPORTS)
def test_two_masks_of_float16_whose_sum_is_not_finite(exporter: str, tmp_path: Path) -> None:
    """PyTorch's own graph of opset 18 gives the row a number of no meaning."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8).half()
    mask = torch.zeros(4, 4).half()
    mask[2] = torch.finfo(torch.float16).min
    model = Calling(lambda q, k, v, m, n: tfast.scaled_dot_product_attention(q, k, v, m + n))
    for out in exported(model, (q, k, v, mask, mask), tmp_path / "half.onnx", exporter).values():
        assert not out[:, :, 2].any()
        torch.testing.assert_close(out, model(q, k, v, mask, mask), atol=2e-3, rtol=2e-3)


class Padded(nn.Module):
    """Encoder layer whose mask is its second argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        tfast.accelerate(self.layer)

    def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=blocked)


def padded() -> tuple[Tensor, Tensor]:
    """Return a batch with a sentence of padding alone, and its mask."""
    torch.manual_seed(1)
    return torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([3, 0, 5])[:, None]


@pytest.mark.parametrize("exporter", EXPORTS)
def test_an_encoder_layer_in_graphs_of_onnx(exporter: str, tmp_path: Path) -> None:
    """The plain layer gives NaN to the empty sentence, and does not run in onnxruntime at opset 23."""
    model = Padded()
    with torch.no_grad():
        expected = model(*padded())
    assert not expected.isnan().any()
    for out in exported(model, padded(), tmp_path / "layer.onnx", exporter).values():
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_in_openvino(rows: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[2] = False
    args = q, k, v, keep
    converted = openvino.convert_model(Calling(ROWS[rows]), example_input=args)
    path = tmp_path / "rows.xml"
    openvino.save_model(converted, path)  # stores float16: -inf becomes -65504, and NaN 65504
    for model in (converted, path):
        compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        out = torch.from_numpy(compiled([t.numpy() for t in args])[0])
        torch.testing.assert_close(out, ROWS[rows](*args), atol=1e-5, rtol=1e-5)
