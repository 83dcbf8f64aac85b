"""Wrong inputs: one clear error names what was wrong and what was expected.

The wrong inputs of packed attention, decoding and the dialects stand in their own files, those of files and runs in
tests/translation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from op_calls import by_dispatcher

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.ops import add_positional, dropout, embed, positional_table

Row = tuple[Callable[[], object], type[Exception], str]


def rows(error: type[Exception], calls: dict[str, Callable[[], object]]) -> dict[str, Row]:
    """Return the rows of (call, error, message) as test parameters, named by the message."""
    return {says: (call, error, says) for says, call in calls.items()}


def heads(L: int = 5, *, B: int = 2, H: int = 4, D: int = 8) -> torch.Tensor:
    return torch.randn(B, H, L, D)


def ones(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool, device=device)


def model() -> tfast.Transformer:
    return tfast.Transformer(11, 11, 8, 1, 2, 0.1)


Q, K, K3, K6 = heads(), heads(7), heads(H=3), heads(D=6)
TOKENS, STARTS = Q[0], torch.tensor([0, 2, 4], dtype=torch.int32)
ATTEND, PACKED, MASK = tfast.attention, tfast.attention_packed, AttentionMask
READ = r"can be read two ways: pass t\[:, None\] if it is the batch, t\[None\] if it is the heads"

ATTENTION = rows(
    TypeError,
    {
        "q must be a tensor, got list": lambda: ATTEND([1.0], K, K),
        r"q must be a float tensor, got torch.int64": lambda: ATTEND(Q.long(), K, K),
        "attention: k must be a tensor of torch.float32, got torch.float16": lambda: ATTEND(Q, K.half(), K),
        "scale must be a number, got True": lambda: ATTEND(Q, K, K, scale=True),
        "scale must be a number, got '0.1'": lambda: ATTEND(Q, K, K, scale="0.1"),
        "softcap must be a number, got True": lambda: ATTEND(Q, K, K, softcap=True),
        "softcap must be a number, got '5'": lambda: ATTEND(Q, K, K, softcap="5"),
        "dropout_p must be a number, got None": lambda: ATTEND(Q, K, K, dropout_p=None),
        "dropout_p must be a number, got True": lambda: ATTEND(Q, K, K, dropout_p=True),
        "attention_packed: dropout_p must be a number, got None": lambda: PACKED(
            TOKENS, TOKENS, TOKENS, STARTS, STARTS, dropout_p=None
        ),
        "attention_packed: scale must be a number, got True": lambda: PACKED(
            TOKENS, TOKENS, TOKENS, STARTS, STARTS, scale=True
        ),
        "attention_decode: scale must be a number, got '0.1'": lambda: tfast.attention_decode(
            Q, Q, Q, torch.tensor([5, 5]), scale="0.1"
        ),
        r"q must be a tensor, got AttentionMask; the order is attention\(q, k, v, mask\)": lambda: ATTEND(
            MASK.causal(), Q, Q, Q
        ),
        "q: expected a dense tensor.*sparse_coo": lambda: ATTEND(Q.to_sparse(), K, K),
        "bias: expected a dense.*to_dense": lambda: ATTEND(Q, K, K, bias=torch.zeros(5, 7).to_sparse()),
        "bias must be a float.*bool.*mask=": lambda: ATTEND(Q, K, K, bias=ones(5, 7)),
    },
) | rows(
    ValueError,
    {
        r"attention: q must be \(B, H, Lq, D\), got shape \[2, 5, 8\]": lambda: ATTEND(Q[:, 0], K, K),
        "attention: k must be on cpu, got meta": lambda: ATTEND(Q, K.to("meta"), K),
        r"k must be of the batch size of q, 2, got shape \[3, 4, 5, 8\]": lambda: ATTEND(Q, heads(B=3), heads(B=3)),
        r"k must be of the head_dim of q, 8, got shape \[2, 4, 5, 6\]": lambda: ATTEND(Q, K6, K6),
        "head_dim of at least 1": lambda: ATTEND(heads(D=0), heads(D=0), K),
        r"v must be of shape \[2, 4, 7, 8\], got shape \[2, 4, 6, 8\]": lambda: ATTEND(Q, K, heads(6)),
        "multiple of those of k and v": lambda: ATTEND(Q, K3, K3),
        r"dropout_p.*\[0, 1\], got 1.5": lambda: ATTEND(Q, K, K, dropout_p=1.5),
        r"dropout_p.*\[0, 1\], got -0.1": lambda: ATTEND(Q, K, K, dropout_p=-0.1),
        '"uniform" or "zero", got \'nan\'': lambda: ATTEND(Q, K, K, empty_rows="nan"),
        "\"dropped\", got 'all'": lambda: ATTEND(Q, K, K, return_weights="all"),
        r"bias must be broadcastable to \[2, 4, 5, 7\], got shape \[1, 1, 5, 6\], or \(5, 6\) without": lambda: ATTEND(
            Q, K, K, bias=torch.zeros(1, 1, 5, 6)
        ),
        r"\[0, Lk = 7\], got 3 to 8": lambda: ATTEND(Q, K, K, MASK.lengths(torch.tensor([3, 8]))),
        r"\[0, Lk = 7\], got -1 to 2": lambda: ATTEND(Q, K, K, MASK.lengths(torch.tensor([-1, 2]))),
        r"lengths must be broadcastable to \[2\], got shape \[3\]": lambda: ATTEND(
            Q, K, K, MASK.lengths(torch.tensor([1, 2, 3]))
        ),
        "attention: mask must be on cpu, got meta": lambda: ATTEND(Q, K, K, ones(7, device="meta")),
    },
)

MASKS = rows(
    TypeError,
    {
        "two ways.*bias=.*blocked.*bool": lambda: ATTEND(Q, K, K, torch.ones(5, 7)),
        "keep mask: expected a dense.*to_dense": lambda: ATTEND(Q, K, K, ones(5, 7).to_sparse()),
        "blocked mask: expected a dense": lambda: MASK.blocked(torch.ones(5, 7).to_sparse()),
        "lengths: expected a dense": lambda: MASK.lengths(torch.ones(2).long().to_sparse()),
        "prefix: lengths must be an integer tensor": lambda: MASK.prefix(torch.ones(2)),
        "prefix offset: expected an int": lambda: MASK.prefix(torch.ones(2).long(), 1.5),
        "query_ids: expected a dense": lambda: MASK.documents(torch.ones(2, 5).long().to_sparse()),
        "keep mask: expected a dense tensor, got a nested tensor": lambda: MASK.keep(
            torch.nested.nested_tensor([ones(3), ones(5)])
        ),
        "a tensor or an AttentionMask, got list": lambda: ATTEND(Q, K, K, [[True]]),
        "integer tensor.*torch.float32": lambda: MASK.lengths(torch.ones(2)),
        "expected an int, got float": lambda: MASK.causal(1.5),
    },
) | rows(
    ValueError,
    {
        r"mask must be .*\[1, 1, 2, 7\], or \(2, 7\) without.*given as \(B, 1, 1, Lk\)": lambda: ATTEND(
            Q, K, K, ones(2, 7)
        ),
        rf"first dimension of \(2, 5, 7\) {READ}": lambda: ATTEND(Q, K, K, ones(2, 5, 7)),
        rf"first dimension of \(4, 5, 5\) {READ}": lambda: ATTEND(*[heads(B=4)] * 3, ones(4, 5, 5)),
        rf"first dimension of \(4, 5, 7\) {READ}": lambda: MASK.keep(torch.ones(4, 5, 7).long()),
        rf"first dimension of \(3, 5, 7\) {READ}": lambda: MASK.blocked(torch.ones(3, 5, 7)),
        r"lengths \(2, 5\) of nothing but 0 and 1.*AttentionMask.keep\(t\[:, None, None\]\)": lambda: ATTEND(
            Q, Q, Q, MASK.lengths(torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))
        ),
        "1 to 4 dimensions": lambda: MASK.keep(ones(1, 1, 1, 5, 7)),
        r"\(B,\) or \(B, Lq\), got shape \(2, 1, 1\)": lambda: MASK.lengths(torch.ones(2, 1, 1).long()),
    },
)

X, V = torch.zeros(2, 8), torch.zeros(8)
NORM, META = tfast.layer_norm, torch.device("meta")

NORM_AND_DROPOUT = rows(
    TypeError,
    {
        "layer_norm: x must be a tensor, got list": lambda: NORM([1.0], V, V),
        "layer_norm: x must be a float tensor, got torch.int64": lambda: NORM(X.long(), V, V),
        "dropout: x must be a tensor, got float": lambda: dropout(1.0, 0.1),
        "dropout: x must be a float tensor, got torch.int64": lambda: dropout(X.long(), 0.1),
        "residual must be a float tensor": lambda: dropout(X, 0.1, residual=X.bool()),
        "bias must be a float tensor": lambda: dropout(X, 0.1, bias=V.long()),
    },
) | rows(
    ValueError,
    {
        r"layer_norm: x must be \(\.\.\., d\)": lambda: NORM(torch.tensor(1.0), None, None),
        r"d of at least 1 for kind \"layer\", got shape \[2, 0\]": lambda: NORM(X[:, :0], None, None),
        'kind must be "layer", "std" or "rms", got "batch"': lambda: NORM(X, V, V, kind="batch"),
        r'bias must be None for kind "rms", got shape \[8\]': lambda: NORM(X, V, V, kind="rms"),
        r'd of at least 2 for kind "std", got shape \[2, 1\]': lambda: NORM(X[:, :1], None, None, kind="std"),
        r"layer_norm: weight must be of shape \[8\], got shape \[7\]": lambda: NORM(X, V[:7], V),
        r"layer_norm: bias must be of shape \[8\], got shape \[1, 8\]": lambda: NORM(X, V, V[None]),
        r"layer_norm: residual must be of shape \[2, 8\], got shape \[1, 8\]": lambda: NORM(X, V, V, residual=X[:1]),
        r"dropout_p must lie in \[0, 1\], got 1.5": lambda: NORM(X, V, V, residual=X, dropout_p=1.5),
        "residual must be a tensor with dropout.* dropout_p is 0.1": lambda: NORM(X, V, V, dropout_p=0.1),
        "layer_norm: weight must be on cpu, got meta": lambda: NORM(X, V.to(META), V),
        "d_model of at least 2, got 1": lambda: layers.Norm(1),
        r"dropout: x must be \(\.\.\., d\)": lambda: dropout(torch.tensor(1.0), 0.1),
        r"p must lie in \[0, 1\], got 2": lambda: dropout(X, 2.0),
        r"p must lie in \[0, 1\], got -0.1": lambda: dropout(X, -0.1),
        r"p must lie in \[0, 1\], got nan": lambda: dropout(X, float("nan")),
        r"dropout: residual must be of shape \[2, 8\], got shape \[2, 7\]": lambda: dropout(X, 0.1, residual=X[:, :7]),
        r"dropout: bias must be of shape \[8\], got shape \[7\]": lambda: dropout(X, 0.1, bias=V[:7]),
        "dropout: bias must be on cpu, got meta": lambda: dropout(X, 0.1, bias=V.to(META)),
        "dropout: residual must be on cpu, got meta": lambda: dropout(X, 0.1, residual=X.to(META)),
    },
)

ROWS, IDS, W = torch.randn(2, 5, 8), torch.randint(0, 11, (2, 5)), torch.randn(11, 8)
LOSS = tfast.linear_cross_entropy

LOSSES = rows(
    TypeError,
    {
        "target must be a tensor of torch.int64, got torch.int32": lambda: LOSS(ROWS, W, None, IDS.int()),
        "weight must be a tensor of torch.float32, got torch.float64": lambda: LOSS(ROWS, W.double(), None, IDS),
        "class_weight must have the dtype of x, torch.float32, got torch.float64": lambda: LOSS(
            ROWS, W, None, IDS, class_weight=W[:, 0].double()
        ),
        "a float dtype, got torch.int64": lambda: LOSS(ROWS, W, None, IDS, dtype=torch.int64),
    },
) | rows(
    ValueError,
    {
        r"target must be of shape \[2, 5\], got shape \[2, 4\]": lambda: LOSS(ROWS, W, None, IDS[:, :4]),
        "\"sum\", got 'max'": lambda: LOSS(ROWS, W, None, IDS, reduction="max"),
        r"target, as probabilities, must be of shape \(2, 5, 11\), got \(2, 5, 8\)": lambda: LOSS(ROWS, W, None, ROWS),
        "got 0": lambda: LOSS(ROWS, W, None, torch.rand(2, 5, 11), ignore_index=0),
        r"class_weight must be of shape \(11,\), got \(8,\)": lambda: LOSS(ROWS, W, None, IDS, class_weight=ROWS[0, 0]),
        r"expected class_weight.detach\(\)": lambda: LOSS(
            ROWS, W, None, IDS, class_weight=torch.ones(11, requires_grad=True)
        ),
        r"weight must be \(vocabulary, d\), got shape \[1, 11, 8\]": lambda: LOSS(ROWS, W[None], None, IDS),
        r"label_smoothing must lie in \[0, 1\], got 2": lambda: LOSS(ROWS, W, None, IDS, label_smoothing=2.0),
    },
)

WORDS, T, E = torch.zeros(2, 3, dtype=torch.long), torch.zeros(5, 6), torch.zeros(4, 6)  # ids, positions, weight
Y, NATIVE = torch.zeros(2, 3, 6), torch.ops.transformer_fast

EMBEDDING = (
    rows(
        TypeError,
        {
            "ids must be a tensor, got list": lambda: embed([1, 2], E),
            "ids must be a tensor of torch.int32 or torch.int64, got torch.float32": lambda: embed(WORDS.float(), E),
            "ids must be a tensor of torch.int32 or torch.int64, got torch.int16": lambda: embed(WORDS.short(), E),
            "weight must be a float tensor": lambda: embed(WORDS, E.long()),
            "table must be a tensor of torch.float32, got torch.float16": lambda: embed(WORDS, E, T.half()),
            "table must be a tensor, got list": lambda: embed(WORDS, E, [1]),
            "offsets must be a tensor of torch.int32 or torch.int64, got torch.float32": lambda: embed(
                WORDS, E, T, offset=torch.zeros(2)
            ),
            "x must be a float tensor": lambda: add_positional(WORDS, T),
            "x must be a tensor, got list": lambda: add_positional([1.0], T),
        },
    )
    | rows(
        ValueError,
        {
            r"weight must be \(vocabulary, d\).*\[1, 4, 6\]": lambda: embed(WORDS, E[None]),
            r"weight.*\[6\]": lambda: embed(WORDS, E[0]),
            "ids must be on meta, got cpu": lambda: embed(WORDS, E.to(META)),
            "table must be on cpu, got meta": lambda: embed(WORDS, E, T.to(META)),
            r"embed: table must be of shape \[5, 6\], got shape \[5, 5\]": lambda: embed(WORDS, E, T[:, :5]),
            r"table must be \(positions, d\), got shape \[1, 5, 6\]": lambda: embed(WORDS, E, T[None]),
            r"embed: table must be of at least 3 \+ 3 positions, got shape \[5, 6\]": lambda: embed(
                WORDS, E, T, offset=3
            ),
            "offset must be at least 0, got -1": lambda: embed(WORDS, E, T, offset=-1),
            r"embed: offsets must be of shape \[2\], got shape \[3\]": lambda: embed(
                WORDS, E, T, offset=torch.zeros(3, dtype=torch.long)
            ),
            "offsets must be on cpu, got meta": lambda: embed(WORDS, E, T, offset=WORDS[:, 0].to(META)),
            r"embed: dropout_p must lie in \[0, 1\], got 1.5": lambda: embed(WORDS, E, dropout_p=1.5),
            "dropout_p must lie in .* got nan": lambda: embed(WORDS, E, dropout_p=float("nan")),
            r"padding_idx must lie in \[0, 4\).*got 4": lambda: embed(WORDS, E, padding_idx=4),
            r"x must be \(..., length, d\)": lambda: add_positional(Y[0, 0], T),
            r"add_positional: table must be of shape \[5, 6\], got shape \[5, 5\]": lambda: add_positional(Y, T[:, :5]),
            r"add_positional: table must be of at least 4 \+ 3 positions, got shape \[5, 6\]": lambda: add_positional(
                Y, T, 4
            ),
            "add_positional: dropout_p must lie": lambda: add_positional(Y, T, 0, -0.1),
            "length >= 0": lambda: positional_table(-1, 4),
            "d_model >= 1": lambda: positional_table(4, 0),
            'layout must be "interleaved" or "halves", got \'sines\'': lambda: positional_table(3, 4, layout="sines"),
            r"embed: table must be of at least 0 \+ 3 positions, got shape \[2, 6\]": lambda: NATIVE.embed(
                WORDS, E, T[:2], 1.0, 0, None, None, 0.0, None, True
            ),
            # A kernel reads the offsets with or without a table.
            r"embed: offsets must be of shape \[2\], got shape \[1, 1\]": lambda: NATIVE.embed(
                WORDS, E, None, 1.0, 0, WORDS[:1, :1], None, 0.0, None, True
            ),
            "add_positional: seed must be a tensor with dropout, got None": lambda: NATIVE.add_positional(
                Y, None, 0, None, 0.5, None
            ),
            r"embed_backward: ids must be of shape \[1, 3\]": lambda: NATIVE.embed_backward(
                Y[:1], WORDS, 4, 1.0, None, 0.0, None, True
            ),
        },
    )
    | rows(
        IndexError,
        {
            "offset 3 of sequence 1: positions 3 to 5 are not all in the table of 5": lambda: embed(
                WORDS, E, T, offset=torch.tensor([2, 3])
            ),
            "offset -1 of sequence 0": lambda: add_positional(Y, T, torch.tensor([-1, 0])),
            r"ids\[1, 2\] is 4.*0 <= id < 4": lambda: embed(torch.tensor([[0, 1, 2], [3, 0, 4]]), E),
            "0 <= id < 11": lambda: model()(IDS + 11, IDS, None, None),
        },
    )
)

MODELS = rows(
    ValueError,
    {
        r"\(2, 5\); give.*unsqueeze\(1\)": lambda: layers.EncoderLayer(8, 2)(ROWS, ones(2, 5)),
        r"mask must be broadcastable to \[2, 2, 1, 5\], got shape \[2, 1, 1, 6\]": lambda: layers.EncoderLayer(8, 2)(
            ROWS, ones(2, 1, 6)
        ),
        "\"rms\", got 'l2'": lambda: layers.EncoderLayer(8, 2, norm="l2"),
        "d_model=8, heads=3": lambda: layers.MultiHeadAttention(3, 8),
        "heads=0": lambda: layers.EncoderLayer(8, 0),
        "one vocabulary, got 11 and 12": lambda: tfast.Transformer(11, 12, 8, 1, 2, 0.1, tie_weights=True),
        "'all'": lambda: tfast.Transformer(11, 11, 8, 1, 2, 0.1, tie_weights="all"),
        "one of auto, native.*'cuda'": lambda: tfast.backend("cuda").__enter__(),
        "bos.*11": lambda: tfast.greedy(model(), IDS, bos=11, eos=2),
        "src.*float": lambda: tfast.greedy(model(), ROWS[0], bos=1, eos=2),
        "beam.*>= 1, got 0": lambda: tfast.beam_search(model(), IDS, bos=1, eos=2, beam=0),
        "n_best is 3.*beam of 2": lambda: tfast.beam_search(model(), IDS, bos=1, eos=2, beam=2, n_best=3),
    },
) | {
    "two ways": (lambda: layers.EncoderLayer(8, 2)(ROWS, torch.ones(2, 1, 5)), TypeError, "two ways"),
    "no layer": (lambda: layers.Attention, AttributeError, "no attribute 'Attention'"),
    "triton on a CPU": (lambda: triton_on_cpu(), tfast.BackendError, "triton.*cpu.*TRITON_INTERPRET=1"),
}

WRONG = [*(ATTENTION | MASKS).values(), *NORM_AND_DROPOUT.values(), *LOSSES.values()]
WRONG += [*EMBEDDING.values(), *MODELS.values()]


def triton_on_cpu() -> None:
    with tfast.backend("triton"):
        ATTEND(Q, K, K)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("call", "error", "says"), WRONG, ids=[row[2] for row in WRONG])
def test_one_clear_error(call, error, says, backend, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if backend == "reference" and error is IndexError:
        says = ""  # torch's own
    with tfast.backend(backend), pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(("call", "error", "says"), WRONG, ids=[row[2] for row in WRONG])
def test_one_clear_error_without_a_door(call, error, says):
    """The op checks a call of the dispatcher too; the dispatcher refuses other types of arguments by itself."""
    with by_dispatcher(), pytest.raises((error, RuntimeError), match=f"{says}|for argument|expected a tensor"):
        call()


NUMBERS = {
    "kind must be a string": lambda: tfast.layer_norm(ROWS, None, None, kind=1),
    "must be an int, got .*1.9": lambda: tfast.embed(IDS, W, torch.ones(20, 8), offset=np.float32(1.9)),
    "must be an int, got 1.0": lambda: tfast.embed(IDS, W, torch.ones(20, 8), offset=1.0),
    "padding_idx must be an int": lambda: tfast.embed(IDS, W, padding_idx=torch.tensor(1.7)),
    "ignore_index must be an int": lambda: tfast.linear_cross_entropy(ROWS, W, None, IDS, ignore_index=1.0),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("says", NUMBERS)
def test_a_number_of_another_kind(says: str, backend: str) -> None:
    """An int is not made of a fraction, and no number is a name."""
    with tfast.backend(backend), pytest.raises(TypeError, match=says):
        NUMBERS[says]()
