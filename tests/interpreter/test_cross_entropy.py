"""tests/ops/test_cross_entropy.py and test_cross_entropy_sure.py on the Triton kernel."""

import loss_calls
import pytest
import torch
from test_cross_entropy import *  # noqa: F403
from test_cross_entropy_sure import *  # noqa: F403

from transformer_fast.triton.cross_entropy import cross_entropy_rows

pytestmark = pytest.mark.usefixtures("on_triton")
test_double_precision_is_double_throughout = None  # the Triton kernels take no float64
test_millions_of_rows = None  # a program each, which takes the interpreter milliseconds


@pytest.fixture(autouse=True)
def few_rows(monkeypatch, device):
    """Use rows for two chunks only on CPU, one with a tail, because each row is a program."""
    if device.type == "cpu":
        monkeypatch.setattr(loss_calls, "ROWS", (3, 23))


def test_a_wrong_target_is_nan_and_reads_nothing_outside(device):
    """The kernel must be safe by itself, because checking targets would wait for the GPU."""
    logits, target = torch.randn(3, 37, device=device), torch.tensor([37, -1, 5], device=device)
    expected = torch.nn.functional.cross_entropy(logits[2:], target[2:])
    losses = cross_entropy_rows(logits, target, 0.0, -100, False)
    assert losses[:2].isnan().all()
    torch.testing.assert_close(losses[2], expected)
