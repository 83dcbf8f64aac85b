"""A call without padding reads its masks once a batch: on a GPU the host waits for each read."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_packed_stacks import MODELS, SOURCES, TARGETS, D, ids_and_masks, lengths
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
import packed_models as packed  # noqa: E402

import transformer_fast as tfast  # noqa: E402
from transformer_fast.huggingface.tokens import PACKING, is_full, packing_at, with_note  # noqa: E402

WAITS = (
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
)  # fmt: skip
ON_A_CPU_ONLY = ("/transformer_fast/ops/", "in _is_window", "in is_look_ahead", "in _padding_of_dense")
"""Code that reads tensors of a CPU alone: checks of the ops, made masks, and dense masks, which a GPU gets refused."""


class Reads(TorchDispatchMode):
    """Places in the code that read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def note(self) -> None:
        """Add the place that reads now."""
        inner = "".join(traceback.format_list(traceback.extract_stack()[-12:]))
        if not any(each in inner for each in ON_A_CPU_ONLY):
            self.places.append(inner)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function._schema.name, kwargs or {}
        chosen = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        by_bool = any(t is not None and t.dtype == torch.bool for t in chosen)
        if name in WAITS or by_bool or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
            self.note()
        return function(*args, **kwargs)


class Lists(TorchFunctionMode):
    """``Tensor.tolist``, which is no operator."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.tolist:
            self.reads.note()
        return function(*args, **kwargs or {})


def reads_of(run: Callable[[], Any]) -> list[str]:
    """Places that read in a call, after one that learns what the model calls."""
    run()
    with Reads() as reads, Lists(reads):
        run()
    return reads.places


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "BertForMaskedLM", "BertForTokenClassification", "LlamaForCausalLM", "DistilBertModel",
        "BartForConditionalGeneration", "MarianMTModel", "T5ForConditionalGeneration",
    ],
)  # fmt: skip
def test_a_batch_is_read_once(name: str, layers: int, padding: str, labels: bool) -> None:
    count = {"T5": "num_layers", "Ba": "decoder_layers", "Ma": "decoder_layers", "Di": "n_layers"}
    _, model, report = packed.pair(name, **{count.get(name[:2], "num_hidden_layers"): layers})
    given = packed.batch(name, padding).given
    if not labels and "labels" in given:
        target = given.pop("labels")
        given |= {} if "Bert" in name else {"use_cache": False}
        if name in ("BartForConditionalGeneration", "MarianMTModel", "T5ForConditionalGeneration"):
            given |= {"decoder_input_ids": target.clamp(min=1), "decoder_attention_mask": (target >= 0).long()}

    def step() -> None:
        output = model(**given)
        (output.loss if "loss" in output else output[0].sum()).backward()

    reads = reads_of(step)
    assert len(reads) == 1, "\n\n".join(reads)
    assert not report.padded_calls.reasons


@pytest.mark.parametrize(("name", "most"), [("ours", 1), ("annotated", 2), ("classic", 2), ("tensorflow", 2)])
def test_a_hand_written_stack_reads_its_masks_once(name: str, most: int) -> None:
    """A Transformer of this package is one stack in this sense; the others have an encoder and a decoder."""
    model = MODELS[name]()
    tfast.accelerate(model, packed=True)
    given = ids_and_masks(lengths(SOURCES, 9), lengths(TARGETS, 7))
    assert len(reads_of(lambda: model(*given).sum().backward())) == most


def test_a_stack_of_torch_reads_its_masks_once() -> None:
    model = nn.Transformer(D, 2, 2, 2, 32, 0.0, batch_first=True)
    report = tfast.accelerate(model, packed=True)
    src, trg, blocked = torch.randn(4, 9, D), torch.randn(4, 7, D), ~lengths(SOURCES, 9)
    floats = torch.zeros(4, 7).masked_fill(~lengths(TARGETS, 7), float("-inf"))
    options = {"src_key_padding_mask": blocked, "memory_key_padding_mask": blocked, "tgt_key_padding_mask": floats}
    assert len(reads_of(lambda: model(src, trg, **options).sum().backward())) == 2  # an encoder and a decoder
    assert not report.padded_calls.reasons


def test_a_mask_that_was_written_to_is_read_again() -> None:
    keep = torch.tensor([[True, True, True, False], [True, True, False, False]])
    first = packing_at(with_note(keep, PACKING, packing_at(keep)))
    assert packing_at(keep) is first and packing_at(keep.clone()) is not first and not is_full(keep)
    keep[0, 1] = False
    again = packing_at(keep)
    assert again is not first and again.total == 4
