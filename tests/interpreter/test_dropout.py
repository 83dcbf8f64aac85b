"""tests/ops/test_dropout.py on the Triton kernels, and the rows that a kernel counts in 64 bits."""

import pytest
import test_dropout
import torch
import triton
import triton.language as tl
from interpreted import dtype_of_rows as dtype  # noqa: F401
from op_calls import SEED
from test_dropout import *  # noqa: F403
from test_dropout import compare, keep_mask

import transformer_fast as tfast
from transformer_fast.layers import FeedForward, feed_forward
from transformer_fast.triton.configs import DROPOUT, DropoutConfig
from transformer_fast.triton.philox import elementwise_keep_tile, load_seed

pytestmark = [pytest.mark.usefixtures("on_triton", "tiles"), pytest.mark.cover("values")]
test_millions_of_rows = test_the_rate_is_rounded_to_the_nearest = None  # many programs
test_everything_dropped_compiles = None  # the graph is that of the C++ kernels


@pytest.fixture(params=["table", "few programs"])
def tiles(request, monkeypatch, device):
    """Parametrize with fewer programs than tiles of rows, so that each takes several; leave bfloat16 to a GPU."""
    if request.param == "few programs":
        monkeypatch.setitem(DROPOUT, 64, DropoutConfig(8, 64, programs_per_multiprocessor=1))
    if device.type == "cpu":
        monkeypatch.setattr(test_dropout, "HALVES", [torch.float16])


# rows < programs; one tile; ragged last tiles; stripes of columns; widths that nothing divides
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 20), (129, 33), (57, 64), (9, 600), (2, 3, 2100)])
def test_the_gradient_of_the_bias_at_any_size(dtype, shape, relu, device):  # noqa: F811
    compare(shape, dtype, 0.2, ["bias"], relu, device)


@triton.jit
def _keep_kernel(keep, seed, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    key_low, key_high = load_seed(seed)
    tile = elementwise_keep_tile(key_low, key_high, 32768, first_row + tl.arange(0, ROWS), 0, ROWS, COLUMNS)
    tl.store(keep + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], tile)


def test_rows_beyond_32_bits_have_bits_of_their_own(device):
    first, far = (torch.empty(4, 16, dtype=torch.bool, device=device) for _ in range(2))
    _keep_kernel[(1,)](first, torch.tensor([SEED], device=device), 3, 4, 16)
    _keep_kernel[(1,)](far, torch.tensor([SEED], device=device), 2**32 + 3, 4, 16)
    assert torch.equal(first.cpu(), keep_mask(0.5, torch.Size([7, 16]))[3:]) and not torch.equal(far, first)


def test_the_feed_forward_network_leaves_its_bias_to_it(monkeypatch):
    ff, x, biases = FeedForward(16, 24, 0.3), torch.randn(3, 5, 16), []
    fused = feed_forward.dropout_of_any

    def seen(x, p, *, bias=None, **options):
        biases.append(bias is not None)
        return fused(x, p, bias=bias, **options)

    def run(backend):
        torch.manual_seed(1)
        with tfast.backend(backend):
            out = ff(x)
            return out, *torch.autograd.grad(out.square().sum(), list(ff.parameters()))

    monkeypatch.setattr(feed_forward, "dropout_of_any", seen)
    torch.testing.assert_close(run("triton"), run("reference"))
    assert biases == [True, False]
