"""attn_implementation="transformer_fast" against "eager", on tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerated import from_one_seed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.huggingface import masks as lazy_mask

transformers = pytest.importorskip("transformers")
import huggingface_models as models  # noqa: E402
from transformers import masking_utils  # noqa: E402

NAME, OP = "transformer_fast", "transformer_fast.ops.attention"
MARIAN, BART, BERT = "MarianMTModel", "BartForConditionalGeneration", "BertForMaskedLM"
LLAMA, MISTRAL, GEMMA = "LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM"
DROPOUT = {
    MARIAN: {"attention_dropout": 0.3}, BART: {"attention_dropout": 0.3}, LLAMA: {"attention_dropout": 0.3},
    BERT: {"attention_probs_dropout_prob": 0.3},
}  # fmt: skip
NAMES, DECODERS = list(DROPOUT), [MISTRAL, "GPT2LMHeadModel", GEMMA, "OPTForCausalLM"]
SETTINGS: dict[str, dict[str, Any]] = {
    GEMMA: {"attn_logit_softcapping": 5.0}, "T5ForConditionalGeneration": {"decoder_start_token_id": 1},
    "MistralForCausalLM": {"num_key_value_heads": 2},
}  # fmt: skip


def build(name: str, implementation: str = NAME, **options: Any) -> Any:
    """Make a model with weights that leave no score at zero."""
    made = models.make(models.named(name), implementation, **SETTINGS.get(name, {}) | options)
    return models.scattered(made, std=0.3)


def both(name: str, **options: Any) -> tuple[Any, Any]:
    """Make a model twice, with our attention and with eager attention."""
    return build(name, **options), build(name, "eager", **options)


def inputs(name: str, side: str) -> dict[str, Tensor]:
    """Return padded inputs with a mask, or inputs without padding."""
    given = models.inputs(models.named(name), side)
    return {"attention_mask": torch.ones_like(given["input_ids"])} | given


def real(name: str, given: dict[str, Tensor]) -> Any:
    """Return the logits at tokens; those at padding must be finite only."""
    return ... if "decoder_input_ids" in given else given["attention_mask"] == 1


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the mask of every call of the fused op."""
    found: list[Any] = []
    attention = tfast.ops.attention

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        found.append(mask)
        return attention(q, k, v, mask, **options)

    monkeypatch.setattr(OP, watched)
    return found


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name: str, side: str, masks: list[Any]) -> None:
    given, results = inputs(name, side), []
    for model in both(name):
        logits = model(**given).logits
        assert logits.isfinite().all()
        logits = logits[real(name, given)]
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()
        results.append([logits, *torch.autograd.grad(loss, trained, allow_unused=True)])
    assert len(masks) == (6 if "decoder_input_ids" in given else 2)
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-3)


def test_padding_and_look_ahead_reach_the_kernel_without_a_dense_mask(masks: list[Any]) -> None:
    for name, side in ((LLAMA, "left"), (BERT, "right"), (MISTRAL, "left"), (GEMMA, "none")):
        build(name)(**inputs(name, side))
    assert len(masks) == 8 and all(mask.keep_mask is None for mask in masks)
    assert [mask.causal_offset for mask in masks] == [0, 0, None, None, 0, 0, 0, 0]
    assert [mask.window_offset for mask in masks] == [None, None, None, None, -2, -2, -2, None]
    assert [mask.key_keep_mask is None for mask in masks] == [False] * 6 + [True] * 2


@pytest.mark.parametrize("name", [MISTRAL, GEMMA])
def test_no_mask_becomes_a_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a model with a sliding window, in a forward pass and while it generates past its window."""
    monkeypatch.setattr(lazy_mask.LazyMask, "dense", None)
    monkeypatch.setattr(masking_utils, "sdpa_mask", None)
    model, given = build(name), inputs(name, "left")
    model(**given).logits.sum().backward()
    model.generate(**given, max_new_tokens=6, do_sample=False, disable_compile=True)


PATTERN = {
    "batch_size": 2, "q_length": 5, "kv_length": 7, "q_offset": 2, "kv_offset": 0,
    "mask_function": masking_utils.sliding_window_causal_mask_function(3), "local_size": 3,
    "allow_is_causal_skip": True,
}  # fmt: skip


def lazy_of(kind: str) -> tuple[lazy_mask.LazyMask, Tensor]:
    """Return a mask in normal form, and the mask of transformers that it stands for."""
    theirs = {"sdpa": masking_utils.sdpa_mask, "eager": masking_utils.eager_mask}[kind]
    ours = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[f"{NAME}_{kind}"](**PATTERN, dtype=torch.float64)
    return ours, theirs(**PATTERN, dtype=torch.float64)


READS: list[Callable[[Tensor], Any]] = [
    lambda m: m[..., 1:], lambda m: m.logical_not(), lambda m: m + 1, lambda m: 1 + m, lambda m: m.expand(2, 3, 5, 7),
    lambda m: torch.where(m == 0, 1, 2), lambda m: m.to(torch.float16), lambda m: m.contiguous(),
    lambda m: m.detach() + 1, lambda m: m.clone().zero_(), lambda m: torch.cat([m, m]),
]  # fmt: skip
WRITES: list[Callable[[Tensor], Any]] = [
    lambda m: m.__setitem__((..., 0), 0), lambda m: m[:, :, 1].fill_(1), lambda m: m.masked_fill_(m == 0, 1),
    lambda m: m.detach().zero_(), lambda m: m.expand(2, 1, 5, 7).zero_(), lambda m: m.data.zero_(),
    lambda m: m.numpy().fill(0), lambda m: torch.logical_not(m, out=m), lambda m: m.contiguous().zero_(),
]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_a_mask_is_that_of_transformers_to_all_who_read_it(kind: str, inference: bool) -> None:
    """Readers leave the normal form. After a writer, attention reads what was written."""
    with torch.inference_mode(inference):
        for read in READS:
            lazy, expected = lazy_of(kind)
            assert (lazy.shape, lazy.dtype, lazy.device) == (expected.shape, expected.dtype, expected.device)
            assert torch.equal(read(lazy), read(expected)) and torch.equal(lazy.dense(), expected)
            assert lazy.mask.window_offset is not None
        for write in WRITES:
            lazy, expected = lazy_of(kind)
            expected = expected.clone()  # from an expanded one
            write(lazy)
            write(expected)
            read_by_attention = lazy.mask.keep_mask if kind == "sdpa" else lazy.mask.additive_bias
            assert torch.equal(read_by_attention, expected)


def test_a_pattern_is_known_by_its_identity_or_by_its_size() -> None:
    both_sides = masking_utils.sliding_window_bidirectional_mask_function
    window, chunks = masking_utils.sliding_window_causal_mask_function, masking_utils.chunked_causal_mask_function
    assert lazy_mask.bounds_of(masking_utils.causal_mask_function, 1, None).causal_offset == 1
    assert lazy_mask.bounds_of(window(3), 0, 3).window_offset == -2
    found = lazy_mask.bounds_of(both_sides(3), 0, 3)
    assert (found.window_offset, found.causal_offset) == (-3, 3)
    unknown = (lambda b, h, q, k: k <= q, None), (window(3), None), (window(3), 4), (window(0), 0), (both_sides(3), 2)
    for pattern, size in (*unknown, (chunks(3, torch.zeros(1, dtype=torch.int64)), 3)):
        assert lazy_mask.bounds_of(pattern, 0, size) is None


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", [MARIAN, BART, LLAMA])
def test_generation_with_a_cache(name: str, options: dict[str, Any]) -> None:
    given = inputs(name, "left" if name == LLAMA else "right")
    given.pop("decoder_input_ids", None)
    options = options | {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    assert torch.equal(*(model.generate(**given, **options) for model in both(name)))


@pytest.mark.parametrize("name", [*DECODERS, "T5ForConditionalGeneration"])
def test_sliding_windows_learned_positions_and_position_biases(name: str) -> None:
    """Left padding against eager and sdpa (if the model has it); then a cache longer than the window."""
    given, (ours, eager) = inputs(name, "left"), both(name)
    kept = real(name, given)
    for other in (eager, *([] if name == GEMMA else [build(name, "sdpa")])):
        logits, expected = (model(**given).logits[kept] for model in (ours, other))
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-3)
    given.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    assert torch.equal(*(model.generate(**given, **options) for model in (ours, eager)))


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", [LLAMA, MARIAN, BERT])
def test_one_compiled_graph_for_all_lengths(name: str) -> None:
    torch._dynamo.reset()
    model, counter, frames = build(name), CompileCounterWithBackend("eager"), []
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9):
        ids = torch.randint(4, 40, (3, length))
        given = {"input_ids": ids, "attention_mask": (torch.arange(length) >= torch.tensor([[0], [3], [2]])).long()}
        given |= {"decoder_input_ids": ids[:, :4]} if name == MARIAN else {}
        given |= {"use_cache": False} if name != BERT else {}
        torch.testing.assert_close(compiled(**given).logits, model(**given).logits, atol=1e-4, rtol=1e-4)
        frames.append(counter.frame_count)
    assert frames == [1, 1]


@pytest.mark.cover(2)
@pytest.mark.parametrize("name", NAMES)
def test_training_with_dropout(name: str) -> None:
    given, (model, eager) = inputs(name, "right"), both(name, **DROPOUT[name])
    model.train()
    first, again = from_one_seed(*[lambda: model(**given).logits] * 2)
    assert torch.equal(first, again) and not torch.equal(first, model(**given).logits)
    with torch.no_grad():
        drawn = (torch.stack([m.train()(**given).logits[0] for _ in range(150)]) for m in (model, eager))
        ours, theirs = (logits.double() for logits in drawn)
    error = (ours.var(0) / 150 + theirs.var(0) / 150).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() / error.clamp_min(1e-9)).square().mean().sqrt() < 1.5
    assert 0.7 < (ours.var(0).mean() / theirs.var(0).mean()).item() < 1.4
    first.logsumexp(-1).mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_weights_on_request(name: str) -> None:
    ours, theirs = (model(**inputs(name, "none"), output_attentions=True) for model in both(name))
    for field in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        if expected := getattr(theirs, field, None):
            torch.testing.assert_close(getattr(ours, field), expected, atol=1e-4, rtol=1e-3)


def test_a_saved_model_is_loaded_by_name(tmp_path: Path) -> None:
    saved, given = build(LLAMA, "eager"), inputs(LLAMA, "right")
    saved.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
    ours, theirs = (m(**given).logits[real(LLAMA, given)] for m in (model, saved))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-3)


def test_a_compiled_step_fills_a_static_cache() -> None:
    torch._dynamo.reset()
    (model, eager), given = both(LLAMA), inputs(LLAMA, "left")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache, kept = transformers.StaticCache(config=model.config, max_cache_len=12), real(LLAMA, given)
    with torch.no_grad():
        logits = compiled(**given, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits[kept], eager(**given).logits[kept], atol=2e-4, rtol=2e-3)


def test_sinks_are_learned_as_in_eager() -> None:
    ids, grads = torch.randint(4, 40, (3, 7)), []
    for model in both("GptOssForCausalLM"):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([layer.self_attn.sinks.grad for layer in model.model.layers])
    assert all(grad.abs().max() > 0 for grad in grads[1])
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-3)


def test_what_it_cannot_do_is_said() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=r"sparse attention by indices \(indices=\); use \"eager\""):
        tfast.integrations.transformers.attention_forward(torch.nn.Module(), q, q, q, None, indices=q)


def test_without_transformers_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install -U transformers"):
        tfast.integrations.transformers.register()


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_without_a_mask_the_call_or_the_layer_says_whether_it_looks_ahead(is_causal: bool | None) -> None:
    layer, (q, k, v) = torch.nn.Module(), torch.randn(3, 1, 2, 5, 8)
    layer.is_causal = True
    out = tfast.integrations.transformers.attention_forward(layer, q, k, v, None, is_causal=is_causal)[0]
    expected = tfast.attention(q, k, v, None if is_causal is False else AttentionMask.causal())
    assert torch.equal(out, expected.transpose(1, 2))
