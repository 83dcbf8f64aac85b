"""tests/ops/test_attention_kernels_packed.py on the Triton kernels; also the bits of a padded batch, and the visited
tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_kernels import TRITON
from test_attention_kernels_packed import *  # noqa: F403

pytestmark = [
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered"),
    pytest.mark.usefixtures("small_tiles"),
    pytest.mark.cover("values"),
]
pytest.mark.cover(1)(test_same_bits_in_every_run_on_any_number_of_threads_and_with_longer_bounds)  # noqa: F405


@pytest.fixture(autouse=True)
def longest_first(monkeypatch):
    """Use sequences so long that the longest go first."""
    monkeypatch.setattr("transformer_fast.triton.attention.launches.LONG", 35)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("causal", "window"), [(None, None), (0, None), (0, -5), (None, -33)])
def test_the_bits_of_a_padded_batch(causal, window, dropout_p):
    """Dropout and the order of sums are those of the padded batch. With a window, padded queries can be empty rows,
    whose mean would make the tile's other rows be summed again."""
    lengths, D = [33, 1, 40], 16
    tensors = TRITON.packed_inputs(lengths, lengths, 1, 1, D, torch.float16)
    options = {"causal": causal, "window": window, "zero_empty_rows": window is not None, "dropout_p": dropout_p}
    call = TRITON.packed_call(lengths, lengths, D, **options)

    def padded(t):
        return torch.nn.utils.rnn.pad_sequence(list(t.split(lengths)), batch_first=True).transpose(1, 2).contiguous()

    def packed(t):
        return torch.cat([row[:, :n].transpose(0, 1) for row, n in zip(t, lengths, strict=True)])

    same = replace(call, packed=None, lengths=torch.tensor(lengths, dtype=torch.int32, device=TRITON.device))
    expected = TRITON.outcome([padded(t) for t in tensors], same)
    for name, t in TRITON.outcome(tensors, call).items():
        rows = expected[name]
        rows = packed(rows.unsqueeze(-1)).squeeze(-1).t() if name == "logsumexp" else packed(rows)
        assert torch.equal(t, rows), name


def test_tiles_without_a_common_document_are_not_visited(loads):
    """Four documents in 128 rows: each tile of 32 sees only its own, forward and backward."""
    lengths, counts = [128, 64], []
    ids = torch.cat([torch.arange(n) // 32 for n in lengths]).int()
    tensors = TRITON.packed_inputs(lengths, lengths, 1, 1, 16)
    for parts in ({"query_ids": ids, "key_ids": ids}, {}):
        loads.clear()
        TRITON.outcome(tensors, TRITON.packed_call(lengths, lengths, 16, parts))
        counts.append(dict(loads))
    apart, together = counts
    # Six programs: with documents a step each, without them 4 * 4 + 2 * 2. A step loads two tiles.
    assert {name: together[name] - apart[name] for name in together} == dict.fromkeys(together, (20 - 6) * 2)
