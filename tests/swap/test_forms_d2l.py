"""Classes of d2l 1.x: attention heads derive from ``d2l.Module``, which keeps its arguments in ``hparams``."""

from __future__ import annotations

import copy

import handwritten as hw
import torch
from test_packed_stacks import SOURCE, SOURCES, hold, lengths
from torch import Tensor, nn

import transformer_fast as tfast

D, HEADS, VOCABULARY, BLOCKS = 16, 2, 40, 2
KEEP = lengths(SOURCES, SOURCE)
IDS = torch.randint(VOCABULARY, (len(SOURCES), SOURCE), generator=torch.Generator().manual_seed(0))


class HyperParameters:
    """Arguments become attributes, and entries of a dict."""

    def save_hyperparameters(self, **arguments: object) -> None:
        self.hparams = arguments
        for name, value in arguments.items():
            setattr(self, name, value)


class Board(HyperParameters):
    """A picture of the training, which no ``forward`` reads."""

    def __init__(self) -> None:
        self.save_hyperparameters(xlabel=None, figsize=(3.5, 2.5))


class Heads(hw.D2lHeads, HyperParameters):
    """The chapter's heads, with what its base class sets."""

    def __init__(self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = False) -> None:
        super().__init__(num_hiddens, num_heads, dropout, bias)
        self.save_hyperparameters(plot_train_per_epoch=2, plot_valid_per_epoch=1)
        self.board = Board()


def encoder(dropout: float = 0.0) -> nn.Module:
    """Return the chapter's encoder with such heads, after the call that gives its lazy layers their sizes."""
    torch.manual_seed(0)
    made = hw.D2lEncoder(VOCABULARY, D, 32, HEADS, BLOCKS, dropout)
    for block in made.blks:
        block.attention = Heads(D, HEADS, dropout)
    with torch.no_grad():
        made(IDS, SOURCES)
    return made


def call(model: nn.Module) -> Tensor:
    return model(IDS, SOURCES)


def test_an_encoder_of_d2l_1_is_packed_and_equal() -> None:
    report = hold(encoder(), call, KEEP)
    assert f"fused in {BLOCKS} of {BLOCKS}" in str(report) and not report.left
    assert f"\nthe model ({BLOCKS}): {int(KEEP.sum())} of {KEEP.numel()} positions" in report.explain((IDS, SOURCES))


def test_heads_of_d2l_1_in_a_model_of_its_own() -> None:
    class Classifier(nn.Module, HyperParameters):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(lr=0.1)
            self.encoder, self.out = encoder(), nn.Linear(D, 3)

        def forward(self) -> Tensor:
            return self.out(call(self.encoder)[:, 0])

    fast = Classifier()
    plain = copy.deepcopy(fast)
    report = tfast.accelerate(fast, packed=True)
    torch.testing.assert_close(fast(), plain())
    assert "padding is skipped in encoder" in str(report)


def test_the_number_of_blocks_is_a_size() -> None:
    made = hw.D2lDecoder(VOCABULARY, D, 32, HEADS, BLOCKS, 0.0)
    made.num_blks = BLOCKS
    with torch.no_grad():
        made(IDS, made.init_state(encoder()(IDS, SOURCES), SOURCES))
    assert tfast.accelerate(made).rows[0].now == "fused D2lDecoder"
