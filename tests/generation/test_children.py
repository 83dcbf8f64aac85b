"""Every part of every model that generation supports, changed in every way that a user may change it: the answers are
those of a loop that calls the model at every step. The parts are collected from the models."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import changed_children as changes
import handwritten as hw
import pytest
import torch
from tiny_transformer import ReferenceLinear
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import transformer_fast as tfast
from transformer_fast import GenerationConfig, generate
from transformer_fast.generation.forms import form_of
from transformer_fast.layers.hooks import is_plain
from transformer_fast.layers.linear import is_linear

BOS, EOS, VOCAB, D, BEAM, LONGEST = 0, 1, 12, 16, 2, 4
MARKS = {"bos": BOS, "eos": EOS}
SRC, LENGTHS = torch.tensor([[5, 3, 8], [7, 2, 0]]), torch.tensor([3, 2])
KEEP = torch.tensor([[[True, True, True]], [[True, True, False]]])


class TorchModel(nn.Module):
    """PyTorch's layers with the interface that generation takes."""

    class Part(nn.Module):
        def __init__(self, stack: nn.Module) -> None:
            super().__init__()
            self.embed, self.stack = nn.Embedding(VOCAB, D), stack

    class Encoder(Part):
        def forward(self, src: Tensor, mask: Tensor) -> Tensor:
            return self.stack(self.embed(src), src_key_padding_mask=~mask.squeeze(1))

    class Decoder(Part):
        def forward(self, trg: Tensor, memory: Tensor, src_mask: Tensor, trg_mask: Tensor) -> Tensor:
            hidden = ~src_mask.squeeze(1)
            return self.stack(self.embed(trg), memory, ~trg_mask[0], memory_key_padding_mask=hidden)

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"d_model": D, "nhead": 2, "dim_feedforward": 24, "batch_first": True}
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 1, enable_nested_tensor=False)
        self.encoder = self.Encoder(encoder)
        self.decoder = self.Decoder(nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 1, nn.LayerNorm(D)))
        self.out = nn.Linear(D, VOCAB)

    def forward(self, src: Tensor, trg: Tensor, src_mask: Tensor, trg_mask: Tensor) -> Tensor:
        return self.out(self.decoder(trg, self.encoder(src, src_mask), src_mask, trg_mask))


def ours(**options: Any) -> nn.Module:
    return tfast.Transformer(VOCAB, VOCAB, D, 1, 2, 0.1, **{"d_ff": 24, **options})


def accelerated(model: nn.Module) -> nn.Module:
    tfast.accelerate(model)
    return model


MARIAN = {"norm": "layer", "norm_first": False, "activation": "swish", "positions": "halves", "tie_weights": True}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: ours(norm="layer"),
    "classic": lambda: ours(norm="std", norm_first=False),
    "gelu": lambda: ours(norm="rms", activation="gelu"),
    "marian": lambda: ours(**MARIAN, scale=4.0),
    "ours accelerated": lambda: accelerated(ours(norm="layer")),
    "annotated": lambda: accelerated(hw.make_model(VOCAB, VOCAB, 1, D, 24, 2)),
    "torch": lambda: accelerated(TorchModel()),
}


@functools.cache
def made(name: str) -> nn.Module:
    """Return a model in evaluation mode with answers far from ties. Copy it before changing it."""
    torch.manual_seed(4)
    model = MODELS[name]().eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    return model


# The loop


def next_logits(model: nn.Module, src: Tensor, keep: Tensor, tokens: Tensor) -> Tensor:
    """Return the model's logits of the token after each prefix (B, t)."""
    length = tokens.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    logits = model(src, tokens, keep, causal)
    return (model.generator(logits) if hasattr(model, "generator") else logits)[:, -1]


Answers = list[list[tuple[list[int], float]]]


def slow_greedy(model: nn.Module) -> Answers:
    """Choose the most likely token at every step; also return the log-probability of the answer."""
    tokens, total = torch.full((2, 1), BOS), torch.zeros(2)
    found: Answers = [[], []]
    for _ in range(LONGEST):
        best = next_logits(model, SRC, KEEP, tokens).log_softmax(-1).max(dim=-1)
        total = total + best.values
        tokens = torch.cat([tokens, best.indices[:, None]], dim=1)
        for answer, said, value in zip(found, tokens[:, 1:].tolist(), total.tolist(), strict=True):
            if not answer and (said[-1] == EOS or len(said) == LONGEST):
                answer.append(([token for token in said if token != EOS], value))
    return found


def slow_beams(model: nn.Module) -> Answers:
    """Return the best finished hypothesis of beams of `BEAM`, and its score; None if all reach the limit."""
    beams = [[((), 0.0)] for _ in SRC]
    found: Answers = [[] for _ in SRC]
    for length in range(1, LONGEST + 1):
        rows = [(sentence, tokens, value) for sentence, beam in enumerate(beams) for tokens, value in beam]
        if not rows:
            break
        each = [sentence for sentence, *_ in rows]
        steps = next_logits(model, SRC[each], KEEP[each], torch.tensor([[BOS, *tokens] for _, tokens, _ in rows]))
        grown: list[list[tuple[tuple[int, ...], float]]] = [[] for _ in SRC]
        for (sentence, tokens, value), step in zip(rows, steps.log_softmax(-1).tolist(), strict=True):
            grown[sentence] += [((*tokens, token), value + more) for token, more in enumerate(step)]
        for sentence, ways in enumerate(grown):
            best = sorted(ways, key=lambda way: -way[1])[: BEAM - len(found[sentence])]
            found[sentence] += [
                (list(tokens[:-1]), value / ((5 + length) / 6) ** 0.6) for tokens, value in best if tokens[-1] == EOS
            ]
            beams[sentence] = [way for way in best if way[0][-1] != EOS]
    return [sorted(answers, key=lambda answer: -answer[1])[:1] for answers in found]


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of all modules with shared parameters; `copy.deepcopy` would take most of the test's time."""
    clone = type(model).__new__(type(model))
    clone.__dict__.update(
        {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(model).items()}
    )
    clone.__dict__["_modules"] = {name: child and copied(child) for name, child in model._modules.items()}
    return clone


def quantised(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose plain linear layers are the reference's with int8 weights."""
    model = copied(model)
    parts = ["decoder", "out" if hasattr(model, "out") else "generator"]
    if form_of(model).has_own_encoder():
        parts.append("encoder")

    def replace_in(parent: nn.Module, names: list[str]) -> None:
        for name in names:
            child = getattr(parent, name)
            if is_linear(child):
                setattr(parent, name, ReferenceLinear(child))
            elif is_plain(child):
                replace_in(child, list(child._modules))

    replace_in(model, parts)
    return model


MODES: dict[str, tuple[GenerationConfig, Callable[[nn.Module], Any], float]] = {
    "greedy": (GenerationConfig(), slow_greedy, 1e-4),
    "beam": (GenerationConfig(beam=BEAM), slow_beams, 1e-4),
    "int8": (GenerationConfig(quantize="int8"), lambda model: slow_greedy(quantised(model)), 0.02),
}


CANNOT = AttributeError, TypeError, NotImplementedError, ValueError
"""Errors of models that cannot run after a change, for example with a list of modules inside an adapter."""


def assert_slow_ones(model: nn.Module, mode: str, what: str, **options: Any) -> None:
    """Assert that the answers are those of the loop. If the changed model cannot be called, the search must fail too; a
    search with int8 weights may say that it needs the cache."""
    config, slow, tolerance = MODES[mode]
    config = replace(config, max_length=LONGEST, **options)
    given = {"src_lengths": LENGTHS, **MARKS, "config": config}
    try:
        with torch.no_grad():
            expected = slow(model)
    except CANNOT:
        with pytest.raises(CANNOT):
            generate(model, SRC, **given)
        return
    try:
        found = generate(model, SRC, **given)
    except ValueError as error:
        assert mode == "int8" and "no cached decoder for this model" in str(error), what
        return
    for ours, theirs in zip(found, expected, strict=True):
        if not theirs:
            assert not ours[0].finished, what  # no beam has ended within the limit
            continue
        value = ours[0].score if mode == "beam" else ours[0].log_prob
        assert ours[0].tokens == theirs[0][0], what
        assert value == pytest.approx(theirs[0][1], abs=tolerance), what


# The changes


def weight_norm(root: nn.Module, path: str) -> None:
    """Parametrise the weight of any module, whatever its name and shape."""
    child = root.get_submodule(path)
    weight = next((n for n, p in child._parameters.items() if p is not None and n != "bias"), None)
    if weight is None:
        raise changes.NotApplicable
    parametrizations.weight_norm(child, weight)
    with torch.no_grad():
        for parameter in child.parametrizations[weight].parameters():
            parameter.data = parameter * 1.3 + 0.2


CHANGES = {change.__name__: change for change in (*changes.CHANGES[:4], weight_norm, changes.adapter)}
PARTS = [(form, name) for form in MODELS for name, _ in made(form).named_modules() if name]


def changed(form: str, name: str, change: str) -> nn.Module:
    model = copied(made(form))
    with contextlib.suppress(changes.NotApplicable):
        CHANGES[change](model, name)
    return model.eval()


@pytest.mark.cover(16)
@pytest.mark.parametrize(("form", "name"), PARTS, ids=lambda value: value.replace(" ", "-"))
def test_a_changed_part_is_called(form: str, name: str) -> None:
    for change in CHANGES:
        model = changed(form, name, change)
        for mode in MODES:
            assert_slow_ones(model, mode, f"{change}, {mode}")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["decoder.layers.0.ff", "decoder.layers.0.norm_2", "decoder.embed", "encoder.norm"])
def test_a_part_that_is_changed_after_the_first_search(name: str, change: str) -> None:
    """Kept copies of the weights must follow the change."""
    model = copied(made("ours"))
    for mode in ("greedy", "int8"):
        assert_slow_ones(model, mode, "unchanged", keep_weights=True)
    with contextlib.suppress(changes.NotApplicable):
        CHANGES[change](model, name)
    for mode in ("greedy", "int8"):
        assert_slow_ones(model.eval().requires_grad_(False), mode, mode, keep_weights=True)


def test_a_hook_on_a_layer_sees_what_it_sees_without_a_cache() -> None:
    model, widths = copied(made("ours")), []
    model.decoder.layers[0].register_forward_pre_hook(lambda layer, inputs: widths.append(inputs[0].shape[1]))
    generate(model, SRC, src_lengths=LENGTHS, **MARKS, config=GenerationConfig(max_length=3, min_length=3))
    assert widths == [1, 2, 3]
    with pytest.raises(ValueError, match=r"for this model: decoder.layers.0 is not a plain DecoderLayer"):
        generate(model, SRC, **MARKS, config=GenerationConfig(quantize="int8"))


def test_an_adapter_keeps_what_it_stores_unless_its_linear_layers_are_laid_out() -> None:
    """A module without linear layers inside is called itself, not a copy."""

    class Keeps(nn.LayerNorm):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            self.kept = x
            return super().forward(x)

    model = copied(made("classic"))
    model.decoder.norm = Keeps(D).requires_grad_(False)
    generate(model, SRC, **MARKS, config=GenerationConfig(max_length=2))
    assert model.decoder.norm.kept.shape[-1] == D


def test_the_output_of_several_linear_layers_says_nothing_of_the_vocabulary() -> None:
    """A low-rank adapter stands beside the generator's layer."""

    class LowRank(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.up, self.down = base, nn.Linear(2, VOCAB), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.base, nn.Linear) and self.base.in_features == D
            return self.base(x) + self.up(self.down(x))

    model = copied(made("annotated"))
    torch.manual_seed(2)
    model.generator.proj = LowRank(model.generator.proj).requires_grad_(False)
    for mode in ("greedy", "beam"):
        assert_slow_ones(model, mode, mode)
    generate(model, SRC, **MARKS, config=GenerationConfig(quantize="int8"))
    with pytest.raises(ValueError, match="no layers whose attention weights can be read"):
        model = copied(made("ours"))
        model.decoder.layers[0].attn_2 = changes.Adapter(model.decoder.layers[0].attn_2)
        generate(model, SRC, **MARKS, config=GenerationConfig(alignments=True))
