"""accelerate on the blocks of Hugging Face transformers: what a user's model computes is what it computed before."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_as_exact_as_eager
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate.patterns import blocks as patterns
from transformer_fast.accelerate.patterns import t5
from transformer_fast.accelerate.patterns.base import Accelerated
from transformer_fast.accelerate.probe import probe
from transformer_fast.layers import norm as fast_norm
from transformer_fast.ops.linear import is_faster, products_by

transformers = pytest.importorskip("transformers", minversion="5.0")
import huggingface_models as models  # noqa: E402

DENSE_NORM = "fused dense, dropout, LayerNorm"
BLOCKS = {  # model: its kind, what it was and what it is, by class
    "BertForMaskedLM": ("masked", {"BertSelfOutput": DENSE_NORM, "BertOutput": DENSE_NORM}),
    "RobertaForMaskedLM": ("masked", {"RobertaSelfOutput": DENSE_NORM, "RobertaOutput": DENSE_NORM}),
    "DistilBertForMaskedLM": (
        "masked", {"TransformerBlock": "fused DistilBertBlock", "FFN": "fused DistilBertFeedForward"},
    ),
    "MarianMTModel": (
        "seq2seq", {"MarianEncoderLayer": "fused BartEncoderLayer", "MarianDecoderLayer": "fused BartDecoderLayer"},
    ),
    "BartForConditionalGeneration": (
        "seq2seq", {"BartEncoderLayer": "fused BartEncoderLayer", "BartDecoderLayer": "fused BartDecoderLayer"},
    ),
    "M2M100ForConditionalGeneration": (
        "seq2seq",
        {"M2M100EncoderLayer": "fused PreNormBartEncoderLayer", "M2M100DecoderLayer": "fused PreNormBartDecoderLayer"},
    ),
    "WhisperForConditionalGeneration": (
        "transcription",
        {
            "WhisperEncoderLayer": "fused PreNormBartEncoderLayer",
            "WhisperDecoderLayer": "fused PreNormBartDecoderLayer",
        },
    ),
    "ViTForImageClassification": ("image", {"ViTLayer": "fused VitLayer"}),
    "T5ForConditionalGeneration": (
        "seq2seq",
        {
            "T5Block": "fused T5Block",
            "T5LayerSelfAttention": "fused T5SelfAttention",
            "T5LayerCrossAttention": "fused T5CrossAttention",
            "T5LayerFF": "fused T5FeedForward",
            "T5DenseActDense": "fused T5Dense",
        },
    ),
    "GPT2LMHeadModel": ("causal", {"GPT2Block": "fused Gpt2Block", "GPT2MLP": "fused Gpt2FeedForward"}),
}  # fmt: skip
WRITERS = ["MarianMTModel", "BartForConditionalGeneration", "T5ForConditionalGeneration", "GPT2LMHeadModel"]


def case(name: str) -> models.Case:
    return models.Case(BLOCKS[name][0], name)


@functools.cache
def _pair(name: str) -> tuple[nn.Module, nn.Module, Any]:
    eager = models.make(case(name), "eager")
    with torch.no_grad():  # norms that do something, and weights that are large enough to be seen
        for parameter in eager.parameters():
            if parameter.requires_grad:  # the others are computed, and not saved
                parameter.add_(0.1 * torch.randn_like(parameter))
    for m in eager.modules():
        for key in [key for key, p in vars(m).items() if isinstance(p, float) and ("dropout" in key or key == "p")]:
            setattr(m, key, 0.0)
    fast = copy.deepcopy(eager)
    return eager, fast, tfast.accelerate(fast)


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A model as transformers made it, and the same after accelerate."""
    eager, fast, _ = _pair(name)
    return copy.deepcopy(eager), copy.deepcopy(fast)


def blocks(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, Accelerated)]


def set_dropout(model: nn.Module, p: float) -> None:
    """Every dropout but those of attention weights, whose mask eager draws in its own way."""
    for path, m in model.named_modules():
        if isinstance(m, nn.Dropout) and not path.endswith(("self.dropout", "attention.dropout", "attn_dropout")):
            m.p = p
        if hasattr(m, "activation_dropout"):
            m.dropout = m.activation_dropout = p


def outcome(model: nn.Module, given: dict[str, Tensor], *, gradients: bool) -> dict[str, Tensor]:
    """Logits, and on request the gradients of a weighted mean of those that stand for no padding."""
    logits = (model(**given, use_cache=False) if "input_ids" in given else model(**given)).logits
    found = {"logits": logits}
    if gradients:
        weights = torch.linspace(-1, 2, logits.numel(), dtype=torch.float64).view_as(logits).to(logits.dtype)
        if "decoder_input_ids" not in given and "attention_mask" in given:
            weights = weights * given["attention_mask"].unsqueeze(-1)
        model.zero_grad(set_to_none=True)
        (logits * weights).mean().backward()
        found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_the_report_names_the_blocks(name: str) -> None:
    known = BLOCKS[name][1]
    rows = [row for row in _pair(name)[2].rows if row.was in known]
    assert {row.was: row.now for row in rows} == known
    assert all(row.now for row in rows)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", BLOCKS)
def test_evaluation_and_gradients_are_as_exact_as_eager_s(name: str, side: str) -> None:
    if side == "left" and BLOCKS[name][0] in ("image", "transcription"):
        return
    eager, fast = pair(name)
    exact, given = copy.deepcopy(eager).double(), models.inputs(case(name), side)
    wide = {key: t.double() if t.is_floating_point() else t for key, t in given.items()}
    with torch.no_grad():
        evaluated = [outcome(*run, gradients=False) for run in ((fast, given), (eager, given), (exact, wide))]
    runs = (fast.train(), given), (eager.train(), given), (exact.train(), wide)
    for ours, theirs, true in (evaluated, [outcome(*run, gradients=True) for run in runs]):
        assert ours.keys() == theirs.keys()
        largest = max(t.abs().max() for t in true.values())
        for key in theirs.keys() - {key for key, t in true.items() if t.abs().max() < 1e-7 * largest}:  # a key's bias
            # a gradient is summed over the rows of a batch, 21 of them, or 3 pictures of 17 patches
            ulps = 8.0 if key == "logits" else 4.0 * 51**0.5
            assert_as_exact_as_eager(ours[key], theirs[key], true[key], ulps=ulps, what=key)


@pytest.mark.parametrize("name", BLOCKS)
def test_dropping_everything(name: str) -> None:
    eager, fast = pair(name)
    given = models.inputs(case(name), "right")
    results = []
    for model in (fast.train(), eager.train()):
        set_dropout(model, 1.0)
        results.append(model(**given).logits)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_seed_decides_and_checkpointing_repeats_it(name: str) -> None:
    _, fast = pair(name)
    set_dropout(fast.train(), 0.3)
    given, results = models.inputs(case(name), "right"), []
    for seed, checkpointing in ((0, False), (0, True), (1, False)):
        if checkpointing:
            fast.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            fast.gradient_checkpointing_disable()
        torch.manual_seed(seed)
        results.append(outcome(fast, given, gradients=True))
    first, again, other = results
    for key, value in first.items():
        torch.testing.assert_close(again[key], value, rtol=0.0, atol=0.0, msg=key)
    assert not torch.allclose(first["logits"], other["logits"], atol=1e-3)


def test_the_probabilities_are_those_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = pair("MarianMTModel")
    layer = fast.model.decoder.layers[0].train()
    layer.dropout, layer.activation_dropout = 0.25, 0.125
    found: list[tuple[str, float]] = []
    norm, dropout = fast_norm.layer_norm, patterns.apply_dropout

    def watched_norm(*args: Any, dropout_p: float = 0.0, **options: Any) -> Any:
        found.append(("norm", dropout_p))
        return norm(*args, dropout_p=dropout_p, **options)

    def watched_dropout(p: float, x: Tensor, **options: Any) -> Tensor:
        found.append(("inner", p))
        return dropout(p, x, **options)

    monkeypatch.setattr(fast_norm, "layer_norm", watched_norm)
    monkeypatch.setattr(patterns, "apply_dropout", watched_dropout)
    x = torch.randn(2, 5, models.WIDTH)
    layer(x, None, x)
    assert found == [("norm", 0.25), ("norm", 0.25), ("inner", 0.125), ("norm", 0.25)]
    layer.eval()(x, None, x)
    assert {p for _, p in found[4:]} == {0.0}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_generation_writes_the_same_tokens(name: str, beams: int) -> None:
    eager, fast = pair(name)
    for model in (eager, fast):
        models.enlarge(model)
    for side in ("left", "right") if BLOCKS[name][0] == "seq2seq" else ("left",):
        given = {key: t for key, t in models.inputs(case(name), side).items() if not key.startswith("decoder")}
        options = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
        options |= {"decoder_start_token_id": 1} if BLOCKS[name][0] == "seq2seq" else {}
        written = [model.generate(**given, **options) for model in (fast, eager)]
        assert torch.equal(*written) and written[0].shape[1] > 3


@pytest.mark.parametrize("name", BLOCKS)
def test_captured_hidden_states_and_attentions(name: str) -> None:
    """transformers captures them with hooks that it installs when they are first asked for, and never takes away."""
    eager, fast = pair(name)
    given = models.inputs(case(name), "right")
    for model in (eager, fast):
        model.eval().set_attn_implementation("eager")  # only the blocks differ
    with torch.no_grad():
        for _ in range(2):
            ours, theirs = (m(**given, output_hidden_states=True, output_attentions=True) for m in (fast, eager))
            captured = [key for key in theirs if key.endswith(("hidden_states", "attentions"))]
            assert len(captured) >= 2 and list(ours) == list(theirs)
            for key in captured:
                for a, b in zip(ours[key], theirs[key], strict=True) if isinstance(theirs[key], tuple) else ():
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=key)
            torch.testing.assert_close(fast(**given).logits, eager(**given).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("BertForMaskedLM", ["bert.encoder.layer.0.output.LayerNorm", "bert.encoder.layer.0.output.dropout"]),
        ("MarianMTModel", ["model.encoder.layers.0.final_layer_norm", "model.decoder.layers.1.encoder_attn"]),
        ("T5ForConditionalGeneration", ["decoder.block.0.layer.1", "decoder.block.1.layer.2.layer_norm"]),
        ("GPT2LMHeadModel", ["transformer.h.0.mlp", "transformer.h.0.mlp.dropout", "transformer.h.1.ln_2"]),
        ("DistilBertForMaskedLM", ["distilbert.transformer.layer.0.ffn.dropout"]),
    ],
)
def test_a_submodule_with_a_hook_is_called(name: str, paths: list[str]) -> None:
    given, results = models.inputs(case(name), "right"), []
    for model in pair(name):
        seen: dict[str, Any] = {}
        for path in paths:
            hook = functools.partial(lambda seen, path, m, args, out: seen.update({path: out}), seen, path)
            model.get_submodule(path).register_forward_hook(hook)
        with torch.no_grad():
            model(**given)
        results.append({path: out[0] if isinstance(out, tuple) else out for path, out in seen.items()})
    assert results[0].keys() == set(paths)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BLOCKS)
def test_16_bit_models(name: str, dtype: torch.dtype) -> None:
    eager, fast = pair(name)
    exact = copy.deepcopy(eager).double()
    given = models.inputs(case(name), "right")
    results = []
    for model in (fast, eager, exact):
        kind = torch.float64 if model is exact else dtype
        cast = {key: t.to(kind) if t.is_floating_point() else t for key, t in given.items()}
        with torch.no_grad():
            results.append(model.to(kind)(**cast).logits)
    assert results[0].dtype == results[1].dtype
    assert_as_exact_as_eager(*results, ulps=8.0)


@pytest.mark.parametrize("name", BLOCKS)
def test_autocast(name: str) -> None:
    eager, fast = pair(name)
    given = models.inputs(case(name), "right")
    exact = copy.deepcopy(eager).double()
    wide = {key: t.double() if t.is_floating_point() else t for key, t in given.items()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (model(**given).logits for model in (fast, eager))
    assert ours.dtype == theirs.dtype
    assert_as_exact_as_eager(ours, theirs, exact(**wide).logits, ulps=8.0 * (2**16 if ours.dtype.itemsize == 4 else 1))


def test_float16_is_clamped_where_the_author_clamps() -> None:
    for name in ("MarianMTModel", "M2M100ForConditionalGeneration"):
        eager, fast = (m.half().model.encoder.layers[0] for m in pair(name))
        with torch.no_grad():
            for layer in (eager, fast):
                (layer.final_layer_norm.bias if name == "MarianMTModel" else layer.fc2.bias).fill_(torch.inf)
        x = torch.randn(2, 5, models.WIDTH).half()
        ours, theirs = fast(x, None), eager(x, None)
        assert theirs.isfinite().all() and torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "MarianMTModel", "T5ForConditionalGeneration", "GPT2LMHeadModel"])
def test_copies_pickles_and_checkpoints(name: str, tmp_path: Path) -> None:
    eager, fast = pair(name)
    given = models.inputs(case(name), "right")
    expected = fast(**given).logits
    assert list(fast.state_dict()) == list(eager.state_dict())
    fast.save_pretrained(tmp_path)
    loaded = type(eager).from_pretrained(tmp_path, attn_implementation="eager")
    assert not blocks(loaded)
    tfast.accelerate(loaded)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    others = loaded, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), torch.load(file, weights_only=False)
    for other in others:
        assert [type(m) for m in blocks(other)] == [type(m) for m in blocks(fast)] != []
        assert torch.equal(other(**given).logits, expected)


def test_undo() -> None:
    for name in ("BartForConditionalGeneration", "T5ForConditionalGeneration", "GPT2LMHeadModel"):
        eager, _ = pair(name)
        fast, given = copy.deepcopy(eager), models.inputs(case(name), "right")
        report = tfast.accelerate(fast)
        assert blocks(fast)
        report.undo()
        assert [type(m) for m in fast.modules()] == [type(m) for m in eager.modules()]
        assert torch.equal(fast(**given).logits, eager(**given).logits)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_one_graph(name: str) -> None:
    _, fast = pair(name)
    given = models.inputs(case(name), "right") | {"use_cache": False}
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**given).logits, fast(**given).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["MarianMTModel", "GPT2LMHeadModel", "ViTForImageClassification"])
def test_export(name: str) -> None:
    layer = next(m for m in blocks(pair(name)[1]) if hasattr(m, "gradient_checkpointing"))
    x = torch.randn(2, 5, models.WIDTH)
    exported = torch.export.export(layer, (x,), {"attention_mask": None}).module()
    torch.testing.assert_close(exported(x, attention_mask=None), layer(x, attention_mask=None))


class LowRank(nn.Module):
    """What a library for fine-tuning puts in the place of a linear layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        size = tuple(base.weight.shape) if hasattr(base, "nx") else tuple(base.weight.shape)[::-1]
        self.in_features, self.out_features = size
        self.delta = nn.Parameter(0.1 * torch.randn(size))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.delta


@pytest.mark.parametrize("name", BLOCKS)
def test_a_linear_layer_may_be_replaced_before_or_after(name: str) -> None:
    given, results = models.inputs(case(name), "right"), []
    for accelerated in ("never", "before", "after"):
        eager, fast = pair(name)
        model = fast if accelerated == "before" else eager
        torch.manual_seed(0)
        linear = (nn.Linear, transformers.pytorch_utils.Conv1D)
        replaced = 0
        for parent in list(model.modules()):
            for key, child in list(parent.named_children()):
                if type(child) in linear and key in ("dense", "fc1", "fc2", "lin2", "wi", "wo", "c_fc", "c_proj"):
                    setattr(parent, key, LowRank(child))
                    replaced += 1
        assert replaced
        if accelerated == "after":
            tfast.accelerate(model)
        assert accelerated == "never" or blocks(model)
        results.append(model(**given).logits)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[2], results[0], rtol=1e-4, atol=1e-4)


def test_decoders_with_and_without_an_encoder() -> None:
    """Cross-attention of GPT-2 and BERT, BART as a language model without it, caches given by hand."""
    settings = {"is_decoder": True, "add_cross_attention": True, "pad_token_id": 0}
    for kind in ("GPT2", "Bert"):
        config = getattr(transformers, f"{kind}Config")
        config = config(**models.tiny_settings(config) | settings, attn_implementation="eager")
        torch.manual_seed(0)
        eager = (transformers.GPT2LMHeadModel if kind == "GPT2" else transformers.BertLMHeadModel)(config).eval()
        fast = copy.deepcopy(eager)
        tfast.accelerate(fast)
        ids, memory = torch.randint(4, 40, (2, 6)), torch.randn(2, 3, models.WIDTH)
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        for more in ({}, {"encoder_hidden_states": memory, "encoder_attention_mask": mask}):
            ours, theirs = (m(ids, **more).logits for m in (fast, eager))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            for model in (fast, eager):
                first = model(ids[:, :4], **more, use_cache=True)
                second = model(ids[:, 4:], **more, past_key_values=first.past_key_values).logits
                torch.testing.assert_close(second, theirs[:, 4:], rtol=1e-4, atol=1e-4)
    eager = models.make(models.Case("causal", "BartForCausalLM"), "eager")
    fast = copy.deepcopy(eager)
    tfast.accelerate(fast)
    torch.testing.assert_close(fast(ids).logits, eager(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [
        ("ElectraForMaskedLM", "ElectraSelfOutput", DENSE_NORM),
        ("CamembertForMaskedLM", "CamembertOutput", DENSE_NORM),
        ("XLMRobertaForMaskedLM", "XLMRobertaOutput", DENSE_NORM),
        ("MBartForConditionalGeneration", "MBartDecoderLayer", "fused PreNormBartDecoderLayer"),
        ("PegasusForConditionalGeneration", "PegasusEncoderLayer", "fused PreNormBartEncoderLayer"),
        ("BlenderbotForConditionalGeneration", "BlenderbotDecoderLayer", "fused PreNormBartDecoderLayer"),
        ("PLBartForConditionalGeneration", "PLBartEncoderLayer", "fused BartEncoderLayer"),
        ("MT5ForConditionalGeneration", "MT5DenseGatedActDense", "fused T5GatedDense"),
        ("DeiTForImageClassification", "DeiTLayer", "fused VitLayer"),
    ],
)
def test_relatives_come_without_being_named(name: str, was: str, now: str) -> None:
    kind = "image" if "Image" in name else "masked" if "Masked" in name else "seq2seq"
    one = models.Case(kind, name)
    eager = models.make(one, "eager")
    fast, given = copy.deepcopy(eager), models.inputs(one, "right")
    assert {row.now for row in tfast.accelerate(fast).rows if row.was == was} == {now}
    torch.testing.assert_close(fast(**given).logits, eager(**given).logits, rtol=1e-4, atol=1e-4)


OTHER = "its names are known, but it computes something else"
MARIAN, M2M, T5 = "MarianMTModel", "M2M100ForConditionalGeneration", "T5ForConditionalGeneration"
DROPPED = "hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)\n"


@pytest.mark.parametrize(
    ("name", "path", "line", "other"),
    [
        (MARIAN, "model.encoder.layers.0", "hidden_states = residual + hidden_states", "hidden_states += 2 * residual"),
        (MARIAN, "model.encoder.layers.0", DROPPED, "pass\n"),
        (MARIAN, "model.encoder.layers.0", "p=self.activation_dropout", "p=self.dropout"),
        (MARIAN, "model.encoder.layers.0", "        return hidden_states", "        return (hidden_states,)"),
        (MARIAN, "model.encoder.layers.0", "            **kwargs,\n", ""),
        (MARIAN, "model.decoder.layers.0", "attention_mask=encoder_attention_mask", "attention_mask=attention_mask"),
        (MARIAN, "model.decoder.layers.0", "past_key_values=past_key_values", "past_key_values=None"),
        (MARIAN, "model.decoder.layers.0", "encoder_attn_layer_norm(", "self_attn_layer_norm("),
        (M2M, "model.encoder.layers.0", "self.activation_fn(self.fc1(hidden_states))", "self.fc1(hidden_states)"),
        (M2M, "model.decoder.layers.0", "residual = hidden_states\n        hidden_states = self.final_layer_norm",
              "hidden_states = residual = self.final_layer_norm"),
        ("BertForMaskedLM", "bert.encoder.layer.0.output", "+ input_tensor", "- input_tensor"),
        ("BertForMaskedLM", "bert.encoder.layer.0.output", "hidden_states = self.dropout(hidden_states)", "pass"),
        ("DistilBertForMaskedLM", "distilbert.transformer.layer.0", "+ attention_output", "+ hidden_states"),
        ("ViTForImageClassification", "vit.layers.0", "layernorm_after(", "layernorm_before("),
        ("GPT2LMHeadModel", "transformer.h.0", "use_cache=use_cache", "use_cache=None"),
        ("GPT2LMHeadModel", "transformer.h.0.mlp", "self.act(hidden_states)", "self.act(self.act(hidden_states))"),
        (T5, "decoder.block.0", "position_bias=encoder_decoder_position_bias", "position_bias=position_bias"),
        (T5, "decoder.block.0", "cross_attn_position_bias\n", "None\n"),
        (T5, "decoder.block.0.layer.1", "hidden_states + self.dropout(", "normed_hidden_states + self.dropout("),
        (T5, "encoder.block.0.layer.1.DenseReluDense", "self.act(hidden_states)", "-self.act(hidden_states)"),
    ],
)  # fmt: skip
def test_a_layer_that_computes_something_else_is_left(name: str, path: str, line: str, other: str) -> None:
    layer = pair(name)[0].get_submodule(path)
    original = type(layer)
    code = inspect.getsource(inspect.unwrap(original.forward)) + "\n"
    assert line in code and not blocks(layer)
    found: dict[str, Any] = {}
    exec(textwrap.dedent(code.replace(line, other, 1)), vars(inspect.getmodule(original)), found)
    layer.__class__ = type("Other", (original,), found)
    tfast.accelerate(layer)
    assert not isinstance(layer, Accelerated)
    known = [pattern for pattern in (*patterns.PATTERNS, *t5.PATTERNS) if pattern.matches(layer)]
    assert {probe(layer, pattern) for pattern in known} == {OTHER}


@pytest.mark.parametrize("library", ["onednn", "aten"])
def test_linear_layers_of_gpt2(library: str) -> None:
    """Their weight is (in, out). They are swapped where oneDNN is the faster library."""
    with products_by(library):
        _check_linear_layers_of_gpt2()


def _check_linear_layers_of_gpt2() -> None:
    from transformers.pytorch_utils import Conv1D

    layer, x = Conv1D(256, 512), torch.randn(2, 300, 512, requires_grad=True)
    expected = [layer(x), *torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))]
    (row,) = tfast.accelerate(layer).rows
    faster = is_faster(layer.weight.t())
    assert row.now == ("fused TransposedLinear" if faster else None)
    found = [layer(x), *torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))
    other = Conv1D(8, 16)
    tfast.accelerate(other)
    assert not isinstance(other, Accelerated)  # too small
