"""attn_implementation="transformer_fast" against "eager", on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_as_exact_as_eager
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_fast as tfast
from transformer_fast import AttentionMask

transformers = pytest.importorskip("transformers")
tfast_name = "transformer_fast"

SIZES = {"vocab_size": 40, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
SEQ2SEQ = SIZES | {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
}  # fmt: skip
PLAIN = SIZES | {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
DROPOUT = {
    "marian": {"dropout": 0.0, "attention_dropout": 0.3},
    "bart": {"dropout": 0.0, "attention_dropout": 0.3},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.3},
    "llama": {"attention_dropout": 0.3},
}
NAMES = list(DROPOUT)
B, L = 3, 7


DECODERS: dict[str, dict[str, Any]] = {
    "Mistral": PLAIN | {"num_key_value_heads": 2, "sliding_window": 3},
    "GPT2": SIZES | {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "Gemma2": PLAIN
    | {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3, "attn_logit_softcapping": 5.0},
    "OPT": SIZES
    | {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24,
        "max_position_embeddings": 32, "word_embed_proj_dim": 16,
    },
}  # fmt: skip


def build(name: str, implementation: str, **options: Any) -> Any:
    if name in DECODERS:
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        config, model = (getattr(transformers, f"{name}{kind}") for kind in ("Config", head))
        return randomly(config(**DECODERS[name] | options), model, implementation)
    config, model = {
        "marian": lambda: (transformers.MarianConfig(**SEQ2SEQ | options), transformers.MarianMTModel),
        "bart": lambda: (transformers.BartConfig(**SEQ2SEQ | options), transformers.BartForConditionalGeneration),
        "bert": lambda: (transformers.BertConfig(**PLAIN | options), transformers.BertForMaskedLM),
        "llama": lambda: (
            transformers.LlamaConfig(**PLAIN | {"num_key_value_heads": 2} | options),
            transformers.LlamaForCausalLM,
        ),
        "t5": lambda: (
            transformers.T5Config(
                **SIZES
                | {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2}
            ),
            transformers.T5ForConditionalGeneration,
        ),
    }[name]()
    return randomly(config, model, implementation)


def randomly(config: Any, model: Any, implementation: str) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = implementation
    built = model(config).eval()
    for parameter in built.parameters():  # the usual 0.02 would leave all scores at zero
        torch.nn.init.normal_(parameter, std=0.3)
    return built


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    tfast.integrations.transformers.register()
    tfast.integrations.transformers.register()


def inputs(name: str, side: str) -> dict[str, Tensor]:
    ids = torch.randint(4, 40, (B, L))
    places, lengths = torch.arange(L), torch.tensor([L, L - 3, 1]).unsqueeze(1)
    if side == "none":
        mask = torch.ones(B, L, dtype=torch.long)
    else:
        mask = (places < lengths if side == "right" else places >= L - lengths).long()
    given = {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}
    if name in ("marian", "bart", "t5"):
        given["decoder_input_ids"] = torch.randint(4, 40, (B, 5))
    return given


def both(name: str, **options: Any) -> tuple[Any, Any]:
    return build(name, "transformer_fast", **options), build(name, "eager", **options)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name: str, side: str) -> None:
    given = inputs(name, side)
    results = []
    for model in both(name):
        logits = model(**given).logits
        if name in ("bert", "llama"):  # what padding attends to is nobody's business, as long as it is finite
            assert logits.isfinite().all()
            logits = logits[given["attention_mask"] == 1]
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()
        results.append([logits, *torch.autograd.grad(loss, trained, allow_unused=True)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_fused_op_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    attention = tfast.ops.attention
    monkeypatch.setattr(
        "transformer_fast.integrations.transformers.ops.attention",
        lambda *args, **kwargs: calls.append(True) or attention(*args, **kwargs),
    )
    build(name, "transformer_fast")(**inputs(name, "right"))
    assert len(calls) == {"bert": 2, "llama": 2}.get(name, 6)


def test_padding_and_look_ahead_reach_the_kernel_without_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Any] = []
    attention = tfast.ops.attention
    monkeypatch.setattr(
        "transformer_fast.integrations.transformers.ops.attention",
        lambda q, k, v, mask, **kwargs: masks.append(mask) or attention(q, k, v, mask, **kwargs),
    )
    build("llama", "transformer_fast")(**inputs("llama", "left"))
    build("bert", "transformer_fast")(**inputs("bert", "right"))
    build("Mistral", "transformer_fast")(**inputs("Mistral", "left"))
    build("Gemma2", "transformer_fast")(**inputs("Gemma2", "none"))
    assert len(masks) == 8 and all(mask.keep_mask is None for mask in masks)
    assert [mask.causal_offset for mask in masks] == [0, 0, None, None, 0, 0, 0, 0]
    assert [mask.window_offset for mask in masks] == [None, None, None, None, -2, -2, -2, None]
    assert [mask.key_keep_mask is None for mask in masks] == [False] * 6 + [True] * 2


@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_no_mask_becomes_a_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with a sliding window, in a forward pass and while it generates past its window."""
    monkeypatch.setattr("transformer_fast.integrations.lazy_mask.LazyMask.dense", None)
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)
    model, given = build(name, tfast_name), inputs(name, "left")
    model(**given).logits.sum().backward()
    model.generate(**given, max_new_tokens=6, do_sample=False, disable_compile=True)


def test_a_mask_that_a_model_changes_is_a_tensor() -> None:
    """What is read, sliced or written to is what transformers' own mask would be, and is what attention then reads."""
    from transformers import masking_utils

    from transformer_fast.integrations.lazy_mask import LazyMask, bounds_of

    pattern = masking_utils.sliding_window_causal_mask_function(3)
    given = {"batch_size": 2, "q_length": 5, "kv_length": 7, "q_offset": 2, "kv_offset": 0, "mask_function": pattern}
    expected = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    lazy = LazyMask(bounds_of(pattern, 2), (2, 1, 5, 7), torch.device("cpu"))
    assert lazy.shape == expected.shape and lazy.dtype == torch.bool
    assert torch.equal(lazy[..., 1:], expected[..., 1:]) and torch.equal(~lazy, ~expected)
    lazy[:, :, 0] = True
    assert lazy.mask.keep_mask[:, :, 0].all() and torch.equal(lazy.mask.keep_mask[:, :, 1:], expected[:, :, 1:])


def test_a_pattern_whose_meaning_changed_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    from transformer_fast.integrations import lazy_mask

    assert lazy_mask.bounds_of(masking_utils.sliding_window_causal_mask_function(3), 0).window_offset == -2
    assert lazy_mask.bounds_of(lambda b, h, q, k: k <= q, 0) is None
    assert lazy_mask.bounds_of(masking_utils.sliding_window_causal_mask_function(0), 0) is None
    monkeypatch.setattr(lazy_mask, "_sides_of", lambda pattern: (3, 0))
    assert lazy_mask.bounds_of(masking_utils.sliding_window_causal_mask_function(3), 0) is None


@pytest.mark.parametrize("name", ["marian", "bart", "llama"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generation_with_a_cache(name: str, options: dict[str, Any]) -> None:
    given = inputs(name, "left" if name == "llama" else "right")
    given.pop("decoder_input_ids", None)
    results = []
    for model in both(name):
        results.append(model.generate(**given, max_new_tokens=6, do_sample=False, disable_compile=True, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_sliding_windows_learned_positions_and_position_biases(name: str) -> None:
    """Padding on the left, against eager and (where there is one) sdpa; then a cache longer than the window."""
    given = inputs(name, "left")
    ours, eager = build(name, tfast_name), build(name, "eager")
    others = [eager] if name == "Gemma2" else [eager, build(name, "sdpa")]
    tokens = given["attention_mask"] == 1 if name != "t5" else ...
    logits = ours(**given).logits[tokens]
    for other in others:
        torch.testing.assert_close(logits, other(**given).logits[tokens], atol=2e-4, rtol=2e-3)
    given.pop("decoder_input_ids", None)
    results = [m.generate(**given, max_new_tokens=6, do_sample=False, disable_compile=True) for m in (ours, eager)]
    assert torch.equal(*results)


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["llama", "marian", "bert"])
def test_one_compiled_graph_for_all_lengths(name: str) -> None:
    torch._dynamo.reset()
    model, counter = build(name, tfast_name), CompileCounterWithBackend("eager")
    compiled, frames = torch.compile(model, fullgraph=True, dynamic=True, backend=counter), []
    for length in (5, 9):
        ids = torch.randint(4, 40, (B, length))
        given = {"input_ids": ids, "attention_mask": (torch.arange(length) >= torch.tensor([[0], [3], [2]])).long()}
        given |= {"decoder_input_ids": ids[:, :4]} if name == "marian" else {}
        given |= {"use_cache": False} if name != "bert" else {}
        torch.testing.assert_close(compiled(**given).logits, model(**given).logits, atol=1e-4, rtol=1e-4)
        frames.append(counter.frame_count)
    assert frames == [1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_training_with_dropout(name: str) -> None:
    given = inputs(name, "right")
    model, eager = both(name, **DROPOUT[name])
    model.train()
    torch.manual_seed(1)
    first, second = model(**given).logits, model(**given).logits
    torch.manual_seed(1)
    assert not torch.equal(first, second) and torch.equal(first, model(**given).logits)
    with torch.no_grad():
        ours, theirs = (
            torch.stack([m.train()(**given).logits[0] for _ in range(150)]).double() for m in (model, eager)
        )
    error = (ours.var(0) / 150 + theirs.var(0) / 150).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() / error.clamp_min(1e-9)).square().mean().sqrt() < 1.5
    assert 0.7 < (ours.var(0).mean() / theirs.var(0).mean()).item() < 1.4
    loss = first.logsumexp(-1).mean()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_weights_on_request(name: str) -> None:
    given = inputs(name, "none")
    ours, theirs = (model(**given, output_attentions=True) for model in both(name))
    for field in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        expected = getattr(theirs, field, None)
        if expected:
            torch.testing.assert_close(getattr(ours, field), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_by_the_gate(name: str) -> None:
    given = inputs(name, "right")
    ours, theirs = both(name)
    tokens = given["attention_mask"] == 1 if name in ("bert", "llama") else ...
    with torch.no_grad():
        exact = theirs(**given).logits[tokens]
        logits, eager = (model.bfloat16()(**given).logits[tokens] for model in (ours, theirs))
    assert logits.dtype == torch.bfloat16
    assert_as_exact_as_eager(logits, eager, exact, ulps=4.0)


def test_a_saved_model_is_loaded_by_name(tmp_path: Path) -> None:
    saved, given = build("llama", "eager"), inputs("llama", "right")
    saved.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=tfast_name)
    assert model.config._attn_implementation == tfast_name
    tokens = given["attention_mask"] == 1
    torch.testing.assert_close(model(**given).logits[tokens], saved(**given).logits[tokens], atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_activation_checkpointing_draws_the_same_dropout(name: str) -> None:
    given, results = inputs(name, "right"), []
    for again in (False, True):
        model = build(name, tfast_name, **DROPOUT[name], use_cache=False).train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        model(**given).logits.square().mean().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*results)


def test_a_compiled_step_fills_a_static_cache() -> None:
    torch._dynamo.reset()
    (model, eager), given = both("llama"), inputs("llama", "left")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        logits = compiled(**given, past_key_values=cache, use_cache=True).logits
    tokens = given["attention_mask"] == 1
    torch.testing.assert_close(logits[tokens], eager(**given).logits[tokens], atol=2e-4, rtol=2e-3)


def test_sequences_packed_into_a_row_by_their_positions() -> None:
    ids, places = torch.randint(4, 40, (1, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    ours, theirs = (m(input_ids=ids, position_ids=places, use_cache=False).logits for m in both("llama"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-3)


def test_a_prepared_additive_mask() -> None:
    ids = torch.randint(4, 40, (B, L))
    bias = torch.randn(B, 1, L, L).masked_fill(torch.rand(B, 1, L, L) > 0.7, torch.finfo(torch.float32).min)
    ours, theirs = (model(input_ids=ids, attention_mask=bias).logits for model in both("llama"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-3)


def test_sinks_are_learned_as_in_eager() -> None:
    sizes = PLAIN | {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.GptOssConfig(**sizes, sliding_window=3)
    ids, grads = torch.randint(4, 40, (B, L)), []
    for name in ("eager", tfast_name):
        torch.manual_seed(0)
        model = randomly(config, transformers.GptOssForCausalLM, name)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([layer.self_attn.sinks.grad for layer in model.model.layers])
    assert all(grad.abs().max() > 0 for grad in grads[0])
    torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=1e-3)


def test_what_it_cannot_do_is_said() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=r"sparse attention by indices \(indices=\); use \"eager\""):
        tfast.integrations.transformers.attention_forward(torch.nn.Module(), q, q, q, None, indices=q)


def test_without_transformers_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install -U transformers"):
        tfast.integrations.transformers.register()


@pytest.mark.parametrize("name", ["T5", "MT5", "SwitchTransformers"])
def test_relative_positions_are_never_a_dense_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and gradients are eager's, and the bias of T5 is read from a table of distances."""
    from transformer_fast.integrations import lazy_bias

    length = 260  # from 256 x 256 scores on
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=2, relative_attention_max_distance=40, num_experts=2, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    )  # fmt: skip
    ids, out = torch.randint(4, 40, (2, length)), []
    made: list[None] = []
    dense = lazy_bias.LazyBias.dense
    monkeypatch.setattr(lazy_bias.LazyBias, "dense", lambda self: made.append(None) or dense(self))
    for implementation in ("eager", tfast_name):
        torch.manual_seed(0)
        kind = getattr(transformers, f"{name}ForConditionalGeneration")
        model = randomly(config, kind, implementation).train()
        seen: list[object] = []
        attention = model.encoder.block[1].layer[0].SelfAttention
        attention.register_forward_pre_hook(
            lambda _, args, options, seen=seen: seen.append(options["position_bias"]), with_kwargs=True
        )
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, 200:] = 0
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        weights = [
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            for stack in (model.encoder, model.decoder)
        ]
        out.append((loss.detach(), [w.grad for w in weights]))
    assert isinstance(seen[0], lazy_bias.LazyBias) and not made
    torch.testing.assert_close(out[1], out[0], atol=1e-5, rtol=1e-3)
    assert all(grad.abs().max() > 0 for grad in out[0][1])


def test_a_bias_that_something_else_reads_is_dense() -> None:
    from transformer_fast.integrations.lazy_bias import LazyBias

    weight = torch.randn(32, 4, requires_grad=True)
    lazy = LazyBias(AttentionMask.relative(weight), (1, 4, 9, 9), weight)
    expected = AttentionMask.relative(weight).added(9, 9)
    assert (
        lazy.shape == (1, 4, 9, 9)
        and torch.equal(lazy + 1, expected + 1)
        and torch.equal(lazy[:, :, -1:], expected[:, :, -1:])
    )
    (grad,) = torch.autograd.grad((lazy * 2).sum(), weight)
    assert torch.equal(grad, torch.autograd.grad((expected * 2).sum(), weight)[0])
