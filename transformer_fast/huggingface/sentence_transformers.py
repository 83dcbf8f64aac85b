"""Table of the classes of sentence-transformers, and their fast forwards with ``packed=True``.

A model of sentence-transformers is a pipeline of modules: a ``Transformer`` around a model of transformers, whose stack
skips padding, and modules that read its hidden states. ``Pooling`` gets padded hidden states: on tokens alone it would
save less than one percent of ``encode``. ``SpladePooling`` reads the logits of a masked language model, a whole
vocabulary for each position. So it pools the logits of tokens, and no padded logits are made.

The library flattens a batch itself under FlashAttention alone: it looks for "flash" in the name of the attention, and
has no public switch for another one. ``unpad_inputs=True`` only warns. So ``attn_implementation="transformer_fast"``
keeps the padding there, and ``accelerate(model, packed=True)`` leaves it out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..layers.padded_calls import padded_calls
from .blocks import Fast
from .door import Call, current, entered
from .inside import is_held
from .logits import HeldLogits, holding

VERSIONS = ((6, 0), (6, 1), (6, 2))
"""Versions of sentence-transformers whose classes are known."""

EXPANSION = "query expansion: its tokens are read, and no token attends to them"
_NAME = "sentence_transformers"
_PIPELINES = {
    "cross_encoder.model.CrossEncoder", "multi_vector_encoder.model.MultiVectorEncoder",
    "sentence_transformer.model.SentenceTransformer", "sparse_encoder.model.SparseEncoder",
}  # fmt: skip
_ON_TOKENS = {
    "base.modules.dense.Dense", "base.modules.normalize.Normalize", "base.modules.router.Router",
    "cross_encoder.modules.logit_score.LogitScore", "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling",
    "multi_vector_encoder.modules.token_pooling.LambdaTokenPooling", "sentence_transformer.modules.bow.BoW",
    "sentence_transformer.modules.dropout.Dropout", "sentence_transformer.modules.layer_norm.LayerNorm",
    "sentence_transformer.modules.pooling.Pooling", "sentence_transformer.modules.static_embedding.StaticEmbedding",
    "sentence_transformer.modules.weighted_layer_pooling.WeightedLayerPooling",
    "sentence_transformer.modules.word_weights.WordWeights",
    "sparse_encoder.modules.sparse_auto_encoder.SparseAutoEncoder",
    "sparse_encoder.modules.sparse_auto_encoder.TiedTranspose",
    "sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding",
}  # fmt: skip
"""Classes that read nothing at padding, or compute each position by itself."""
CLASSES = {
    f"{_NAME}.base.modules.transformer.Transformer": "Transformer",
    f"{_NAME}.sparse_encoder.modules.mlm_transformer.MLMTransformer": "Transformer",
    f"{_NAME}.sparse_encoder.modules.splade_pooling.SpladePooling": "SpladePooling",
}
"""Name of the fast class in this file, by the full name of a class of sentence-transformers."""
_KNOWN = {f"{_NAME}.{name}" for name in _PIPELINES | _ON_TOKENS} | set(CLASSES)


def version() -> str:
    """Version of sentence-transformers, if it was imported; else ""."""
    return getattr(sys.modules.get(_NAME), "__version__", "")


def has_version() -> bool:
    """Return True if the table has the version of sentence-transformers that was imported."""
    first, second, *_ = (*version().split("."), "", "")
    return (first, second) in {(str(major), str(minor)) for major, minor in VERSIONS}


def base_of(kind: type[nn.Module]) -> type[Fast] | None:
    """Base of the fast class of a class of sentence-transformers; None for a class that is not in the table."""
    name = CLASSES.get(f"{kind.__module__}.{kind.__qualname__}")
    return globals()[name] if name is not None and has_version() else None


def reads_padding(module: nn.Module) -> str:
    """Reason why the stacks inside of a module keep their padding: a class of sentence-transformers that is not in the
    table, or one derived from ``Transformer``; "" for other modules."""
    kind = type(module)
    if _is_theirs(kind) and not has_version():
        return f"sentence-transformers {version()}: its classes are not in the table; take the model of transformers"
    if _is_pipeline(module):
        others = (type(m) for m in module.modules())
        other = next((k for k in others if not issubclass(k, Fast) and _is_theirs(k) and _name(k) not in _KNOWN), None)
        return "" if other is None else f"{other.__name__} of sentence-transformers is not in the table"
    transformer: Any = getattr(sys.modules.get(f"{_NAME}.base.modules.transformer"), "Transformer", None)
    is_exact = issubclass(kind, Fast) or (_name(kind) in _KNOWN and is_held(kind))
    if transformer is None or not issubclass(kind, transformer) or is_exact:
        return ""
    return f"{kind.__name__} is derived from Transformer of sentence-transformers; it may read padding"


def readers(module: nn.Module) -> list[nn.Module]:
    """Modules of other authors in a pipeline of sentence-transformers, which read what the stacks return."""
    if not _is_pipeline(module):
        return []
    found = []
    for child in module.children():
        routes = child.sub_modules.values() if _name(type(child)) == f"{_NAME}.base.modules.router.Router" else ()
        found += [inner for route in routes for inner in route] or [child]
    libraries = ("torch.", "transformers.", "transformer_fast.", f"{_NAME}.")
    return [reader for reader in found if not type(reader).__module__.startswith(libraries)]


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call of a model, of a batch that a user gave.

    Args:
        model: any module.
        batch: keyword arguments, a tuple of arguments, or one argument. For a model of sentence-transformers: features
            by name, or what ``preprocess`` takes, a list of texts or of pairs.

    Raises:
        TypeError: for a DataLoader; for texts and lists, if the model is one of transformers, which take token ids.
    """
    if isinstance(batch, DataLoader):
        raise TypeError("batch: expected one batch, got DataLoader; next(iter(loader)) is its first batch")
    if _is_pipeline(model):
        if isinstance(batch, tuple) and len(batch) == 1 and isinstance(batch[0], Mapping):
            (batch,) = batch
        batch = [batch] if isinstance(batch, str) else batch
        features: Any = batch if isinstance(batch, Mapping) else model.preprocess(batch)  # type: ignore[operator]
        device = next(model.parameters()).device
        return ({name: t.to(device) if isinstance(t, Tensor) else t for name, t in features.items()},), {}
    if isinstance(batch, str | list) and all(isinstance(one, str) for one in batch) and _takes_ids(model):
        raise TypeError(
            f"batch: {type(model).__name__} takes token ids, got {type(batch).__name__} of texts; "
            'tokenizer(texts, padding=True, return_tensors="pt") makes a batch of them'
        )
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, list) and _takes_ids(model):
        raise TypeError(
            f"batch: {type(model).__name__} takes tensors by name, got list; the collator of your trainer, or "
            'tokenizer.pad(rows, return_tensors="pt"), makes a batch of rows'
        )
    return ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})


def _is_pipeline(module: nn.Module) -> bool:
    base: Any = getattr(sys.modules.get(f"{_NAME}.base.model"), "BaseModel", None)
    return base is not None and isinstance(module, base)


def _takes_ids(module: nn.Module) -> bool:
    base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def _is_theirs(kind: type) -> bool:
    return kind.__module__.startswith(f"{_NAME}.")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Transformer(Fast):
    """The module around a model of transformers.

    Expansion tokens of a query that no token attends to are padding for the model, and are read nevertheless. Such a
    call keeps its padding. The logits of a masked language model are made at padding only if something reads them
    there. A cache, for which a decoder would keep its padding, is not made: nothing here can read it.
    """

    def compute(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any] | None:
        if torch.compiler.is_compiling() or current() is not None:
            return None
        expanded = features.get("query_expansion_positions")
        if expanded is not None and not _attends(features.get("attention_mask"), expanded):
            call = Call(padded_calls(self))
            call.keep_padding(EXPANSION)
            with entered(call):
                return self._former.forward(self, features, **kwargs)
        inner: Any = getattr(self.model, "_former", None)
        if inner is not None and "use_cache" in inner.names and "use_cache" not in features:
            kwargs.setdefault("use_cache", False)
        with holding(features.get("attention_mask") if self.transformer_task == "fill-mask" else None):
            return self._former.forward(self, features, **kwargs)


def _attends(mask: Any, expanded: Any) -> bool:
    """Return True if tokens attend to all expansion positions (B, L)."""
    return isinstance(mask, Tensor) and isinstance(expanded, Tensor) and bool((mask.bool() | ~expanded).all())


class SpladePooling(Fast):
    """Maximum or sum over the tokens of a sentence of ``log1p(relu(logits))``.

    Both functions rise, so the maximum is taken first, and they are computed once for each sentence.
    """

    def compute(self, features: dict[str, Any]) -> dict[str, Any] | None:
        logits = features.get("token_embeddings")
        if torch.compiler.is_compiling() or "cu_seq_lens_q" in features:
            return None
        if not isinstance(logits, HeldLogits) or not logits.is_of(features.get("attention_mask")):
            return None
        lengths = logits.node.packing.cu_seqlens.diff().tolist()
        if self.pooling_strategy not in ("max", "sum") or min(lengths) == 0:
            return None
        activated = {"relu": torch.log1p, "log1p_relu": lambda x: x.log1p().log1p()}.get(self.activation_function)
        if activated is None:
            return None
        sentences = logits.tokens().split(lengths)
        if self.pooling_strategy == "sum":
            pooled = torch.stack([activated(sentence.relu()).sum(0) for sentence in sentences])
        elif logits.requires_grad:  # the gradient of amax is spread over equal values
            pooled = activated(torch.stack([sentence.max(0).values for sentence in sentences]).relu())
        else:
            pooled = activated(torch.stack([sentence.amax(0) for sentence in sentences]).relu())
        if self.embedding_dimension is None:
            self.embedding_dimension = pooled.shape[1]
        features["sentence_embedding"] = pooled
        return features
