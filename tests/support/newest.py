"""Sweep of the newest releases: models of transformers, peft and sentence-transformers, plain and accelerated.

    nox -s newest    the sweep, in an environment with the newest releases

Each tiny model is computed plain, after ``accelerate(model)`` and after ``accelerate(model, packed=True)``. Outputs,
loss and gradients of a padded batch, without dropout, are compared by the gate of every kernel. Generated ids must be
equal. A row of the verdict says "equal", or what ``accelerate`` left as it is. The exit code is 1 for a
wrong number, and for a model that did not run.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_models as models
import huggingface_sweep as sweep
import one_thread  # noqa: F401
import packed_models as packed
import torch
import transformers
from torch import nn

import transformer_fast as tfast
from transformer_fast.huggingface import fast_class, supported

LIBRARIES = "torch", "transformers", "peft", "sentence-transformers"
CAUSAL = "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
SEQ2SEQ = (
    "BartForConditionalGeneration", "MBartForConditionalGeneration", "MarianMTModel", "PegasusForConditionalGeneration",
    "M2M100ForConditionalGeneration", "T5ForConditionalGeneration",
)  # fmt: skip
OTHERS = (
    "BertForMaskedLM", "BertForSequenceClassification", "RobertaForMaskedLM", "XLMRobertaForTokenClassification",
    "CamembertForMaskedLM", "ElectraForMaskedLM", "DistilBertForMaskedLM", "AlbertForMaskedLM", "MPNetForMaskedLM",
    "ModernBertForMaskedLM", "ViTForImageClassification",
)  # fmt: skip
WAYS: tuple[dict[str, bool], ...] = ({}, {"packed": True})
WORDS = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "bird", "sings", "in", "the", "old", "tree", "and", "nobody",
)  # fmt: skip
SENTENCES = ["a bird sings", "nobody in the old tree and a bird sings", "tree"]


def make(name: str) -> nn.Module:
    """Make a tiny model with the attention that it chooses."""
    return packed.make(name, None, **packed.SETTINGS.get(name, {}))


def batches(name: str) -> Iterator[packed.Batch]:
    """Batches of a model: padded on the right, of causal models on the left too; images have no padding."""
    if name.startswith("ViT"):
        images = models.inputs(models.named(name), "none") | {"labels": torch.tensor([0, 1, 0])}
        yield packed.Batch(images, torch.ones(1, dtype=torch.bool))
        return
    for side in ("right", "left") if name in CAUSAL else ("right",):
        yield packed.batch(name, side)


def left_alone(model: nn.Module, report: Any) -> str:
    """Text: what ``accelerate`` left of a model; "" if nothing."""
    kinds = {type(m) for m in model.modules() if supported.name_of(type(m)) and fast_class(type(m)) is None}
    whys = [f"{kind.__name__} is not swapped" for kind in kinds] + [
        row.why for row in report.attention if row.now is None
    ]
    return "; ".join(dict.fromkeys([*whys, *report.notes, *report.padded_calls.reasons]))


def training_steps(make: Callable[[], nn.Module], calls: Iterable[packed.Batch], **options: bool) -> str:
    """Compare outputs, losses and gradients; return what was left."""
    sides = packed.Sides(make(), **{"packed": False, **options})
    for call in calls:
        for training in (True, False):
            sides.hold(call, training=training)
    return left_alone(sides.packed, sides.report)


def generated(name: str, **options: bool) -> str:
    """Compare generated ids; return what was left."""
    plain, fast = make(name), make(name)
    report = tfast.accelerate(fast, **options)
    given = packed.batch(name, "left" if name in CAUSAL else "right").given
    given = {key: given[key] for key in ("input_ids", "attention_mask")}
    for more in ({}, {"num_beams": 2}):
        ours, theirs = (m.generate(**given, max_new_tokens=8, do_sample=False, **more) for m in (fast, plain))
        assert torch.equal(ours, theirs), f"generated {ours.tolist()}, expected {theirs.tolist()}"
    return left_alone(fast, report)


def by_name(name: str) -> str:
    """Compare ``attn_implementation="transformer_fast"`` with eager; return the verdict if it is another than equal."""
    what, why = sweep.verdict(models.named(name))
    assert what != sweep.NOT_MADE, why
    return "" if what == sweep.EQUAL else f"{what} {why}"


def lora() -> nn.Module:
    """Make a model with the adapters of peft."""
    import peft

    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(make("LlamaForCausalLM"), config)


def sentences(*, inner: bool, **options: bool) -> str:
    """Compare sentence embeddings, and the gradients of a step; ``inner`` accelerates the model inside alone."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.txt").write_text("\n".join(WORDS))
        config = models.config_of(models.named("BertForMaskedLM"))
        packed.with_large_weights(transformers.BertModel(config)).save_pretrained(folder)
        transformers.BertTokenizer(str(Path(folder, "vocab.txt"))).save_pretrained(folder)
        plain, fast = (
            SentenceTransformer(
                modules=[modules.Transformer(folder), modules.Pooling(models.WIDTH)], device="cpu"
            ).eval() for _ in range(2)
        )  # fmt: skip
    report = tfast.accelerate(fast[0].model if inner else fast, **options)
    found = []
    for model in (fast, plain):
        with torch.no_grad():
            tokens = model.encode(SENTENCES, output_value="token_embeddings")
        embeddings = model(model.preprocess(SENTENCES))["sentence_embedding"]
        embeddings.square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        encoded = model.encode(SENTENCES, convert_to_tensor=True)
        found.append({"embeddings": embeddings, "encoded": encoded, "tokens": torch.cat(list(tokens)), **gradients})
    packed.close(*found)
    return left_alone(fast, report)


def rows() -> Iterator[tuple[str, Callable[[], str]]]:
    """Names of the comparisons, and functions that return what was left, or raise."""
    for name in (*OTHERS, *CAUSAL, *SEQ2SEQ):
        for options in WAYS:
            yield title(name, options), partial(training_steps, partial(make, name), batches(name), **options)
        yield f'{name}, attn_implementation="transformer_fast"', partial(by_name, name)
    for options in WAYS:
        for name in (CAUSAL[1], SEQ2SEQ[0]):
            yield title(f"{name}.generate", options), partial(generated, name, **options)
        yield title("LoRA of LlamaForCausalLM", options), partial(training_steps, lora, batches(CAUSAL[1]), **options)
        yield title("SentenceTransformer", options), partial(sentences, inner=False, **options)
    yield "SentenceTransformer, accelerate(model[0].model, packed=True)", partial(sentences, inner=True, packed=True)


def title(name: str, options: dict[str, bool]) -> str:
    return f"{name}, accelerate(model{', packed=True' if options else ''})"


def main() -> int:
    """Print the verdict; return 1 if a row failed."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tfast.integrations.transformers.register()
    print(*(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES), sep=", ")
    start, failed, left, total = time.monotonic(), 0, 0, 0
    for total, (name, compare) in enumerate(rows(), 1):  # noqa: B007
        try:
            why = compare()
        except Exception as error:  # the other rows are compared nevertheless
            failed += 1
            print(f"WRONG  {name}: {type(error).__name__}: {error}", flush=True)
        else:
            left += bool(why)
            print(f"left   {name}: {why}" if why else f"equal  {name}", flush=True)
    if not supported.has_version():
        print(f"left   transformers {supported.version()}: the table has {supported.VERSIONS}")
    print(f"{total} rows: {failed} wrong, {left} left in part; {time.monotonic() - start:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
