"""tests/ops/test_cross_entropy.py on the Triton kernel, by the same function."""

import loss_calls
import pytest
import torch
from test_cross_entropy import *  # noqa: F403

import transformer_fast as tfast
from transformer_fast.triton.cross_entropy import cross_entropy_rows

test_double_precision_is_double_throughout = None  # on Triton there is none
test_opcheck = None  # of the native op
test_millions_of_rows = None  # a program each, which takes the interpreter milliseconds


@pytest.fixture(autouse=True)
def _on_triton(monkeypatch, device):
    """Also, on CPU, with no more rows than two chunks need, and one with a tail: a row is a program."""
    if device.type == "cpu":
        monkeypatch.setattr(loss_calls, "ROWS", (3, 23))
    with tfast.backend("triton"):
        yield


def test_a_wrong_target_is_nan_and_reads_nothing_outside(device):
    """Where looking at the targets would wait for the GPU, the kernel alone has to be safe."""
    logits, target = torch.randn(3, 37, device=device), torch.tensor([37, -1, 5], device=device)
    expected = torch.nn.functional.cross_entropy(logits[2:], target[2:])
    losses = cross_entropy_rows(logits, target, 0.0, -100, False)
    assert losses[:2].isnan().all()
    torch.testing.assert_close(losses[2], expected)
