"""Models on padded batches: eager, accelerated with the padding, and without it (``accelerate(model, packed=True)``).

16 sequences of up to 128 tokens, lengths lognormal, 43.75 % padding, dropout 0.1. "dense" is the accelerated model on
9 x 128 tokens: as many rows as there are tokens, and no padding, the best that leaving padding out can do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_accelerate import HUGGING_FACE, PAD
from torch import Tensor, nn
from torch.profiler import profile

import transformer_fast as tfast

try:
    import transformers
except ImportError:
    transformers = None

SMALL_CASE = "test_stack[cpu-nn.TransformerEncoder-evaluation]"
B, L, VOCAB, WIDTH, HEADS, D_FF = 16, 128, 8000, 768, 12, 3072
TOKENS = 9 * L

Given = dict[str, Tensor]

MODELS = {name: HUGGING_FACE[name] for name in ("bert", "marian", "bart", "gpt2")}


def lengths() -> Tensor:
    """Lengths of B sequences, lognormal, of TOKENS in all."""
    drawn = torch.exp(0.5 * torch.randn(B)).sort().values
    found = (drawn * TOKENS / drawn.sum()).round().long().clamp(4, L)
    while (missing := TOKENS - int(found.sum())) != 0:
        open_ = ((found < L) if missing > 0 else (found > 4)).nonzero().flatten()
        found[open_[torch.randperm(len(open_))[: abs(missing)]]] += 1 if missing > 0 else -1
    return found[torch.randperm(B)]


def batch() -> Given:
    """Ids that are their own labels."""
    keep = torch.arange(L) < lengths()[:, None]
    ids = torch.randint(3, VOCAB, (B, L))
    return {"input_ids": ids.where(keep, PAD), "attention_mask": keep.long(), "labels": ids.where(keep, -100)}


def dense(given: Given) -> Given:
    """Tokens of a batch, as rows without padding."""
    keep = given["attention_mask"].bool()
    ids = given["input_ids"][keep].view(-1, L)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": given["labels"][keep].view(-1, L)}


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the peak memory of a call with its gradients, above the memory in use before."""
    with profile(profile_memory=True) as profiled:
        call()
    held, most = 0, 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def runs(models: dict[str, nn.Module], call: Callable[[nn.Module, Any], Tensor], training: bool) -> dict[str, Any]:
    """Calls by model: a training step without an optimizer, or an evaluation."""

    def run(name: str) -> Callable[[Any], Tensor]:
        model = models[name]

        def step(given: Any) -> Tensor:
            given = given[1] if name == "dense" else given[0]
            if not training:
                with torch.no_grad():
                    return call(model, given)
            model.zero_grad(set_to_none=True)
            loss = call(model, given)
            loss.backward()
            return loss.detach()

        return step

    return {name: run(name) for name in models}


def compared(
    versus: Any,
    benchmark: Any,
    before: nn.Module,
    make: Callable[[], Any],
    call: Any,
    training: bool,
    peers: dict[str, nn.Module] | None = None,
) -> None:
    """Time a model in the four ways, and peers by name; check that they agree, and record the memory of each."""
    padded, ours = copy.deepcopy(before), copy.deepcopy(before)
    tfast.accelerate(padded)
    report = tfast.accelerate(ours, packed=True)
    models = {"ours": ours, "before": before, "padded": padded, "dense": padded, **(peers or {})}
    for model in models.values():
        model.train(training)

    def check(given: Any) -> None:
        with torch.no_grad():
            expected = call(before.eval(), given[0])
            for model in {**models, "dense": ours}.values():
                torch.testing.assert_close(call(model.eval(), given[0]), expected, atol=2e-3, rtol=2e-3)
        for model in models.values():
            model.train(training)
        assert not report.padded_calls.reasons

    calls = runs(models, call, training)
    versus(make, calls, check=check)
    given = make()
    peaks = {}
    for name, step in calls.items():
        models[name].zero_grad(set_to_none=True)
        peaks[name] = peak_bytes(functools.partial(step, given))
    benchmark.extra_info["peak_memory"] = peaks


def hugging_face(name: str, device: torch.device) -> nn.Module:
    """Return one of MODELS with eager attention."""
    kind, fields = MODELS[name]
    config = getattr(transformers, kind).config_class(**{"vocab_size": VOCAB, **fields})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).to(device)


def loss_of(model: nn.Module, given: Given) -> Tensor:
    return model(**given).loss


@pytest.mark.skipif(transformers is None, reason="needs transformers")
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face(versus, benchmark, name, training, device):
    """Models of transformers with their own loss: 4 layers or 2 + 2 of width 768 and 12 heads (Marian: 4 + 4, 512, 8),
    a vocabulary of 8000. "before" is attn_implementation="eager"."""
    model = hugging_face(name, device)

    def make() -> tuple[Given, Given]:
        given = {name: t.to(device) for name, t in batch().items()}
        return given, dense(given)

    compared(versus, benchmark, model, make, loss_of, training)


@pytest.mark.skipif(transformers is None, reason="needs transformers")
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
def test_no_padding(versus, training, device):
    """BERT on 9 x 128 tokens without padding, which nothing packs. "padded" is ``accelerate(model)``."""
    padded = hugging_face("bert", device)
    ours = copy.deepcopy(padded)
    tfast.accelerate(padded)
    tfast.accelerate(ours, packed=True)
    models = {"ours": ours.train(training), "padded": padded.train(training)}

    def make() -> tuple[Given, Given]:
        given = dense({name: t.to(device) for name, t in batch().items()})
        return given, given

    versus(make, runs(models, loss_of, training))


class Block(nn.Module):
    """Layer as users write it, around ``nn.MultiheadAttention``; pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, 0.1, batch_first=True)
        self.norm1, self.norm2, self.drop = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.ff = nn.Sequential(nn.Linear(WIDTH, D_FF), nn.GELU(), nn.Dropout(0.1), nn.Linear(D_FF, WIDTH))

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.drop(self.attn(y, y, y, key_padding_mask=src_key_padding_mask)[0])
        return x + self.drop(self.ff(self.norm2(x)))


class Blocks(nn.ModuleList):
    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None) -> Tensor:
        for block in self:
            x = block(x, src_key_padding_mask)
        return x


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, D_FF, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def nested(encoder: nn.Module) -> nn.Module:
    """The same encoder by torch's default: in evaluation it takes the padding out, too."""
    copied = copy.deepcopy(encoder)
    copied.enable_nested_tensor = copied.use_nested_tensor = True
    return copied


STACKS = {"nn.TransformerEncoder": torch_encoder, "blocks": lambda: Blocks(Block() for _ in range(4))}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
@pytest.mark.parametrize("stack", STACKS)
def test_stack(versus, benchmark, stack, training, device):
    """Stacks of 4 layers of width 768, 12 heads: ``nn.TransformerEncoder`` (post-norm), and a list of blocks that
    a user wrote around ``nn.MultiheadAttention`` and registered. "nested" is torch's own way without padding, in
    evaluation."""
    torch.manual_seed(0)
    model = STACKS[stack]().to(device)

    def make() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        keep = (torch.arange(L) < lengths()[:, None]).to(device)
        x = torch.randn(B, L, WIDTH, device=device, requires_grad=True)
        rows = x.detach()[keep].view(-1, L, WIDTH).requires_grad_()
        return (x, keep), (rows, torch.ones(rows.shape[:2], dtype=torch.bool, device=device))

    def call(m: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, keep = given
        return m(x, src_key_padding_mask=None if bool(keep.all()) else ~keep)[keep].square().mean()

    sample = Block(), (torch.randn(2, 5, WIDTH), torch.arange(5).expand(2, -1) > 3)
    peers = {"nested": nested(model)} if isinstance(model, nn.TransformerEncoder) and not training else {}
    with contextlib.ExitStack() as known:
        if stack == "blocks":
            known.enter_context(tfast.register(Block, mask="src_key_padding_mask", tokens=True, check=sample))
        compared(versus, benchmark, model, make, call, training, peers)
