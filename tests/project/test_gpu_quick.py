"""Commands of a GPU run of minutes, on the CPU with small cases: records, what is left, and tables."""

import json
import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are not launched", allow_module_level=True)

import torch
from gpu import ROOT

from benchmarks.quick import headline, parity, profile, report, tiles
from benchmarks.quick.record import CUT, Record
from transformer_fast.ops.registry import op_cases

CPU = torch.device("cpu")


def test_a_record_keeps_whole_lines(tmp_path):
    record = Record(tmp_path / "new" / "rows.jsonl", "case")
    assert record.rows() == [] and record.done() == set()
    record.add({"case": "a", "us": 1.5})
    record.path.open("a").write('{"case": "b", "u')
    assert record.rows() == [{"case": "a", "us": 1.5}] and record.done() == {("a",)}


def test_the_smoke_passes_here_and_says_so(tmp_path, capsys):
    assert parity.main(["--out", str(tmp_path), "--device", "cpu", "--smoke"]) == 0
    rows = Record(tmp_path / "parity.jsonl").rows()
    assert len(rows) == 14 and all(row["passed"] for row in rows)
    assert "14 passed, 0 FAILED" in capsys.readouterr().out


def test_a_wrong_dropout_mask_is_seen(monkeypatch):
    monkeypatch.setattr(
        parity, "dropped", lambda device, calls=[]: calls.append(1) or (torch.rand(9) < len(calls) / 2,) * 2
    )
    assert [row.passed for row in parity.dropout_rows(CPU)] == [False, False]


def test_parity_without_time_is_cut_and_nothing_is_checked_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "large_cases", lambda device: list(op_cases(device))[-2:])
    given = ["--out", str(tmp_path), "--device", "cpu"]
    assert parity.main([*given, "--seconds", "-1"]) == CUT
    monkeypatch.setattr(parity, "op_cases", lambda device: ())
    monkeypatch.setattr(parity, "check_transformer", lambda *_: iter(()))
    assert parity.main(given) == 0
    count = len(Record(tmp_path / "parity.jsonl").rows())
    assert count == 2 * 2 * len(parity.DTYPES)
    assert parity.main(given) == 0 and len(Record(tmp_path / "parity.jsonl").rows()) == count


def test_a_headline_case_is_recorded_once(tmp_path, capsys):
    name = "norm layer 16384x4096"
    given = ["--out", str(tmp_path), "--device", "cpu", "--each", "0.01", "--only", name]
    record, current = Record(tmp_path / "headline.jsonl", "case"), tmp_path / "headline.current"
    headline.work([name], record, current, 0.01, "cpu")
    rows = record.rows()
    assert [row["case"] for row in rows] == [f"{name} forward", f"{name} forward+backward", name]
    assert rows[0]["us"]["ours"] > 0 and rows[2]["ended"]
    assert headline.main(given) == 0 and record.rows() == rows
    headline.work(["no such case"], record, current, 0.01, "cpu")
    assert record.rows()[-1]["error"].startswith("KeyError")


@pytest.mark.parametrize("name", tiles.CASES)
def test_tiles_are_launches_of_their_case(name):
    case, packed = tiles.CASES[name]
    config = next(tiles.candidates("forward"))
    launch = tiles.on_meta(case, packed, "forward", config)
    assert (launch.arguments["BLOCK_QUERIES"], launch.arguments["BLOCK_KEYS"]) == (64, 32)
    assert launch.num_stages == config.num_stages


def test_a_profile_is_read_by_way():
    """As ncu prints it: names, units, and after each way's mark its kernels; what ncu does not know is None."""
    reason = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    tensor = "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"
    names = [
        "Kernel Name",
        "gpu__time_duration.sum",
        tensor,
        reason.format("barrier"),
        reason.format("long_scoreboard"),
    ]
    lines = [names, ["", "ns", "%", "", ""], ["void erfinv_kernel(int)", "1", "2", "3", "4"],
             ["_forward_kernel", "1,234,567", "43.5", "0.5", "1.5"], ["void erfinv_kernel(int)", "", "", "", ""],
             ["flash(x)", "n/a", "", "2", ""]]  # fmt: skip
    text = "==PROF== connected\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    ours, peer = profile.rows(text)
    assert (ours["case"], ours["way"], ours["kernel"]) == (*profile.WAYS[0], "_forward_kernel")
    assert (ours["us"], ours["tensor cores"], ours["registers"]) == (1234.567, 0.435, None)
    assert ours["stalls"] == {"long_scoreboard": 1.5, "barrier": 0.5}
    assert (peer["case"], peer["way"], peer["kernel"], peer["us"]) == (*profile.WAYS[1], "flash", None)
    assert peer["tensor cores"] is None and peer["stalls"] == {"barrier": 2.0}


def test_the_committed_record_has_its_table(tmp_path):
    folder = ROOT / "benchmarks/results/h200"
    for name in ("headline", "step", "profile", "tiles", "parity"):
        text = (folder / f"{name}.jsonl").read_text()
        (tmp_path / f"{name}.jsonl").write_text(text)
        assert all(json.loads(line)["device"] == "NVIDIA H200" for line in text.splitlines() if "device" in line)
    report.main([str(tmp_path)])
    assert (tmp_path / "measured.md").read_text() == (folder / "measured.md").read_text()
