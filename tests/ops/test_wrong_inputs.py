"""Wrong inputs, one row each: every one gives one clear error that names what was wrong and what was expected."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.ops import add_positional, dropout
from transformer_fast.translation.config import TrainConfig, parse_duration
from transformer_fast.translation.errors import TranslationError
from transformer_fast.translation.model import load_trained
from transformer_fast.translation.progress import Silent
from transformer_fast.translation.text import read_lines, read_parallel
from transformer_fast.translation.training import train


class Wrong(NamedTuple):
    """What is called, the error it must raise, and words the message must hold, in this order."""

    call: Callable[[], object]
    error: type[Exception]
    says: str


def heads(L: int = 5, *, B: int = 2, H: int = 4, D: int = 8, **options) -> torch.Tensor:
    return torch.randn(B, H, L, D, **options)


Q, K = heads(), heads(7)
X = torch.randn(2, 5, 8)
IDS = torch.randint(0, 11, (2, 5))
W = torch.randn(11, 8)
TABLE = tfast.positional_table(10, 8)
ATTEND = tfast.attention
STARTS = torch.tensor([0, 2, 4], dtype=torch.int32)
TWO_READINGS = r"first dimension of.*two ways: pass t\[:, None\] if it is the batch, t\[None\] if it is the heads"


def model() -> tfast.Transformer:
    return tfast.Transformer(11, 11, 8, 1, 2, 0.1)


ATTENTION = {
    "q is not a tensor": Wrong(lambda: ATTEND([1.0], K, K), TypeError, "q must be a tensor, got list"),
    "q has three dimensions": Wrong(lambda: ATTEND(X, K, K), ValueError, r"q must be \(batch, heads.*\(2, 5, 8\)"),
    "q is integer": Wrong(lambda: ATTEND(Q.long(), K, K), TypeError, r"q must be a float tensor, got torch.int64"),
    "dtypes differ": Wrong(lambda: ATTEND(Q, K.half(), K), TypeError, "share a dtype.*float32.*float16"),
    "devices differ": Wrong(lambda: ATTEND(Q, K.to("meta"), K), ValueError, "one device, got cpu, meta, cpu"),
    "batches differ": Wrong(lambda: ATTEND(Q, heads(B=3), heads(B=3)), ValueError, r"batch size.*\(2, 4.*\(3, 4"),
    "head_dims differ": Wrong(lambda: ATTEND(Q, heads(D=6), heads(D=6)), ValueError, r"head_dim.*5, 8\).*5, 6\)"),
    "head_dim 0": Wrong(lambda: ATTEND(heads(D=0), heads(D=0), K), ValueError, "head_dim of at least 1"),
    "lengths of k and v differ": Wrong(lambda: ATTEND(Q, K, heads(6)), ValueError, r"k and v.*7, 8\).*6, 8\)"),
    "heads do not divide": Wrong(lambda: ATTEND(Q, heads(H=3), heads(H=3)), ValueError, "multiple of those of k and v"),
    "dropout above 1": Wrong(lambda: ATTEND(Q, K, K, dropout_p=1.5), ValueError, r"dropout_p.*\[0, 1\], got 1.5"),
    "dropout is negative": Wrong(lambda: ATTEND(Q, K, K, dropout_p=-0.1), ValueError, r"dropout_p.*\[0, 1\], got -0.1"),
    "unknown empty_rows": Wrong(
        lambda: ATTEND(Q, K, K, empty_rows="nan"), ValueError, '"uniform" or "zero", got \'nan\''
    ),
    "scale is a bool": Wrong(lambda: ATTEND(Q, K, K, scale=True), TypeError, "scale must be a number, got True"),
    "scale is a text": Wrong(lambda: ATTEND(Q, K, K, scale="0.1"), TypeError, "scale must be a number, got '0.1'"),
    "softcap is a bool": Wrong(lambda: ATTEND(Q, K, K, softcap=True), TypeError, "softcap must be a number, got True"),
    "softcap is a text": Wrong(lambda: ATTEND(Q, K, K, softcap="5"), TypeError, "softcap must be a number, got '5'"),
    "dropout is None": Wrong(
        lambda: ATTEND(Q, K, K, dropout_p=None), TypeError, "dropout_p must be a number, got None"
    ),
    "dropout is True": Wrong(
        lambda: ATTEND(Q, K, K, dropout_p=True), TypeError, "dropout_p must be a number, got True"
    ),
    "dropout of packed is None": Wrong(
        lambda: tfast.attention_packed(Q[0], Q[0], Q[0], STARTS, STARTS, dropout_p=None),
        TypeError,
        "attention_packed: dropout_p must be a number, got None",
    ),
    "scale of packed is a bool": Wrong(
        lambda: tfast.attention_packed(Q[0], Q[0], Q[0], STARTS, STARTS, scale=True),
        TypeError,
        "attention_packed: scale must be a number, got True",
    ),
    "scale of decode is a text": Wrong(
        lambda: tfast.attention_decode(Q, Q, Q, torch.tensor([5, 5]), scale="0.1"),
        TypeError,
        "attention_decode: scale must be a number, got '0.1'",
    ),
    "the mask comes first": Wrong(
        lambda: ATTEND(AttentionMask.causal(), Q, Q, Q),
        TypeError,
        r"q must be a tensor, got AttentionMask; the order is attention\(q, k, v, mask\)",
    ),
    "q is sparse": Wrong(lambda: ATTEND(Q.to_sparse(), K, K), TypeError, "q: expected a dense tensor.*sparse_coo"),
    "bias is sparse": Wrong(
        lambda: ATTEND(Q, K, K, bias=torch.zeros(5, 7).to_sparse()), TypeError, "bias: expected a dense.*to_dense"
    ),
    "unknown return_weights": Wrong(
        lambda: ATTEND(Q, K, K, return_weights="all"), ValueError, "\"dropped\", got 'all'"
    ),
    "bias is a bool mask": Wrong(
        lambda: ATTEND(Q, K, K, bias=torch.ones(5, 7).bool()), TypeError, "bias must be a float.*bool.*mask="
    ),
    "bias does not broadcast": Wrong(
        lambda: ATTEND(Q, K, K, bias=torch.zeros(1, 1, 5, 6)), ValueError, r"bias.*\(1, 1, 5, 6\).*\(2, 4, 5, 7\)$"
    ),
    "lengths beyond Lk": Wrong(
        lambda: ATTEND(Q, K, K, AttentionMask.lengths(torch.tensor([3, 8]))), ValueError, r"\[0, Lk = 7\], got 3 to 8"
    ),
    "lengths are negative": Wrong(
        lambda: ATTEND(Q, K, K, AttentionMask.lengths(torch.tensor([-1, 2]))), ValueError, r"\[0, Lk = 7\], got -1 to 2"
    ),
    "lengths of another batch": Wrong(
        lambda: ATTEND(Q, K, K, AttentionMask.lengths(torch.tensor([1, 2, 3]))),
        ValueError,
        r"\(3,\) fit neither.*\(2, 5\)",
    ),
    "mask on another device": Wrong(
        lambda: ATTEND(Q, K, K, torch.ones(7, device="meta").bool()), ValueError, "q is on cpu but the mask.*meta"
    ),
    "triton on CPU tensors": Wrong(lambda: triton_on_cpu(), tfast.BackendError, "triton.*cpu.*TRITON_INTERPRET=1"),
}

MASKS = {
    "float keep mask": Wrong(lambda: ATTEND(Q, K, K, torch.ones(5, 7)), TypeError, "two ways.*bias=.*blocked.*bool"),
    "a (B, Lk) padding mask": Wrong(
        lambda: ATTEND(Q, K, K, torch.ones(2, 7).bool()), ValueError, r"\(1, 1, 2, 7\).*given as \(B, 1, 1, Lk\)"
    ),
    "a (B, Lq, Lk) mask": Wrong(lambda: ATTEND(Q, K, K, torch.ones(2, 5, 7).bool()), ValueError, TWO_READINGS),
    "a (B, Lq, Lk) mask where B is H": Wrong(
        lambda: ATTEND(*[heads(B=4)] * 3, torch.ones(4, 5, 5).bool()), ValueError, TWO_READINGS
    ),
    "an integer (H, Lq, Lk) mask": Wrong(
        lambda: AttentionMask.keep(torch.ones(4, 5, 7).long()), ValueError, TWO_READINGS
    ),
    "a blocked (B, Lq, Lk) mask": Wrong(lambda: AttentionMask.blocked(torch.ones(2, 5, 7)), ValueError, TWO_READINGS),
    "a padding mask for lengths": Wrong(
        lambda: ATTEND(Q, Q, Q, AttentionMask.lengths(torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))),
        ValueError,
        r"lengths \(2, 5\) of nothing but 0 and 1.*AttentionMask.keep\(t\[:, None, None\]\)",
    ),
    "sparse keep mask": Wrong(
        lambda: ATTEND(Q, K, K, torch.ones(5, 7).bool().to_sparse()), TypeError, "keep mask: expected a dense.*to_dense"
    ),
    "sparse blocked mask": Wrong(
        lambda: AttentionMask.blocked(torch.ones(5, 7).to_sparse()), TypeError, "blocked mask: expected a dense"
    ),
    "sparse lengths": Wrong(
        lambda: AttentionMask.lengths(torch.ones(2).long().to_sparse()), TypeError, "lengths: expected a dense"
    ),
    "sparse documents": Wrong(
        lambda: AttentionMask.documents(torch.ones(2, 5).long().to_sparse()), TypeError, "query_ids: expected a dense"
    ),
    "nested mask": Wrong(
        lambda: AttentionMask.keep(torch.nested.nested_tensor([torch.ones(3).bool(), torch.ones(5).bool()])),
        TypeError,
        "keep mask: expected a dense tensor, got a nested tensor",
    ),
    "five dimensions": Wrong(
        lambda: AttentionMask.keep(torch.ones(1, 1, 1, 5, 7).bool()), ValueError, "1 to 4 dimensions"
    ),
    "a list for a mask": Wrong(lambda: ATTEND(Q, K, K, [[True]]), TypeError, "a tensor or an AttentionMask, got list"),
    "float lengths": Wrong(lambda: AttentionMask.lengths(torch.ones(2)), TypeError, "integer tensor.*torch.float32"),
    "lengths of three dimensions": Wrong(
        lambda: AttentionMask.lengths(torch.ones(2, 1, 1).long()), ValueError, r"\(B,\) or \(B, Lq\), got \(2, 1, 1\)"
    ),
    "causal offset is a float": Wrong(lambda: AttentionMask.causal(1.5), TypeError, "expected an int, got float"),
    "layer mask (B, L)": Wrong(
        lambda: layers.EncoderLayer(8, 2)(X, torch.ones(2, 5).bool()), ValueError, r"\(2, 5\); give.*unsqueeze\(1\)"
    ),
    "layer mask is float": Wrong(lambda: layers.EncoderLayer(8, 2)(X, torch.ones(2, 1, 5)), TypeError, "two ways"),
    "layer mask of another length": Wrong(
        lambda: layers.EncoderLayer(8, 2)(X, torch.ones(2, 1, 6).bool()), ValueError, r"\(2, 1, 1, 6\).*\(2, 2, 5, 5\)"
    ),
}

NORM_AND_DROPOUT = {
    "unknown norm kind": Wrong(lambda: tfast.layer_norm(X, None, None, kind="l2"), ValueError, "\"rms\", got 'l2'"),
    "weight of another width": Wrong(
        lambda: tfast.layer_norm(X, W[0, :6], None), ValueError, r"\(8,\).*\(2, 5, 8\).*\(6,\)"
    ),
    "std of one number": Wrong(lambda: tfast.layer_norm(X[..., :1], None, None, kind="std"), ValueError, "at least 2"),
    "norm of integers": Wrong(lambda: tfast.layer_norm(IDS, None, None), TypeError, "x must be a float tensor"),
    "residual of another shape": Wrong(
        lambda: tfast.layer_norm(X, None, None, residual=X[:1]), ValueError, r"residual \(1, 5, 8\) and x \(2, 5, 8\)"
    ),
    "dropout without residual": Wrong(lambda: tfast.layer_norm(X, None, None, dropout_p=0.1), ValueError, "residual"),
    "Norm of width 1": Wrong(lambda: layers.Norm(1), ValueError, "d_model of at least 2, got 1"),
    "dropout p of 2": Wrong(lambda: dropout(X, 2.0), ValueError, r"\[0, 1\].*2.0"),
    "unknown norm of a layer": Wrong(lambda: layers.EncoderLayer(8, 2, norm="l2"), ValueError, "\"rms\", got 'l2'"),
}

LOSS = {
    "target past the vocabulary": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, torch.full((2, 5), 11)),
        IndexError,
        "target 0 of 10 is 11.*0 <= target < 11",
    ),
    "target of another shape": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, IDS[:, :4]), ValueError, r"\(2, 5\) for x \(2, 5, 8\).*\(2, 4\)"
    ),
    "int32 targets": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, IDS.int()), TypeError, "int64, or float for .*, got torch.int32"
    ),
    "weight of another dtype": Wrong(
        lambda: tfast.linear_cross_entropy(X, W.double(), None, IDS), TypeError, "weight must have the dtype of x"
    ),
    "unknown reduction": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, IDS, reduction="max"), ValueError, "\"sum\", got 'max'"
    ),
    "probabilities of another shape": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, X), ValueError, r"probabilities, must be \(2, 5, 11\)"
    ),
    "probabilities and an index to ignore": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, torch.rand(2, 5, 11), ignore_index=0), ValueError, "got 0"
    ),
    "class weights of another shape": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, IDS, class_weight=X[0, 0]),
        ValueError,
        r"class_weight must be \(vocabulary,\) = \(11,\), got \(8,\)",
    ),
    "class weights of another dtype": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, IDS, class_weight=W[:, 0].double()),
        TypeError,
        "class_weight must have the dtype of x, torch.float32, got torch.float64",
    ),
    "class weights to learn": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, IDS, class_weight=torch.ones(11, requires_grad=True)),
        ValueError,
        r"expected class_weight.detach\(\)",
    ),
    "weights of more dimensions": Wrong(
        lambda: tfast.linear_cross_entropy(X, W[None], None, IDS), ValueError, r"weight \(vocabulary, d\).*\(1, 11, 8\)"
    ),
    "an integer result": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, IDS, dtype=torch.int64),
        TypeError,
        "a float dtype, got torch.int64",
    ),
    "smoothing above 1": Wrong(
        lambda: tfast.linear_cross_entropy(X, W, None, IDS, label_smoothing=2.0), ValueError, r"\[0, 1\], got 2.0"
    ),
}

EMBEDDING = {
    "id past the vocabulary": Wrong(
        lambda: tfast.embed(torch.tensor([[1, 11]]), W), IndexError, r"ids\[0, 1\] is 11.*0 <= id < 11"
    ),
    "negative id": Wrong(lambda: tfast.embed(torch.tensor([[-1, 1]]), W), IndexError, r"-1"),
    "float ids": Wrong(lambda: tfast.embed(X[0], W), TypeError, "ids.*float32"),
    "table too short": Wrong(lambda: tfast.embed(IDS, W, TABLE, offset=6), ValueError, "11.*10|10.*11"),
    "table of another width": Wrong(lambda: tfast.embed(IDS, W, TABLE[:, :6]), ValueError, "6"),
    "negative offset": Wrong(lambda: tfast.embed(IDS, W, TABLE, offset=-1), ValueError, "offset.*-1"),
    "padding_idx past the vocabulary": Wrong(
        lambda: tfast.embed(IDS, W, padding_idx=11), ValueError, "padding_idx.*11"
    ),
    "weight of one dimension": Wrong(lambda: tfast.embed(IDS, W[0]), ValueError, r"weight.*\(8,\)"),
    "positions for another width": Wrong(lambda: add_positional(X, TABLE[:, :6]), ValueError, "6"),
    "table of no width": Wrong(lambda: tfast.positional_table(4, 0), ValueError, "d_model.*0"),
    "id in a model": Wrong(lambda: model()(IDS + 11, IDS, None, None), IndexError, "11"),
}

MODELS = {
    "heads do not divide d_model": Wrong(lambda: layers.MultiHeadAttention(3, 8), ValueError, "d_model=8, heads=3"),
    "no heads": Wrong(lambda: layers.EncoderLayer(8, 0), ValueError, "heads=0"),
    "tied vocabularies differ": Wrong(
        lambda: tfast.Transformer(11, 12, 8, 1, 2, 0.1, tie_weights=True), ValueError, "one vocabulary, got 11 and 12"
    ),
    "unknown tying": Wrong(lambda: tfast.Transformer(11, 11, 8, 1, 2, 0.1, tie_weights="all"), ValueError, "'all'"),
    "unknown backend": Wrong(lambda: tfast.backend("cuda").__enter__(), ValueError, "one of auto, native.*'cuda'"),
    "no such layer": Wrong(lambda: layers.Attention, AttributeError, "no attribute 'Attention'"),
    "greedy from a BOS it lacks": Wrong(lambda: tfast.greedy(model(), IDS, bos=11, eos=2), ValueError, "bos.*11"),
    "greedy of floats": Wrong(lambda: tfast.greedy(model(), X[0], bos=1, eos=2), (TypeError, ValueError), "src.*float"),
    "beam of 0": Wrong(lambda: tfast.beam_search(model(), IDS, bos=1, eos=2, beam=0), ValueError, "beam.*>= 1, got 0"),
    "more answers than beams": Wrong(
        lambda: tfast.beam_search(model(), IDS, bos=1, eos=2, beam=2, n_best=3), ValueError, "n_best is 3.*beam of 2"
    ),
}

WRONG = ATTENTION | MASKS | NORM_AND_DROPOUT | LOSS | EMBEDDING | MODELS


def triton_on_cpu() -> None:
    with tfast.backend("triton"):
        ATTEND(Q, K, K)


@pytest.mark.parametrize("name", WRONG)
def test_tensors(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    wrong = WRONG[name]
    with pytest.raises(wrong.error, match=wrong.says):
        wrong.call()


def file(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def settings(folder: Path, **changes) -> TrainConfig:
    text = "".join(f"line {n} of some words\n" for n in range(40)).encode()
    values = {
        "source": str(file(folder, "train.src", text)),
        "target": str(file(folder, "train.trg", text)),
        "save": str(folder / "run"),
        "d_model": 16,
        "heads": 2,
        "layers": 1,
        "d_ff": 16,
        "vocab_size": 40,
        "max_steps": 1,
        "device": "cpu",
    }
    return TrainConfig(**(values | changes))


def train_quietly(config: TrainConfig) -> None:
    train(config, progress=Silent())


def with_broken_weights(folder: Path) -> None:
    """Train, cut every weight file of the run in half, and load."""
    train_quietly(settings(folder))
    for path in (folder / "run").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    load_trained(folder / "run")


def with_a_foreign_config(folder: Path) -> None:
    """Train, replace every json of the run by somebody else's, and load."""
    train_quietly(settings(folder))
    for path in (folder / "run").rglob("*.json"):
        path.write_text(json.dumps({"architectures": ["SomethingElse"]}))
    load_trained(folder / "run")


def resumed_with(folder: Path, **changes) -> None:
    train_quietly(settings(folder))
    train_quietly(settings(folder, **changes))


def into_a_file(folder: Path) -> None:
    train_quietly(settings(folder, save=str(file(folder, "occupied", b"not a folder"))))


FILES = {
    "missing file": (lambda f: read_lines(f / "nowhere.txt"), "nowhere.txt does not exist"),
    "a folder for a file": (lambda f: read_lines(f), "is a folder"),
    "empty file": (lambda f: read_lines(file(f, "a", b"")), "a is empty; expected one sentence a line"),
    "blank file": (lambda f: read_lines(file(f, "a", b"\n\n")), "a is empty"),
    "invalid UTF-8": (lambda f: read_lines(file(f, "a", b"fine\nna\xefve\n")), "line 2: not valid UTF-8"),
    "broken gzip": (lambda f: read_lines(file(f, "a.gz", gzip.compress(b"x" * 99)[:20])), "damaged or truncated gzip"),
    "gz that is none": (lambda f: read_lines(file(f, "a.gz", b"plain\n")), "not a gzip file"),
    "unequal line counts": (
        lambda f: read_parallel(file(f, "a", b"1\n2\n3\n"), file(f, "b", b"1\n2\n")),
        "has 3 lines.*has 2",
    ),
    "duration": (lambda f: parse_duration("soon"), "'soon' as a duration; expected.*20m"),
    "heads of a run": (lambda f: settings(f, heads=3), "d_model is 16; expected a multiple of heads"),
    "validation half given": (lambda f: settings(f, valid_source="x"), "valid_target is missing"),
    "dropout of a run": (lambda f: settings(f, dropout=1.0), "dropout is 1.0; expected a probability"),
    "no model in the folder": (lambda f: load_trained(f / "run"), "run"),
    "cut weights": (with_broken_weights, "safetensors|checkpoint"),
    "a foreign config": (with_a_foreign_config, "json|config|checkpoint"),
    "resume with another size": (lambda f: resumed_with(f, d_ff=32), "d_ff is 32, the run has 16"),
    "a file where the run should be": (into_a_file, "occupied"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_and_runs(name, tmp_path):
    call, says = FILES[name]
    with pytest.raises(TranslationError, match=f"(?s){says}"):
        call(tmp_path)


def test_there_are_sixty_of_them():
    assert len(WRONG) + len(FILES) >= 60


def test_a_failed_run_leaves_the_last_checkpoint_intact(tmp_path):
    train_quietly(settings(tmp_path))
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    with pytest.raises(TranslationError):
        train_quietly(settings(tmp_path, d_ff=32))
    before = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    after = {p.relative_to(tmp_path / "run"): p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert before == after
