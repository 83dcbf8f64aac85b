"""Interfaces of the four families: constructors, submodules and order of arguments are those of the texts."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from transformer_fast import dialects, layers, reference

SIZES = {  # for one module of each kind
    "vocab": 11, "vocab_size": 11, "src_vocab": 11, "trg_vocab": 11, "d_model": 8, "N": 1, "heads": 2, "h": 2,
    "num_heads": 2, "dropout": 0.1, "dff": 12, "units": 6, "key_size": 8, "query_size": 8, "num_hiddens": 8,
    "ffn_num_hiddens": 12, "pw_num_outputs": 8, "normalized_shape": 8, "i": 0, "num_layers": 1, "num_inputs": 8,
    "input_vocab_size": 11, "target_vocab_size": 11, "maximum_position_encoding": 20, "pe_input": 20, "pe_target": 20,
}  # fmt: skip


FAMILIES = {
    "layers": (layers, reference.layers),
    **{name: (getattr(dialects, name), getattr(reference.dialects, name)) for name in ("bert", "tensorflow", "d2l")},
}


def texts_names() -> list[str]:
    """Names of the texts' classes and functions that this package has too."""
    return [
        f"{family}.{name}"
        for family, (fast, text) in FAMILIES.items()
        for name, value in vars(text).items()
        if getattr(value, "__module__", "").startswith("transformer_fast.reference") and name in fast.__all__
    ]


def by_place(function: Callable[..., Any]) -> str:
    """Arguments that may be given by place, with their defaults."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    placed = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in placed)


def stored(kind: Callable[..., nn.Module]) -> tuple[set[str], set[str]]:
    """Names of the modules, parameters and buffers of a small module; and of its attributes too."""
    needed = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.name in SIZES]
    made = kind(**{name: SIZES[name] for name in needed})
    buffers = {name for name, value in made._buffers.items() if value is not None and not name.startswith("_")}
    names = {*made._modules, *made._parameters, *buffers}
    return names, names | vars(made).keys()


@pytest.mark.parametrize("name", texts_names())
def test_the_form_is_that_of_the_text(name: str) -> None:
    """More arguments may follow the text's own. What a module holds has the text's name."""
    family, _, kind = name.partition(".")
    ours, texts = (getattr(module, kind) for module in FAMILIES[family])
    if not inspect.isclass(texts):
        assert by_place(ours).startswith(by_place(texts))
        return
    assert by_place(ours.__init__).startswith(by_place(texts.__init__))
    assert by_place(ours.forward).lower().startswith(by_place(texts.forward).lower())
    if kind != "EncoderDecoder":  # which is given two modules
        assert stored(ours)[0] <= stored(texts)[1]


def test_every_text_is_there() -> None:
    counts = Counter(name.partition(".")[0] for name in texts_names())
    assert counts == {"layers": 12, "bert": 5, "tensorflow": 15, "d2l": 15}, counts


def test_what_a_multi_head_attention_says_of_its_heads() -> None:
    m = layers.MultiHeadAttention(4, 32)
    assert (m.h, m.d_k) == (4, 8)
    assert layers.subsequentmask(3).tolist() == [[[True, False, False], [True, True, False], [True, True, True]]]


def test_the_layers_of_a_stack_start_from_copies_of_one() -> None:
    stack = layers.Encoder(11, 8, 3, 2, 0.1).layers
    first = stack[0].state_dict()
    for layer in stack[1:]:
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, first[name]) and tensor.data_ptr() != first[name].data_ptr()
