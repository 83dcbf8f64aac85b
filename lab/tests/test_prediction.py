"""The model of an H100 that `make predict` uses: its parts on small inputs, and that its record is what it makes."""

import dataclasses
import json

import pytest

pytest.importorskip("triton")

import triton

from lab.prediction import attention, calibration, grid, pipes, report, rows
from lab.prediction.kernels import Steps, durations
from lab.prediction.machine import H100, assumptions
from lab.prediction.predictions import Prediction, Range
from lab.prediction.published import Goal
from lab.prediction.replay import replay
from tools.control_flow import Flow
from tools.sass import Instruction, parse

LISTING = """
	Function : _kernel
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                                    /* 0x00000a00ff017b82 */
                                                                                             /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;                          /* 0x0000000602048981 */
                                                                                             /* 0x000ea2000c1e1d00 */
        /*0020*/                   FADD R4, R4, 1 ;                                          /* 0x3f80000004047421 */
                                                                                             /* 0x004fc80000000000 */
        /*0030*/              @P1  BRA 0x10 ;                                                /* 0xfffffffc00f41947 */
                                                                                             /* 0x000fea000383ffff */
        /*0040*/                   EXIT ;                                                    /* 0x000000000000794d */
                                                                                             /* 0x000fea0003800000 */
"""


def instruction(address, opcode, operands="", predicate="", *, stall=1, waits=(), write=None):
    return Instruction(address * 16, opcode, operands, predicate, stall, write, None, waits)


def program(*lines):
    """Instructions from (opcode, operands, predicate); a branch names the number of the one it leads to."""
    made = []
    for n, line in enumerate(lines):
        opcode, operands, predicate = (*line.split("|"), "", "")[:3]
        operands = f"0x{int(operands) * 16:x}" if opcode == "BRA" else operands
        made.append(instruction(n, opcode, operands, predicate))
    return made


def addresses(path):
    return [i.address // 16 for i in path]


def test_the_parser_reads_both_halves():
    first, load, add, branch, end = parse(LISTING)
    assert (first.opcode, first.operands, first.address) == ("LDC", "R1, c[0x0][0x28]", 0)
    assert (load.opcode, load.name, load.predicate) == ("LDG.E.128", "LDG", "@!P0")
    assert (load.stall, load.write_barrier, load.read_barrier, load.waits) == (1, 2, None, ())
    assert (add.stall, add.write_barrier, add.waits) == (4, None, (2,))
    assert (branch.target, branch.is_conditional, branch.stall) == (0x10, True, 5)
    assert end.target is None and not end.is_conditional


@pytest.mark.parametrize("text", ["", "no listing", "\n".join(LISTING.splitlines()[:4])])
def test_the_parser_refuses_what_is_no_listing(text):
    with pytest.raises(ValueError, match="listing"):
        parse(text)


@pytest.mark.parametrize(
    ("opcode", "operands", "pipe", "cost"),
    [
        ("FFMA", "", "fp32", 2),
        ("IMAD.WIDE.U32", "", "multiply", 4),
        ("IMAD", "", "multiply", 2),
        ("LOP3.LUT", "", "alu", 2),
        ("MUFU.EX2", "", "mufu", 8),
        ("UIADD3", "", "uniform", 2),
        ("SHFL.BFLY", "", "shared", 4),
        ("LDS.128", "", "shared", 16),
        ("LDSM.16.M88.4", "", "shared", 16),
        ("LDG.E.64", "", "shared", 8),
        ("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR4], RZ, !UPT", "tensor", 64),
        ("BAR.SYNC.DEFER_BLOCKING", "0x0", "issue", 0),
        ("EXIT", "", "issue", 0),
    ],
)
def test_pipes(opcode, operands, pipe, cost):
    one = instruction(0, opcode, operands)
    assert (pipes.pipe_of(one), pipes.cost_of(one)) == (pipe, cost)
    assert pipes.counts([one])["issue"] == 1
    assert pipes.cycles([one], warps=8)["issue"] == 2


def test_products():
    from_shared = instruction(0, "HGMMA.64x64x16.F32.BF16", "R24, gdesc[UR4], R24")
    from_registers = instruction(0, "HGMMA.64x64x16.F32.BF16", "R24, R8, gdesc[UR4], R24, gsb0")
    assert pipes.flops([from_shared], warps=4) == 2 * 64 * 64 * 16
    assert pipes.operand_bytes(from_shared) == pipes.operand_bytes(from_registers) + 64 * 16 * 2
    assert (pipes.operation(from_shared).count, pipes.operation(from_registers).count) == (0, 1)


def test_the_way_through_a_kernel():
    flow = Flow(
        program(
            "MOV", "BRA|9|@P0",  # 0: past the main loop
            "HGMMA", "BRA|6|@P1",  # 2: the main loop; a full tile jumps over the mask code
            "FSEL", "FSEL",
            "HGMMA", "FADD", "BRA|2|@P2",
            "BRA|12|@P3",  # 9: past the loop that repeats a tile
            "HGMMA", "BRA|10|@P4",
            "STG", "EXIT||@P5", "STG", "EXIT", "BRA|16",
        )
    )  # fmt: skip
    assert [(loop.first // 16, loop.last // 16) for loop in flow.loops] == [(2, 6), (10, 10)]
    walk = flow.walk()
    assert addresses(walk.full) == [2, 3, 6, 7, 8]
    assert addresses(walk.masked) == [2, 3, 4, 5, 6, 7, 8]
    assert addresses(walk.before) == [0, 1] and addresses(walk.after) == [9, 12, 13, 14, 15]
    assert addresses(walk.steps(0, 0)) == [0, 1, 9, 12, 13, 14, 15]
    assert addresses(walk.steps(2, 1)) == [0, 1, *[2, 3, 6, 7, 8] * 2, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15]


def test_counted_loops():
    flow = Flow(program("MOV", "FADD", "FMUL", "BRA|2|@P0", "FADD", "BRA|1|@P1", "EXIT"))
    inner = [2, 3] * 3
    assert addresses(flow.counted((2, 3))) == [0, *[1, *inner, 4, 5] * 2, 6]
    with pytest.raises(ValueError, match="2 loops, not 1"):
        flow.counted((2,))


def trace(*instructions):
    return [pipes.operation(i) for i in instructions]


def test_a_busy_pipe_binds():
    alu = trace(*[instruction(n, "LOP3.LUT") for n in range(32)])
    alone = replay(alu, warps=4, programs=1)
    assert alone.cycles == 64 and alone.busiest == "alu"
    assert replay(alu, warps=4, programs=2).cycles == 128
    # Two pipes side by side take no longer than the slower one.
    both = trace(*[instruction(n, "LOP3.LUT" if n % 2 else "FFMA") for n in range(64)])
    assert replay(both, warps=4, programs=2).cycles <= 1.05 * 128


def test_more_work_and_longer_latencies_are_never_faster():
    def cycles(instructions, programs=2, machine=H100):
        operations = [pipes.operation(i, machine) for i in instructions]
        return replay(operations, warps=8, programs=programs, machine=machine).cycles

    load, use = instruction(0, "LDG.E.128", write=0), instruction(1, "FADD", waits=(0,), stall=4)
    barrier = instruction(2, "BAR.SYNC", "0x0", stall=5)
    short = [load, use]
    assert cycles(short) >= H100.memory_latency
    assert cycles([*short, barrier]) > cycles(short)
    assert cycles([*short, *[instruction(n, "MUFU.EX2") for n in range(40)]]) > cycles(short)
    slow = dataclasses.replace(H100, memory_latency=H100.loaded_latency)
    assert cycles(short, machine=slow) - cycles(short) == pytest.approx(H100.loaded_latency - H100.memory_latency)
    # Programs share pipes, and hide one another's latencies.
    products = [instruction(n, "FFMA") for n in range(100)]
    times = [cycles(products, programs) for programs in range(1, 6)]
    assert times == pytest.approx([200 * programs for programs in range(1, 6)])
    assert cycles([*short, *products], 4) < 2 * cycles([*short, *products], 1)


def test_a_replay_is_deterministic_and_refuses_nothing_to_replay():
    one = trace(instruction(0, "LDS.64", write=1), instruction(1, "FADD", waits=(1,)), instruction(2, "MUFU.RCP"))
    assert replay(one, warps=8, programs=3) == replay(one, warps=8, programs=3)
    with pytest.raises(ValueError, match="trace"):
        replay([], warps=4, programs=1)


def test_programs_on_multiprocessors():
    def alone(work, resident):
        return work

    assert grid.launch_cycles([100.0] * 10, alone, multiprocessors=2, resident=1) == 500
    assert grid.launch_cycles([100.0] * 11, alone, multiprocessors=2, resident=1) == 600
    # Two that share one take 150 each: 10 programs in 5 pairs on 2; the last has one to itself.
    shared = grid.launch_cycles([100.0] * 10, lambda work, n: work * (1 + n) / 2, multiprocessors=2, resident=2)
    assert shared == pytest.approx(2 * 150 + 100)
    long_first = grid.launch_cycles([300.0, 100.0, 100.0, 100.0], alone, multiprocessors=2, resident=1)
    long_last = grid.launch_cycles([100.0, 100.0, 100.0, 300.0], alone, multiprocessors=2, resident=1)
    assert (long_first, long_last) == (300, 400)


def test_what_programs_do():
    cases = {str(case): case for case in report.CASES}
    case = cases["sentences-b64h16k256-p0.1-bfloat16-train"]
    lengths = case.key_lengths().tolist()
    padded = attention.works(case, "forward", (64, 32), packed=False)
    assert len(padded) == 64 * 16 * 4
    assert sum(work.full for work in padded) == 16 * 4 * sum(n // 32 for n in lengths)
    assert sum(work.masked for work in padded) == 16 * 4 * sum(n % 32 > 0 for n in lengths)
    packed = attention.works(case, "grad_kv", (64, 64), packed=True)
    assert sum(not work.exits for work in packed) == 16 * sum(-(-n // 64) for n in lengths)
    assert all(work.full + work.masked > 0 for work in packed if not work.exits)
    causal = cases["full-b4h16k4096-p0.0-bfloat16-infer"]
    causal = attention.works(dataclasses.replace(causal, causal=True), "forward", (128, 64), packed=False)
    assert causal[0] == Steps(62, 2) and causal[31] == Steps(0, 2)  # the last tile of queries first


def test_every_assumption_has_a_source():
    table = assumptions()
    assert len({row["name"] for row in table}) == len(table) > 30
    assert all(row["source"] for row in table)


def test_goals():
    kernels = [json_prediction(moved=3_000_000, operations=4e9)]
    assert Goal("", "", 5).value_of(4e-6, kernels) == pytest.approx(4)
    assert Goal("", "", 1, "TFLOP/s").value_of(4e-6, kernels) == pytest.approx(1000)
    assert Goal("", "", 1, "% of a copy").value_of(2e-6 + H100.gap, kernels) == pytest.approx(50)
    row = report.Row("case", [dataclasses.replace(kernels[0], time=Range(4e-6, 6e-6))])
    assert [report.judged(Goal("", "case", limit), [row])["holds"] for limit in (6, 4.5)] == [True, False]
    with pytest.raises(ValueError, match="not predicted"):
        report.judged(Goal("", "another", 1), [row])


def json_prediction(**values):
    record = json.loads((report.RECORDS / "predicted.json").read_text())
    return Prediction(**(record["rows"][0]["kernels"][0] | {"time": Range(1e-6, 2e-6)} | values))


@pytest.fixture(scope="module")
def record():
    return json.loads((report.RECORDS / "predicted.json").read_text())


def test_the_record_has_every_case(record):
    assert [row["case"] for row in record["attention"]] == [f"{c}{' packed' * p}" for c, p in report.attention_names()]
    assert [row["case"] for row in record["rows"]] == list(rows.cases())
    assert len(record["goals"]) == len(report.GOALS)
    assert record["assumptions"] == assumptions()
    assert (report.RECORDS / "predicted.md").read_text() == report.markdown(record)
    for row in record["attention"] + record["rows"]:
        for kernel in row["kernels"]:
            assert kernel["time"]["low"] <= kernel["time"]["high"]
            assert kernel["moved"] / H100.copy <= kernel["time"]["low"]


@pytest.mark.parametrize("name", ["sentences-b64h16k256-p0.1-bfloat16-infer packed", f"dropout {rows.ROWS}x1024"])
def test_the_record_is_what_the_model_makes(record, name):
    """One case of each kind is compiled and replayed again."""
    if triton.__version__ != record["triton"]:
        pytest.skip(f"the record is of the machine code of Triton {record['triton']}, this is {triton.__version__}")
    by = Range(**record["factor"])
    recorded = next(row for row in record["attention"] + record["rows"] if row["case"] == name)
    if name.startswith("dropout"):
        row = report.row_kernels_row(name, by)
    else:
        row = report.attention_row({str(c): c for c in report.CASES}[name.removesuffix(" packed")], True, by)
    made = json.loads(json.dumps([dataclasses.asdict(p) for p in row.kernels]))
    for new, old in zip(made, recorded["kernels"], strict=True):
        assert new.pop("time") == pytest.approx(old.pop("time"), rel=1e-3)
        assert new.pop("busy") == pytest.approx(old.pop("busy"), abs=2e-3)
        assert new.pop("cycles") == pytest.approx(old.pop("cycles"), rel=1e-3)
        assert new == old


def test_programs_take_longer_with_more_steps_and_beside_others():
    case = {str(c): c for c in report.CASES}["sentences-b64h16k256-p0.1-bfloat16-infer"]
    (one,) = attention.launched(case, packed=True)
    found = durations(one.kernel, 2, H100)
    of_steps = [found.cycles(Steps(full, 1), 1) for full in range(6)]
    assert of_steps == sorted(of_steps) and of_steps[5] > 1.5 * of_steps[0]
    assert found.cycles(Steps(0, 0, exits=True), 1) < found.cycles(Steps(0, 0), 1) < of_steps[0]
    alone, two = (found.cycles(Steps(1, 1), resident) for resident in (1, 2))
    assert alone < two < 2 * alone
    # Beyond what is replayed as a whole, a step takes what it does in the loop alone: near a replay of all of them.
    operations = [pipes.operation(i) for i in one.kernel.walk.steps(6, 0)] + [pipes.program_end()]
    whole = replay(operations, one.kernel.warps, 2, passes=9, skip=2).cycles
    assert found.cycles(Steps(6, 0), 2) == pytest.approx(whole, rel=0.1)


def test_the_calibration_divides_published_by_predicted():
    published = calibration.Published(64, 300e12, 400e12, "")
    found = [calibration.Calibration(published, (64, 64, 4, 2), 500e12)]
    assert calibration.factor(found) == Range(0.6, 0.8)
