"""Fused decoding step against its modules and fp64; and the cases in which modules are called instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_transformer import by_modules, decoding, random_rows
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.generation.session import Session
from transformer_fast.inference import prepacked
from transformer_fast.layers import DecoderLayer
from transformer_fast.layers.norm import make_norm
from transformer_fast.testing import assert_as_exact_as_eager

VOCAB, BOS, EOS = 20, 0, 1

FORMS = [
    {"norm": "layer"},
    {"norm": "std"},
    {"norm": "layer", "norm_first": False},
    {"norm": "std", "norm_first": False},
    {"norm": "rms"},
    {"norm": "rms", "norm_first": False},
    {"activation": "swish", "norm_first": False, "scale": 1.0, "positions": "halves"},
    {"activation": "gelu"},
]


def tiny(dtype: torch.dtype = torch.float32, **form: object) -> tfast.Transformer:
    torch.manual_seed(3)
    return tfast.Transformer(VOCAB, VOCAB, 40, 3, 4, 0.1, **{"d_ff": 56, "norm": "layer", **form}).to(dtype).eval()


@pytest.mark.parametrize("rows", [9, 100])  # with natively packed weights, and in oneDNN's layout
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_as_exact_as_the_modules(monkeypatch: pytest.MonkeyPatch, form: dict, rows: int) -> None:
    """Rows fork, end and change slots, for given tokens. One source has no token."""
    monkeypatch.setattr(prepacked, "NATIVE_ROWS", dict.fromkeys(extension.INSTRUCTION_SETS, 24 if rows > 24 else 512))
    generator = torch.Generator().manual_seed(rows)
    src, lengths = torch.randint(2, VOCAB, (5, 6), generator=generator), torch.tensor([6, 1, 0, 4, 6])
    models = tiny(torch.float64, **form), tiny(**form), tiny(**form)
    with torch.inference_mode():
        exact, ours = (decoding(model, (src, lengths), rows) for model in models[:2])
        with by_modules():
            modules = decoding(models[2], (src, lengths), rows)
        tokens = torch.full((5, 1), BOS)
        for step in range(8):
            got = ours.next_logits(tokens)
            eager, expected = (one.next_logits(tokens) for one in (modules, exact))
            assert_as_exact_as_eager(got, eager, expected, what=f"logits of step {step}")
            kept = random_rows(len(tokens), 1, rows, generator)
            tokens = torch.cat([tokens[kept], torch.randint(VOCAB, (len(kept), 1), generator=generator)], dim=1)
            for one in (exact, ours, modules):
                one.select(kept)


def test_positions_are_found_in_the_slots_that_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode past two blocks of the cache, and with steps of modules, which move positions into their slots."""
    generator = torch.Generator().manual_seed(0)
    models = tiny(torch.float64), tiny(), tiny()
    src = torch.randint(2, VOCAB, (3, 6), generator=generator)
    lengths, rows = torch.tensor([6, 2, 4]), 12
    in_slots: list[bool] = []
    prepare = Session.prepare

    def sometimes(self: Session, *given: int, **options: bool) -> object:
        in_slots.append(self._cache._cells is None)
        return None if len(in_slots) % 23 == 0 else prepare(self, *given, **options)

    with torch.inference_mode():
        exact, ours = (decoding(model, (src, lengths), rows) for model in models[:2])
        with by_modules():
            modules = decoding(models[2], (src, lengths), rows)
        monkeypatch.setattr(Session, "prepare", sometimes)
        tokens = torch.full((3, 1), BOS)
        for step in range(180):
            got, eager, expected = (one.next_logits(tokens) for one in (ours, modules, exact))
            assert_as_exact_as_eager(got, eager, expected, what=f"logits of step {step}")
            kept = random_rows(len(tokens), 4, rows - 1, generator)
            newest = torch.randint(VOCAB, (len(kept), 1), generator=generator)
            tokens = torch.cat([tokens[kept], newest], dim=1)
            for one in (exact, ours, modules):
                one.select(kept)
    assert 100 < in_slots.count(False) < 180


def calls_of_modules(
    change: Callable[[tfast.Transformer], object] = lambda model: None, **options: object
) -> tuple[int, list]:
    """Return the number of calls of a decoder layer in a cached search, and the answers."""
    model, calls = tiny(), []
    hook = register_module_forward_hook(lambda *_: None) if options.pop("hooked", False) else None
    change(model)
    forward = DecoderLayer.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderLayer, "forward", lambda self, *a, **k: calls.append(1) or forward(self, *a, **k))
        src = torch.randint(2, VOCAB, (3, 5), generator=torch.Generator().manual_seed(0))
        config = tfast.GenerationConfig(beam=2, max_length=6, alignments=options.pop("alignments", False))
        found = tfast.generate(model, src, bos=BOS, eos=EOS, config=config, **options)
    if hook is not None:
        hook.remove()
    return len(calls), [h[0].tokens for h in found]


def test_no_module_is_called() -> None:
    assert calls_of_modules()[0] == 0


class Calls(TorchDispatchMode):
    """Counter of the ops that go through the dispatcher."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def calls_a_step(layers: int) -> float:
    torch.manual_seed(0)
    model = tfast.Transformer(VOCAB, VOCAB, 32, layers, 4, 0.1, d_ff=40).eval()
    with torch.no_grad():
        model.out.bias[EOS] = -1e4
    counts = []
    for length in (10, 20):
        with Calls() as calls:
            config = tfast.GenerationConfig(max_length=length)
            tfast.generate(model, torch.full((3, 5), 4), bos=BOS, eos=EOS, config=config)
        counts.append(calls.count)
    return (counts[1] - counts[0]) / 10


def test_a_greedy_step_is_few_calls_and_no_more_for_more_layers() -> None:
    assert calls_a_step(6) == calls_a_step(1) <= 40


HOLES = torch.tensor([[[True, False, True, True, True]]]).expand(3, 1, 5)
REASONS: dict[str, tuple[Callable[[tfast.Transformer], object], dict]] = {
    "a hook on a layer": (lambda m: m.decoder.layers[1].register_forward_hook(lambda *_: None), {}),
    "a hook on a norm": (lambda m: m.decoder.layers[2].norm_3.register_forward_hook(lambda *_: None), {}),
    "a hook on a linear layer": (lambda m: m.decoder.layers[0].ff.linear_2.register_forward_hook(lambda *_: None), {}),
    "a hook on all modules": (lambda m: None, {"hooked": True}),
    "a forward of its own": (lambda m: setattr(m.decoder.layers[1].ff, "forward", m.decoder.layers[1].ff.forward), {}),
    "a compiled module": (lambda m: m.decoder.layers[1].ff.compile(backend="eager"), {}),
    "another eps": (lambda m: setattr(m.decoder.layers[1].norm_2, "eps", 1e-3), {}),
    "a linear layer without bias": (lambda m: setattr(m.decoder.layers[1].attn_2.out, "bias", None), {}),
    "a mask with holes": (lambda m: None, {"src_mask": HOLES}),
    "alignments": (lambda m: None, {"alignments": True}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_modules_are_called_where_the_step_cannot_be_one(reason: str) -> None:
    change, options = REASONS[reason]
    assert calls_of_modules(change, **options)[0] > 0


def test_modules_are_called_with_the_reference_and_under_autocast() -> None:
    _, expected = calls_of_modules()
    with tfast.backend("reference"):
        calls, answers = calls_of_modules()
    assert calls > 0 and answers == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert calls_of_modules()[0] > 0


def test_rms_norm_without_an_eps_has_that_of_torch() -> None:
    """Rows are so small that eps decides their size."""
    models = [tiny(norm="rms") for _ in range(3)]
    for model, eps in zip(models, (None, torch.finfo(torch.float32).eps, 1e-6), strict=True):
        model.decoder.embed.scale = 1e-4
        model.decoder.pe.pe.zero_()
        for layer in model.decoder.layers:
            layer.norm_1.eps = layer.norm_2.eps = layer.norm_3.eps = eps
    src, lengths, tokens = torch.full((2, 3), 4), torch.tensor([3, 2]), torch.full((2, 1), BOS)
    with torch.inference_mode():
        found, same, other = (decoding(model, (src, lengths), 2).next_logits(tokens) for model in models)
    assert torch.equal(found, same) and not torch.allclose(found, other, atol=1e-3)


@pytest.mark.parametrize("norm", ["layer", "std", "rms"])
def test_norms_of_every_kind_run_in_the_step(norm: str) -> None:
    def swap(model: tfast.Transformer) -> None:
        for layer in model.decoder.layers:
            layer.norm_1, layer.norm_2, layer.norm_3 = (make_norm(norm, 40) for _ in range(3))

    assert calls_of_modules(swap)[0] == 0
