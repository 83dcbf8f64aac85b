"""The benchmark suite runs, records what it promises, and its record becomes a table and a picture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from transformer_fast import extension

ROOT = Path(__file__).parents[2]


def test_one_case_from_measurement_to_table(tmp_path):
    record = tmp_path / "benchmarks.json"
    case = [str(ROOT / "benchmarks" / "bench_dropout.py"), "-k", "1x64 and not backward", "--seconds", "0.01"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *case, "--benchmark-json", str(record)]
    # pytest-benchmark measures nothing in a worker of pytest-xdist, and takes this process for one by its environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout
    saved = json.loads(record.read_text())
    info = saved["benchmarks"][0]["extra_info"]
    assert info["times"]["ours"]["median"] > 0 and info["ratios"]["F.dropout"] > 0
    assert info["bytes"] > 0 and info["share_of_copy"] > 0
    assert saved["machine_info"]["ceilings"]["copy"] > 1e9 and "node" not in saved["machine_info"]
    info["peak_memory"] = {"ours": 2**20, "F.dropout": 3 * 2**20}  # as a GPU would have it
    info["refused"]["flash"] = "no dropout"
    record.write_text(json.dumps(saved))
    report = [sys.executable, "benchmarks/report.py", str(record), "--out", str(tmp_path)]
    text = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "| case | ours | copy | matmul | x F.dropout | x flash |" in text
    assert " us, 1.0 MiB |" in text and ", memory x 3.00 | refused |" in text
    assert (tmp_path / "dropout.png").stat().st_size > 5_000


def test_every_op_has_a_benchmark_of_its_name():
    ops = {path.stem for path in (ROOT / "transformer_fast" / "ops").glob("[a-z]*.py")}
    benchmarks = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert ops and ops <= benchmarks


def test_a_profile_of_a_step_counts_each_op_once(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import profile_step

    assert extension.load(), extension.status()
    x, weight = torch.randn(64, 48), torch.randn(48, 48)
    norm = torch.ops.transformer_fast.layer_norm
    options = None, None, None, 1e-5, "layer", 0.0, None, "native"
    seconds = profile_step.shares(lambda: norm(torch.mm(x, weight), *options)[0].sum())
    used = {kind for kind, time in seconds.items() if time > 0}
    assert {"products with weights", "norm, residual, ReLU, dropout", "sums over rows"} <= used
    assert not used & {"loss", "attention", "embedding"}
    text = profile_step.table({"ours": seconds}, 0.001)
    assert "| all |" in text and text.endswith("at this machine's rate: 1 ms.")
