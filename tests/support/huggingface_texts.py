"""Code of the classes of transformers that have a fast class, by its hash, as the tests have compared it with the fast
class."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

TEXTS: dict[str, dict[str, str]] = {
    "DropoutAddNorm": {"3799d79263d3": "BertOutput"},
    "DropoutAdd": {"9ff035059674": "DPTViTOutput"},
    "ActivatedLinear": {"ab3f9454469b": "BertIntermediate"},
    "FeedForward": {"13885f42f2bb": "CLIPMLP"},
    "DistilBertFeedForward": {"9876f12e4f68": "FFN"},
    "ReluFeedForward": {"0711daaf9810": "T5DenseActDense"},
    "FeedForwardAdd": {"fad1fde0acba": "T5LayerFF"},
    "BertLayer": {"e75a0542f06b": "BertLayer"},
    "RelativeAttention": {"1b94352ca980": "T5Attention before 5.24", "c7f38d76e2ce": "T5Attention"},
    "RMSNorm": {
        "9635bcd843f3": "LlamaRMSNorm", "eef4e978a32a": "AfmoeRMSNorm", "b6d7ab076811": "HeliumRMSNorm",
        "3152525beceb": "IdeficsRMSNorm",
    },
    "RMSNormOfEps": {
        "4ad8d3f59922": "MoshiRMSNorm", "cc4f30e2593e": "Llama4TextRMSNorm", "e0fd214fdd79": "Gemma4RMSNorm",
    },
    "LayerNorm": {"ec976d1bff62": "CohereLayerNorm", "114c8768a627": "DebertaLayerNorm"},
    "TransposedLinear": {"2de078e4b215": "Conv1D"},
    "EncoderLayer": {"227da81e0493": "BartEncoderLayer"},
    "PreNormEncoderLayer": {"640e9e5a1ecf": "WhisperEncoderLayer"},
    "DecoderLayer": {"51748a179784": "BartDecoderLayer"},
    "PreNormDecoderLayer": {"7a560d67e522": "WhisperDecoderLayer", "17d96570ded5": "MusicgenDecoderLayer"},
}  # fmt: skip
"""Hash of the text of ``forward`` and of the methods that it calls, and a class that has this text, by fast class."""

CALLED = ("_norm", "ff_chunk")
"""Methods that a forward calls."""


def hash_of(kind: type) -> str:
    """Return the hash of the text of a class."""
    return hashlib.sha256(text_of(kind).encode()).hexdigest()[:12]


def text_of(kind: type) -> str:
    """Return the code of a class without annotations, comments and decorators; a cache is called ``cache``."""
    methods = [kind.forward, *(vars(kind)[name] for name in CALLED if name in vars(kind))]
    return "\n".join(map(_text, methods))


def _text(method: Callable[..., Any]) -> str:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method)))).body
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list, function.returns = [], None
    arguments = function.args
    for argument in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    if isinstance(function.body[0], ast.Expr):  # a docstring
        del function.body[0]
    return re.sub(r"\bpast_key_values\b", "cache", ast.unparse(function))
