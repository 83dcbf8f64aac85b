"""Reasons in a report: attention that is not fused, subclasses of torch's classes, layers that keep padding; and what
``explain`` says of a batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from accelerated import kinds, pair
from torch import Tensor, nn

pytest.importorskip("transformers")
import handwritten
import packed_models as packed

import transformer_fast as tfast

BERT, BART = "BertForMaskedLM", "BartForConditionalGeneration"

D = 8


class OwnAttention(nn.Module):
    """Attention by plain products, under names that no text has."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.dropout = nn.Linear(D, D), dropout

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.one(x) @ x.mT).softmax(-1)
        return (F.dropout(weights, self.dropout, self.training) if self.dropout else weights) @ x


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class AttentionBlock(Block):
    """Block that is named after the attention inside it."""


class OtherAttention(nn.MultiheadAttention):
    """Subclass, whose code may be its own."""


class Wider(nn.Linear):
    """Square linear layer with a factor: its parameters have the names and shapes of GPT-2's ``Conv1D``."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


UNKNOWN = (
    "it keeps its own forward; where its code calls F.scaled_dot_product_attention: accelerate(model, functional=True)"
)
COMPUTED = "padding is computed: packed=True was not given"
FIRST = {
    "its own": (
        lambda: Stack(Block(OwnAttention()), Block(OwnAttention())),
        [f"attention: not fused in 2 OwnAttention: {UNKNOWN}", "(layers.0.attention and 1 more)"],
    ),
    "its own, with our dropout": (
        lambda: Stack(AttentionBlock(OwnAttention(0.5))),
        [f"attention: not fused in 1 OwnAttention: {UNKNOWN}", "(layers.0.attention)"],
    ),
    "one of two": (
        lambda: Stack(AttentionBlock(OwnAttention()), AttentionBlock(nn.MultiheadAttention(D, 2))),
        [
            f"attention: fused in 1 of 2 modules (nn.MultiheadAttention); {COMPUTED}",
            f"attention: not fused in 1 OwnAttention: {UNKNOWN}", "(layers.0.attention)",
        ],
    ),
    "a subclass": (
        lambda: OtherAttention(D, 2),
        [
            "attention: not fused in 1 OtherAttention: a subclass of nn.MultiheadAttention may compute something else",
            "(the model)",
        ],
    ),
    "of torch, with a part that the kernel lacks": (
        lambda: nn.Sequential(nn.MultiheadAttention(D, 2, add_zero_attn=True), nn.MultiheadAttention(D, 2)),
        [
            f"attention: fused in 1 of 2 modules (nn.MultiheadAttention); {COMPUTED}",
            "attention: not fused in 1 nn.MultiheadAttention: it uses add_zero_attn, which the kernel does not have",
            "(0)",
        ],
    ),
    "of this package": (
        lambda: tfast.Transformer(11, 11, D, 1, 2, 0.1),
        [f"attention: fused in 3 of 3 modules (MultiHeadAttention); {COMPUTED}"],
    ),
    "none": (
        lambda: nn.Sequential(nn.LayerNorm(D)),
        ["attention: none was found by its class or name; code that writes it out can call tfast.attention"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_the_first_lines_are_about_attention(name: str) -> None:
    make, expected = FIRST[name]
    report = tfast.accelerate(make())
    assert " ".join(str(report).split()).startswith(" ".join(" ".join(expected).split()) + " ")


def test_a_second_call_says_the_same_about_attention() -> None:
    for make, _ in FIRST.values():
        model = make()
        first, again = tfast.accelerate(model), tfast.accelerate(model)
        assert [(row.path, row.now is None) for row in first.attention] == [
            (row.path, row.now is None) for row in again.attention
        ]


@pytest.mark.parametrize("size", [4, 1024])
def test_a_subclass_of_linear_is_called_so(size: int) -> None:
    """From some size on oneDNN may be the faster library, and then the weight's names are those of a known module."""
    report = tfast.accelerate(nn.Sequential(Wider(size, size)))
    assert [(row.path, row.why) for row in report.left] == [("0", "a subclass of nn.Linear may compute something else")]


REGISTER = "tfast.register(Block, mask=..., tokens=True, check=...) lets them skip padding"
LAYERS = {
    "its own attention": (
        lambda: Stack(Block(OwnAttention()), Block(OwnAttention())),
        ["packed: padding stays in layers (2 Block): the attention of OwnAttention is not fused"],
    ),
    "its own layers": (
        lambda: Stack(*(Block(nn.MultiheadAttention(D, 2)) for _ in range(3))),
        [f"packed: padding stays in layers (3 Block): {REGISTER}"],
    ),
    "layers that need another argument": (
        lambda: Stack(*(nn.TransformerDecoderLayer(D, 2, 16) for _ in range(2))),
        [
            "packed: padding stays in layers (2 TransformerDecoderLayer): a list of these layers keeps its padding, a "
            "stack does not"
        ],
    ),
    "two lists": (
        lambda: nn.ModuleDict({
            "encoder": Stack(*(Block(nn.MultiheadAttention(D, 2)) for _ in range(2))), "decoder": Stack(OwnAttention()),
        }),
        [
            f"packed: padding stays in encoder.layers (2 Block): {REGISTER}",
            "packed: padding stays in decoder.layers.0 (1 OwnAttention): the attention of OwnAttention is not fused",
        ],
    ),
    "one module": (
        lambda: nn.MultiheadAttention(D, 2),
        ["packed: padding stays in the model (1 MultiheadAttention): no list of layers is around it, and "
         "MultiheadAttention may read padding"],
    ),
    "nothing": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        ["packed: padding stays: no attention was found by its class or name"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_that_keep_padding_are_named(name: str) -> None:
    make, expected = LAYERS[name]
    report = tfast.accelerate(make(), packed=True)
    assert report.notes == expected
    assert all("".join(note.removeprefix("packed: ").split()) in "".join(str(report).split()) for note in expected)
    assert not tfast.accelerate(make()).notes


def test_a_change_of_attention_alone_is_a_change() -> None:
    layer = nn.ModuleList([packed.make("LlamaForCausalLM").model.layers[0].self_attn])
    report = tfast.accelerate(layer)
    first, numbers, *_ = str(report).splitlines()
    assert first == f"attention: fused in 1 of 1 modules (LlamaAttention); {COMPUTED}"
    assert numbers == "0 modules swapped, 0 left" and report.plain == {"Linear": 4, "ModuleList": 1}
    assert [row.now for row in report.attention] == ["through transformers' interface"]


def test_packing_a_model_that_was_swapped_is_a_change() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    swapped = len(tfast.accelerate(stack).swapped)
    report = tfast.accelerate(stack, packed=True)
    assert not report.notes
    assert f"0 modules swapped, {swapped} on the fused ops already, 0 left" in str(report)
    assert "padding is skipped in the model" in str(report).splitlines()[0]


def test_explain_counts_positions_and_tokens() -> None:
    call, seq2seq = packed.batch(BERT, "right"), packed.batch(BART, "right")
    _, _, report = packed.pair(BERT)
    text = report.explain(call.given)
    assert text.splitlines()[1:3] == [
        "calls: layer_norm 6, embed 3, attention_packed 2", "bert.encoder (2): 17 of 27 positions",
    ]  # fmt: skip
    assert text.endswith("these layers skip 37% of their positions, which are padding")
    kept = report.explain(call.given | {"output_attentions": True})
    reason = "attention weights are requested (output_attentions)"
    assert kept.splitlines()[2] == f"bert.encoder (2): 27 of 27 positions: {reason}"
    assert kept.splitlines()[1] == "calls: layer_norm 7, embed 6, attention 2, attention_weights 2"
    _, _, report = packed.pair(BART)
    assert report.explain(seq2seq.given).splitlines()[2:-1] == [
        "model.encoder (2): 17 of 27 positions", "model.decoder (2): 13 of 21 positions",
    ]  # fmt: skip
    assert "no padding" in packed.pair(BERT)[2].explain((torch.ones(2, 5, dtype=torch.int64),))


ROWS = [{"input_ids": [5, 6]}, {"input_ids": [7]}]
NO_BATCH = {
    "texts": (["a dog", "two men"], r"batch: Bert\w+ takes token ids, got list of texts; tokenizer\(texts, padding"),
    "loader": (torch.utils.data.DataLoader(ROWS), r"batch: .*got DataLoader; next\(iter\(loader\)\)"),
    "rows": (ROWS, r"batch: Bert\w+ takes tensors by name, got list; .*tokenizer\.pad\(rows"),
}


@pytest.mark.parametrize("name", NO_BATCH)
def test_what_is_no_batch_is_told_how_it_becomes_one(name: str) -> None:
    given, message = NO_BATCH[name]
    report = tfast.accelerate(packed.make(BERT), packed=True)
    for call in (report.explain, report.measure):
        with pytest.raises(TypeError, match=message):
            call(given)


def test_explain_says_what_would_be_left_out() -> None:
    _, model, report = pair(packed.make(BERT))
    before = kinds(model)
    text = report.explain(packed.batch(BERT, "right").given)
    assert text.startswith("with packed=True:\n") and "37% of their positions" in text and kinds(model) == before


def test_explain_counts_the_attention_that_stays_torchs() -> None:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.norm(x), x, x)

    text = tfast.accelerate(Own(nn.Identity())).explain(torch.randn(1, 2, 3, D))
    assert "calls: layer_norm 1, torch's own attention 1" in text.splitlines()


@pytest.mark.parametrize("name", [BERT, BART, "T5ForConditionalGeneration", "MPNetForMaskedLM"])
def test_accelerate_and_explain_log_no_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for options in ({}, {"packed": True}):
        _, _, report = pair(packed.make(name, **packed.SETTINGS.get(name, {})), **options)
        str(report)
        if not options:
            report.explain(packed.batch(name, "between").given)
    assert not [record for record in caplog.records if record.name == "transformer_fast"]


class MixingEncoder(handwritten.AnnotatedEncoder):
    """The annotated text's encoder, with code of its own between the layers."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
            x = x - x.mean(1, keepdim=True)
        return self.norm(x)


def test_code_between_layers_that_skip_padding_is_named() -> None:
    """The layers skip padding one by one, and no line says that they keep it."""
    attention, network = handwritten.AnnotatedAttention(2, D, 0.0), handwritten.AnnotatedFeedForward(D, 16, 0.0)
    model = MixingEncoder(handwritten.AnnotatedEncoderLayer(D, attention, network, 0.0), 2)
    report = tfast.accelerate(model, packed=True)
    assert [(row.path, row.now) for row in report.rows if row.is_stack] == [
        (f"layers.{n}", "without padding") for n in range(2)
    ]
    assert report.notes == ["what the code of MixingEncoder reads between its layers is 0 at padding"]
    assert "padding stays" not in str(report)
