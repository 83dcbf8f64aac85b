"""accelerate on the blocks of transformers: results stay the same."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import accelerated
import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.huggingface import Fast
from transformer_fast.ops.linear import is_faster, products_by
from transformer_fast.testing import assert_as_exact_as_eager

transformers = pytest.importorskip("transformers", minversion="5.0")
import huggingface_models as models  # noqa: E402, I001
from huggingface_blocks import (  # noqa: E402
    BART, BERT, BLOCKS, GPT2, M2M, MARIAN, T5, blocks, case, given, pair, pair_and_report, set_dropout,
)  # fmt: skip

WRITERS = [MARIAN, BART, T5, GPT2, "GptOssForCausalLM", "BloomForCausalLM", "EncoderDecoderModel+Bert+XGLM"]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_report_names_the_fast_classes(name: str) -> None:
    rows = [row for row in pair_and_report(name)[2].rows if row.was in BLOCKS[name]]
    assert {row.was: row.now for row in rows} == {was: f"huggingface.{now}" for was, now in BLOCKS[name].items()}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", BLOCKS)
def test_evaluation_and_gradients_are_as_exact_as_eager_s(name: str, side: str) -> None:
    if side == "left" and case(name).kind in ("image", "transcription", "causal"):
        return
    eager, fast = pair(name)
    exact, arguments = copy.deepcopy(eager).double(), given(name, side)
    runs = (fast, arguments), (eager, arguments), (exact, models.typed(arguments, torch.float64))
    with torch.no_grad():
        evaluated = [models.outcome(*run, gradients=False) for run in runs]
    trained = [models.outcome(model.train(), arguments) for model, arguments in runs]
    for ours, theirs, true in (evaluated, trained):
        assert ours.keys() == theirs.keys()
        largest = max(t.abs().max() for t in true.values())
        for key in theirs.keys() - {key for key, t in true.items() if t.abs().max() < 1e-7 * largest}:  # a key's bias
            # a gradient is summed over the rows of a batch, 21 of them, or 3 pictures of 17 patches
            ulps = 8.0 if key == "logits" else 4.0 * 51**0.5
            assert_as_exact_as_eager(ours[key], theirs[key], true[key], ulps=ulps, what=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
@pytest.mark.parametrize("name", BLOCKS)
def test_16_bits(name: str, dtype: torch.dtype | str) -> None:
    """Test models in 16-bit dtypes, and float32 models under autocast."""
    eager, fast = pair(name)
    exact, results = copy.deepcopy(eager), []
    inner = torch.float32 if dtype == "autocast" else dtype
    for model, kind in ((fast, inner), (eager, inner), (exact.to(inner), torch.float64)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast" and model is not exact):
            results.append(model.to(kind)(**models.typed(given(name), kind)).logits)
    ours, theirs, _ = results
    assert ours.dtype == theirs.dtype
    wide = dtype == "autocast" and ours.dtype.itemsize == 4
    assert_as_exact_as_eager(*results, ulps=8.0 * (2**16 if wide else 1))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ("ViTForImageClassification",)])
def test_training_drops_what_the_plain_model_drops_with_the_same_draws(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain model draws with our dropout; attention weights are not dropped, as each draws those by itself."""
    eager, fast = pair(name)
    for model in (eager, fast):
        set_dropout(model.train(), 0.3)
        model.set_attn_implementation("eager")

    def ours(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return tfast.ops.dropout(x, p) if training and p > 0 else x

    actual = accelerated.from_one_seed(lambda: models.outcome(fast, given(name)))[0]
    monkeypatch.setattr(torch.nn.functional, "dropout", ours)
    expected = accelerated.from_one_seed(lambda: models.outcome(eager, given(name)))[0]
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_seed_decides_and_checkpointing_repeats_it(name: str, reentrant: bool) -> None:
    _, fast = pair(name)
    set_dropout(fast.train(), 0.3)

    def run() -> dict[str, Tensor]:
        return models.outcome(fast, given(name))

    (first,), (other,) = accelerated.from_one_seed(run, seed=0), accelerated.from_one_seed(run, seed=1)
    fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
    (again,) = accelerated.from_one_seed(run, seed=0)
    close = {"rtol": 1e-5, "atol": 1e-6} if reentrant else {"rtol": 0.0, "atol": 0.0}  # another order of sums
    torch.testing.assert_close(again, first, **close)
    draws = any(isinstance(m, nn.Dropout) or hasattr(m, "activation_dropout") for m in fast.modules())
    assert torch.allclose(first["logits"], other["logits"], atol=1e-3) is not draws


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_generation_writes_the_same_tokens(name: str, beams: int) -> None:
    both, seq2seq = pair(name), "decoder_input_ids" in given(name)
    for model in both:
        models.enlarge(model)
    for side in ("left", "right") if seq2seq else ("left",):
        arguments = {key: t for key, t in given(name, side).items() if not key.startswith("decoder")}
        arguments |= {"max_new_tokens": 9, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
        arguments |= {"decoder_start_token_id": 1} if seq2seq else {}
        written = [model.generate(**arguments) for model in both]
        assert torch.equal(*written) and written[0].shape[1] > 3


@pytest.mark.parametrize("name", BLOCKS)
def test_captured_hidden_states_and_attentions(name: str) -> None:
    """transformers captures outputs by hooks that it installs at the first request and never removes."""
    eager, fast = pair(name)
    for model in (eager, fast):
        model.eval().set_attn_implementation("eager")  # only the blocks differ
    with torch.no_grad():
        for _ in range(2):
            ours, theirs = (m(**given(name), output_hidden_states=True, output_attentions=True) for m in (fast, eager))
            captured = [key for key in theirs if key.endswith(("hidden_states", "attentions"))]
            assert len(captured) >= 2 and list(ours) == list(theirs)
            for key in captured:
                torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-4, msg=key)
            torch.testing.assert_close(fast(**given(name)).logits, eager(**given(name)).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [MARIAN, M2M])
def test_float16_is_clamped_where_the_author_clamps(name: str) -> None:
    eager, fast = (m.half().model.encoder.layers[0] for m in pair(name))
    with torch.no_grad():
        for layer in (eager, fast):
            (layer.final_layer_norm.bias if name == MARIAN else layer.fc2.bias).fill_(torch.inf)
    x = torch.randn(2, 5, models.WIDTH).half()
    assert eager(x, None).isfinite().all() and torch.equal(fast(x, None), eager(x, None))


@pytest.mark.parametrize("name", [BERT, MARIAN, T5])
def test_copies_and_saved_models(name: str, tmp_path: Path) -> None:
    eager, fast = pair(name)
    expected, ours = fast(**given(name)).logits, accelerated.seen(lambda: fast(**given(name)))
    assert list(fast.state_dict()) == list(eager.state_dict())
    for model, folder in ((eager, "before"), (fast, "after")):
        model.save_pretrained(tmp_path / folder)
    assert len({(tmp_path / folder / "config.json").read_text() for folder in ("before", "after")}) == 1
    loaded = type(eager).from_pretrained(tmp_path / "after", attn_implementation="eager")
    assert not blocks(loaded) and not accelerated.seen(lambda: loaded(**given(name)))
    torch.testing.assert_close(loaded(**given(name)).logits, eager(**given(name)).logits)
    tfast.accelerate(loaded)
    for other in (loaded, *accelerated.copies(fast)):
        assert [type(m) for m in blocks(other)] == [type(m) for m in blocks(fast)] != []
        assert torch.equal(other(**given(name)).logits, expected) and other.config is not fast.config
        assert accelerated.seen(lambda other=other: other(**given(name))) == ours and "ours" in ours


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", [BERT, MARIAN, BART, T5])
def test_one_graph(name: str) -> None:
    if name == MARIAN and Version(torch.__version__) < Version("2.13"):
        pytest.skip("Dynamo of this PyTorch does not follow the copy of a config that transformers makes")
    eager, fast = pair(name)
    arguments = given(name) | ({} if name == BERT else {"use_cache": False})
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        logits = compiled(**arguments).logits
        torch.testing.assert_close(logits, fast(**arguments).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, eager(**arguments).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [MARIAN, BART])
def test_export(name: str) -> None:
    layer = next(m for m in blocks(pair(name)[1]) if hasattr(m, "gradient_checkpointing"))
    x = torch.randn(2, 5, models.WIDTH)
    exported = torch.export.export(layer, (x,), {"attention_mask": None}).module()
    torch.testing.assert_close(exported(x, attention_mask=None), layer(x, attention_mask=None))


@pytest.mark.parametrize("name", [GPT2, "BertLMHeadModel"])
def test_a_decoder_with_and_without_an_encoder(name: str) -> None:
    """Test cross-attention and caches that the caller passes."""
    settings = {"is_decoder": True, "add_cross_attention": True, "pad_token_id": 0}
    eager, fast, _ = accelerated.pair(models.make(case(name), "eager", **settings))
    ids, memory = torch.randint(4, 40, (2, 6)), torch.randn(2, 3, models.WIDTH)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    for more in ({}, {"encoder_hidden_states": memory, "encoder_attention_mask": mask}):
        ours, theirs = (m(ids, **more).logits for m in (fast, eager))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for model in (fast, eager):
            first = model(ids[:, :4], **more, use_cache=True)
            second = model(ids[:, 4:], **more, past_key_values=first.past_key_values).logits
            torch.testing.assert_close(second, theirs[:, 4:], rtol=1e-4, atol=1e-4)


D = 97
NORMS = {
    "llama": "LlamaRMSNorm", "t5": "T5LayerNorm", "olmo2": "Olmo2RMSNorm", "helium": "HeliumRMSNorm",
    "llama4": "Llama4TextRMSNorm", "gemma4": "Gemma4RMSNorm", "cohere": "CohereLayerNorm",
    "deberta": "DebertaLayerNorm",
}  # fmt: skip
"""One class of each code, by its folder."""


def made(folder: str) -> nn.Module:
    norm = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), NORMS[folder])(D)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return norm


def norm_step(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = norm(x)
    grads = torch.autograd.grad((out * torch.linspace(-1, 1, D, dtype=out.dtype)).sum(), (x, *norm.parameters()))
    return {"out": out.detach(), **dict(zip(("x", "weight", "bias"), grads))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("folder", NORMS)
def test_norms_are_as_exact_as_transformers(folder: str, dtype: torch.dtype) -> None:
    plain, fast, report = accelerated.pair(made(folder).to(dtype))
    assert [row.now for row in report.rows] == [f"huggingface.{type(fast).__bases__[0].__name__}"]
    x = torch.randn(3, 17, D).to(dtype)
    exact = copy.deepcopy(plain).double()
    with torch.no_grad():  # rows as small as eps show where it is added
        for rows in (x, x * 1e-3):
            assert_as_exact_as_eager(fast(rows), plain(rows), exact(rows.double()), ulps=8.0)
    if dtype == torch.float32:
        for name, true in norm_step(exact, x.double()).items():
            ours, theirs = norm_step(fast, x)[name], norm_step(plain, x)[name]
            assert_as_exact_as_eager(ours, theirs, true, ulps=8.0 * 51**0.5, what=name)


@pytest.mark.parametrize("library", ["onednn", "aten"])
def test_linear_layers_of_gpt2(library: str) -> None:
    """GPT-2's linear layers, with a weight (in, out), are swapped if oneDNN is the faster library."""
    conv = transformers.pytorch_utils.Conv1D
    with products_by(library):
        layer, fast, report = accelerated.pair(conv(256, 512))
        faster = is_faster(layer.weight.t())
        assert [row.now for row in report.rows] == ["huggingface.TransposedLinear" if faster else None]
        assert isinstance(fast, Fast) == faster
        x, results = torch.randn(2, 300, 512, requires_grad=True), []
        for m in (fast, layer):
            grads = torch.autograd.grad(m(x).square().sum(), (x, m.weight, m.bias))
            results.append([m(x), *grads])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))
