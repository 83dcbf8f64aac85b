"""Worker of ``benchmarks/sentence_embeddings.py``: a process of one environment that loads models and times calls.

A worker reads orders from its input, one JSON object a line, and answers each with a line. There is one for each
environment; while one works, the others wait.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy
import sentence_texts
import sentence_ways
import torch
from torch import Tensor, nn

PACKAGES = "torch", "transformers", "sentence-transformers", "onnxruntime", "openvino", "nncf", "optimum-onnx"
PAIRS = 64
"""Pairs of a training step."""


class Worker:
    """State of a worker: models, texts, features and training steps, by name."""

    def __init__(self, folder: str, threads: int) -> None:
        self.folder, self.threads = folder, threads
        self.models: dict[str, Any] = {}
        self.cases: dict[str, sentence_texts.Case] = {}
        self.features: dict[tuple[str, str], list[dict[str, Tensor]]] = {}
        self.steps: dict[tuple[str, str], Callable[[], float]] = {}
        torch.set_num_threads(threads)

    def versions(self) -> dict[str, str]:
        """Versions of the packages that are there."""
        found = {}
        for name in (*PACKAGES, "optimum-intel"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found

    def make(self, name: str) -> None:
        """Make the folder of a model."""
        sentence_ways.make_model(Path(self.folder), name)

    def export(self, name: str) -> None:
        """Write a model's files for the runtimes."""
        sentence_ways.export(Path(self.folder), name)

    def load(self, way: str) -> None:
        """Load a model."""
        self.models[way] = sentence_ways.WAYS[way].load(self.folder, self.threads)

    def embed(self, way: str, file: str) -> None:
        """Write the embeddings of the texts on which ways are compared."""
        found = [self.models[way].encode(texts) for texts in sentence_texts.compared()]
        numpy.save(file, numpy.concatenate(found).astype("float32"))

    def encode(self, way: str, case: str) -> list[float]:
        """Seconds per text of ``encode``."""
        given, model = self._case(case), self.models[way]
        calls = given.texts if given.one_by_one else [given.texts]
        return [timed(lambda: [model.encode(texts, batch_size=32) for texts in calls]) / len(given.texts)]

    def alone(self, way: str, case: str) -> list[float]:
        """Seconds per text of the model with features that are ready."""
        given, model = self._case(case), self.models[way]
        if (way, case) not in self.features:
            size = 1 if given.one_by_one else 32
            texts = given.texts if given.one_by_one else sorted(given.texts, key=len, reverse=True)
            batches = [texts[i : i + size] for i in range(0, len(texts), size)]
            self.features[way, case] = [prepared(model, batch) for batch in batches]
        features = self.features[way, case]
        with torch.inference_mode():
            return [timed(lambda: [model(dict(batch)) for batch in features]) / len(given.texts)]

    def train(self, way: str, case: str) -> list[float]:
        """Seconds of a training step."""
        return [timed(self._step(way, case))]

    def loss(self, way: str, case: str) -> float:
        """Loss before any step, without dropout."""
        return training(self.folder, way, case, dropout=False)()

    def peak(self, way: str, case: str) -> float:
        """Most memory of two training steps, above that of the process with its model, in MiB."""
        step, before = self._step(way, case), status("VmRSS")
        step()
        step()
        return (status("VmHWM") - before) / 1024

    def _case(self, case: str) -> sentence_texts.Case:
        if case not in self.cases:
            self.cases[case] = sentence_texts.CASES[case]()
        return self.cases[case]

    def _step(self, way: str, case: str) -> Callable[[], float]:
        if (way, case) not in self.steps:
            self.steps[way, case] = training(self.folder, way, case)
        return self.steps[way, case]


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def prepared(model: Any, texts: list[Any]) -> dict[str, Tensor]:
    """Features of texts; sentence-transformers before 6 calls this ``tokenize``."""
    return (model.preprocess if hasattr(model, "preprocess") else model.tokenize)(texts)


def status(name: str) -> int:
    """Field of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def training(folder: str, way: str, case: str, dropout: bool = True) -> Callable[[], float]:
    """Return a training step with AdamW; it returns the loss. The way "torch" is plain, any other packed."""
    import transformer_fast

    pairs = list(zip(sentence_texts.captions(PAIRS), sentence_texts.second_wordings(PAIRS), strict=True))
    torch.manual_seed(0)
    if case == "MultipleNegativesRankingLoss":
        model, call = ranking(folder, pairs)
    else:
        model, call = cross_encoder(folder, pairs)
    model.train(dropout)
    if way != "torch":
        transformer_fast.accelerate(model, packed=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    def step() -> float:
        loss = call()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ranking(folder: str, pairs: list[tuple[str, str]]) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A bi-encoder whose negatives are the other pairs."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(folder, device="cpu")
    loss = MultipleNegativesRankingLoss(model)
    sides = [prepared(model, list(side)) for side in zip(*pairs, strict=True)]
    return model, lambda: loss([dict(side) for side in sides], None)


def cross_encoder(folder: str, pairs: list[tuple[str, str]]) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A cross-encoder with one label; every second pair is wrong."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    model = CrossEncoder(folder, num_labels=1, device="cpu")
    loss = BinaryCrossEntropyLoss(model)
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    second[1::2] = second[1::2][1:] + second[1::2][:1]
    labels = (torch.arange(len(pairs)) % 2 == 0).float()
    return model, lambda: loss([first, second], labels)


def orders() -> Iterator[dict[str, Any]]:
    """Yield the orders until the input ends."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    for order in orders():
        try:
            found = getattr(worker, order.pop("do"))(**order)
            answer = {"found": found}
        except Exception as error:
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
