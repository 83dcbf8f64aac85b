"""Commands of a GPU run of minutes, on the CPU with small cases: records, what is left, and tables."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are not launched", allow_module_level=True)

import records
import torch
from pages import tables

import benchmarks.records
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


GPU = "h200/measured"
PAGE = records.page_of(GPU).read_text()


def about(row):
    """Return the fields of a result that say where it was measured."""
    device, driver = row.machine.split(", driver ")
    torch_version, triton_version = (part.split()[1] for part in row.versions.split(", "))
    known = {"device": device, "driver": driver, "torch": torch_version, "triton": triton_version}
    return {**known, "commit": row.commit, "date": row.date}


def of_case(case, unit, name="median"):
    return {way: getattr(row, name) for way, row in records.cases(GPU, unit)[case].items()}


@pytest.fixture(scope="module")
def committed():
    """Results of the commands, without what has no rows: refusals, ceilings, registers, stalls, checked tensors."""
    found = {"headline": [], "step": [], "tiles": [], "profile": [], "parity": []}
    for case, ways in records.cases(GPU, "us").items():
        kind, _, name = case.partition(": ")
        if kind == "tiles":
            (table, *_), times = ways, of_case(case, "us")
            (name, _, kernel), where = name.rpartition(" "), about(ways[table])
            times = {"table": times.pop(table), **times}
            found[kind].append({"case": name, "kernel": kernel, **where, "table": table, "us": times})
        elif kind != "profile":
            spread = {name: of_case(case, "us", name) for name in ("p20", "p80")}
            limit = report.limit_of(case)
            found["headline"].append({
                "case": case, **about(ways["ours"]), "us": of_case(case, "us"), **spread,
                "peak_memory": of_case(case, "bytes"), "ceilings": {"copy": 4.17e12, "matmul": 725e12},
                f"share_of_{limit}": of_case(case, f"share of {limit}")["ours"],
            })  # fmt: skip
    for row in (row for row in records.read() if row.record == GPU):
        kind, _, name = row.case.partition(": ")
        if row.unit == "ms":
            units = {"least": "ms, least", "tokens_per_second": "tokens/s", "peak_bytes": "bytes"}
            more = {name: of_case(row.case, unit)[row.way] for name, unit in units.items()}
            more["tokens_per_second"] = int(more["tokens_per_second"])
            step = {"what": name, "way": row.way, **about(row), **more}
            found[kind].append(step | {"ms": row.median, "p20_p80": [row.p20, row.p80]})
        elif (kind, row.unit) == ("profile", "us"):
            way, _, kernel = row.way.partition(": ")
            shares = {share: of_case(row.case, share)[row.way] for share in report.SHARES}
            profile = {"case": name, "way": way, "kernel": kernel, "us": row.median, **shares}
            found[kind].append(profile | {"registers": 0, "stalls": {}})
    return found


@pytest.fixture
def run(committed, tmp_path):
    """Return a folder with the committed results, and of checked tensors one that is right and one that is wrong."""
    checked = {"op": "norm", "case": "a", "dtype": "torch.float16", "tensor": "grad", "gate": 0.2, "eager": 0.1}
    parity = [checked | {"error": 0.1, "passed": True}, checked | {"error": 0.3, "passed": False}]
    for name, rows in (committed | {"parity": parity}).items():
        record = Record(tmp_path / "run" / f"{name}.jsonl")
        for row in rows:
            record.add(row)
    return tmp_path / "run"


def test_the_committed_record_has_its_table(committed, run):
    report.main([str(run)])
    made, *parts = (run / "measured.md").read_text().rstrip().split("\n## ")
    committed_made, *committed_parts = PAGE.rstrip().split("\n## ")
    assert made == committed_made and len(parts) == 6
    for part, committed_part in zip(parts, committed_parts, strict=True):
        assert part == committed_part or part.startswith(("What bounds", "Parity"))
    (profiles,) = (table for table in tables(records.page_of(GPU)) if "tensor cores" in table[0])
    for shown, row in zip(profiles, committed["profile"], strict=True):
        assert shown["kernel"] == row["kernel"].removeprefix("void ").replace("|", " ")[:60].strip()
        assert (shown["case"], shown["way"], shown["us"]) == (row["case"], row["way"], f"{row['us']:.0f}")
        assert [shown[share] for share in report.SHARES] == [f"{row[share]:.2f}" for share in report.SHARES]
    within, tensors = (of_case("parity", unit)["ours"] for unit in ("tensors within the gate", "tensors"))
    assert f"{within:.0f} of {tensors:.0f} tensors are within their gate." in PAGE


def test_the_rows_of_the_committed_record_are_those_of_its_results(committed):
    rows = [row for row in records.read() if row.record == GPU]
    assert {row.machine.partition(",")[0] for row in rows} == {"NVIDIA H200"}
    made = {(row.case, row.way, row.unit): row for row in report.rows(committed, GPU)}
    kept = {(row.case, row.way, row.unit): row for row in rows if row.case != "parity"}
    assert made.keys() == kept.keys()
    for key, row in kept.items():
        assert made[key][:6] == row[:6] and made[key].ratio == pytest.approx(row.ratio)
        assert (made[key].machine, made[key].versions) == (row.machine, row.versions)


def test_a_run_becomes_a_record(run, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks.records, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(benchmarks.records, "TABLE", tmp_path / "results.csv")
    report.main([str(run), "--record", "gpu/new"])
    text = (tmp_path / "results/gpu/new.md").read_text()
    assert "1 of 2 tensors are within their gate." in text and "| norm | a | float16 | grad | 3.0e-01 |" in text
    found = {(row.case, row.way, row.unit): row for row in records.read(tmp_path / "results.csv")}
    assert {row.record for row in found.values()} == {"gpu/new"}
    assert found["parity", "ours", "tensors within the gate"].median == 1
    assert found["parity", "ours", "largest share of the gate"].median == pytest.approx(1.5)
