"""A small Transformer for tests of decoding, a batch for it, and ways to search its answers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from transformer_fast import GenerationConfig, Transformer, generate
from transformer_fast.generation import Hypothesis
from transformer_fast.generation.decoding import Decoding, start
from transformer_fast.generation.request import check_request
from transformer_fast.reference.quantized_linear import int8_linear

BOS, EOS, VOCAB = 0, 1, 30
MARKS = {"bos": BOS, "eos": EOS}
Answers = list[list[Hypothesis]]


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **options: object) -> Transformer:
    """Return a model in evaluation mode, with choices far from ties and answers of many lengths.

    Args:
        options: those of `Transformer`.
    """
    torch.manual_seed(seed)
    options = {"d_ff": 48, "norm": "layer", **options}
    model = Transformer(VOCAB, VOCAB, 32, 2, 4, 0.1, **options).to(dtype)
    with torch.no_grad():
        model.out.weight.mul_(1 if options.get("tie_weights") else 8)
        for layer in model.decoder.layers:  # answers must depend on the source and the prefix
            for attention in (layer.attn_1, layer.attn_2):
                attention.v_linear.weight.mul_(8)
                attention.k_linear.weight.mul_(4)
    return model.eval()


def never_ending(model: Transformer) -> Transformer:
    """Return the model with EOS made impossible."""
    with torch.no_grad():
        model.out.bias[EOS] = -1e4
    return model


def batch(size: int = 6, width: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random sources (size, width), and their lengths (size,)."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(2, VOCAB, (size, width), generator=generator)
    return src, torch.randint(1, width + 1, (size,), generator=generator)


def answers(
    model: nn.Module | list[nn.Module], given: tuple[Tensor, Tensor | None], *, prefix: list | None = None, **options
) -> Answers:
    """Search the answers to sources and their lengths; the options are those of `GenerationConfig`."""
    src, lengths = given
    return generate(model, src, src_lengths=lengths, prefix=prefix, config=GenerationConfig(**options), **MARKS)


def tokens_of(found: Answers) -> list[list[list[int]]]:
    """Return the tokens of every hypothesis."""
    return [[one.tokens for one in hypotheses] for hypotheses in found]


def bits_of(found: Answers) -> list[tuple]:
    """Return everything that two searches must share to be equal in every bit."""
    return [(one.tokens, one.log_prob, one.score, one.finished) for each in found for one in each]


def assert_same(found: Answers, expected: Answers, what: object = "", tolerance: float = 1e-3) -> None:
    """Assert that tokens and ends are equal, and that scores and log-probabilities are close."""
    assert tokens_of(found) == tokens_of(expected), what
    for ours, theirs in zip((h for each in found for h in each), (h for each in expected for h in each), strict=True):
        assert ours.finished == theirs.finished, what
        assert (ours.score, ours.log_prob) == pytest.approx((theirs.score, theirs.log_prob), abs=tolerance), what
        if ours.alignment is not None and theirs.alignment is not None:
            torch.testing.assert_close(ours.alignment, theirs.alignment, atol=10 * tolerance, rtol=0)


@contextlib.contextmanager
def by_modules() -> Iterator[None]:
    """Turn the fused step off: modules compute every step."""
    with mock.patch("transformer_fast.generation.decoding.new_session", lambda *_: None):
        yield


def decoding(
    model: nn.Module, given: tuple[Tensor, Tensor], rows: int, config: GenerationConfig | None = None
) -> Decoding:
    """Return the decoding of a model for at most this many rows, without a search."""
    src, lengths = given
    options = {"src_mask": None, "pad": None, "max_length": 99}
    request = check_request(model, src, src_lengths=lengths, **options, **MARKS)
    return start([model], request, config or GenerationConfig(), rows=rows)


def random_rows(rows: int, least: int, most: int, generator: torch.Generator) -> Tensor:
    """Return random rows that continue: between least and most of the given rows."""
    kept = int(torch.randint(least, most + 1, (), generator=generator))
    return torch.randint(rows, (kept,), generator=generator)


class ReferenceLinear(nn.Module):
    """Linear layer with int8 weights, computed by the reference."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.out_features = linear, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.linear.weight, self.linear.bias)


def with_reference_linears(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose linear layers are ReferenceLinear."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        if not isinstance(module, ReferenceLinear):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, ReferenceLinear(child))
    return model
