"""Profile the attention kernels with Nsight Compute: what bounds each of them?

    python -m benchmarks.quick.profile --out results --seconds 60

One call of each of a few cases runs under ncu, and profile-CASE.csv has a line per kernel and metric: time, the shares
of the tensor pipe, of the issue slots and of the memory, registers, occupancy, and the most frequent reasons to wait.
"""

from __future__ import annotations

import subprocess
import sys

from .record import CUT, parser

CASES = ("padded", "kept bits", "packed", "causal")
"""Of benchmarks.quick.tiles."""
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy",
            "LaunchStats", "SchedulerStats")  # fmt: skip
KERNELS = "regex:_forward_kernel|grad_q_kernel|grad_kv_kernel"


def launch(name: str, device: str) -> None:
    """Run the launches of a case twice: the first time compiles and warms up."""
    import torch

    from . import tiles
    from .tiles import attention, run, storages

    case, packed = tiles.CASES[name]
    launches = attention.launches(case, packed, device)
    tensor = storages([launches[0][1]])[0]
    for _ in range(2):
        run([launch for _, launch in launches], tensor)
    torch.cuda.synchronize()


def main(given: list[str] | None = None) -> int:
    options_parser = parser(__doc__, 60)
    options_parser.add_argument("--launch", choices=CASES, metavar="CASE", help="only run the launches of this case")
    options = options_parser.parse_args(given)
    if options.launch:
        launch(options.launch, options.device)
        return 0
    sections = [part for section in SECTIONS for part in ("--section", section)]
    ncu = ["ncu", "--clock-control", "none", "--csv", "--kernel-name", KERNELS, "--launch-skip", "3", *sections]
    for name in CASES:
        command = [*ncu, sys.executable, "-m", "benchmarks.quick.profile", "--launch", name]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=options.seconds / len(CASES), check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped", flush=True)
            return CUT
        (options.out / f"profile-{name.replace(' ', '-')}.csv").write_text(done.stdout)
        lines = [line for line in done.stdout.splitlines() if '"Duration"' in line]
        print(f"{name}: exit status {done.returncode}, {len(lines)} kernels", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
