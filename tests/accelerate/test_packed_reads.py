"""``accelerate(model, packed=True)``: what a call reads from its mask, for which the host waits on a GPU."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
import packed_models as packed  # noqa: E402

import transformer_fast as tfast  # noqa: E402
from transformer_fast.integrations.unpadded import Unpadded  # noqa: E402
from transformer_fast.layers.padded_calls import PaddedCalls  # noqa: E402

pytestmark = pytest.mark.usefixtures("proven_once")


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("BertForMaskedLM", "num_hidden_layers"),
        ("GPT2LMHeadModel", "n_layer"),
        ("BartForConditionalGeneration", "decoder_layers"),
        ("T5EncoderModel", "num_layers"),
    ],
)
def test_no_layer_waits_for_a_gpu(name: str, layers: str) -> None:
    """What is read from tensors in a step is read once a call: reading waits for a GPU to finish its work."""
    reads = []
    for count in (1, 3):
        model = packed.make(name, **{layers: count})
        tfast.accelerate(model, packed=True)
        call = packed.batch(name, "right")
        packed.step(model, call)
        with torch.profiler.profile() as profile:
            packed.step(model, call)
        names = ("aten::equal", "aten::nonzero", "aten::is_nonzero")  # numbers of a cu_seqlens are read on a CPU only
        reads.append({event.key: event.count for event in profile.key_averages() if event.key in names})
    assert reads[0] == reads[1]


def test_a_mask_that_was_written_to_is_read_again() -> None:
    keep = torch.tensor([[True, True, True, False], [True, True, False, False]])
    call, device = Unpadded(PaddedCalls()), torch.device("cpu")

    def packing(mask: torch.Tensor) -> object:
        return call.packing(mask, 2, 4, device, causal=None)

    first = packing(keep)
    assert packing(keep[:]) is first and packing(keep.clone()) is first
    keep[0, 1] = False
    again = packing(keep)
    assert again is not first and again is not None and again.total == 4
