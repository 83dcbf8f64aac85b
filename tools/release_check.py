"""``make release-check``: install and use the wheel of a clean clone as a new user would; print one table at the end.

A clone of the last commit makes the wheel for every torch and every Python (``make wheel-all``; its object files are
kept). Then each row gets a new environment with the wheel and nothing else of this project; its packages are those of
the same row of ``make pythons``. There the kernels are compared with the reference, a model takes some training steps,
``verify`` runs, and the demo runs for some seconds from an empty folder. The last row has a torch without an extension:
the eager reference must run there, and must say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pythons import ROOT, Failed, Row, prepared, pythons, rows, variables_of

FOLDER = ROOT / "build/release"
UNKNOWN = "2.99.0"
DEMO_TIME = "12s"
MEGABYTES = 25
# In a .pth file such a line runs when Python starts.
AS_ANOTHER_TORCH = f"import torch; torch.__version__ = torch.torch_version.TorchVersion({UNKNOWN!r})\n"
SMOKE = """
import pathlib, sys, torch, transformer_fast as tfast

home = pathlib.Path(tfast.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), home
config = tfast.__config__()
found, expected = config["file"], sys.argv[1]
assert (found or "").startswith(expected) if expected else found is None, config
gradients = {}
for backend in ("auto", "reference"):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 33, 24, requires_grad=True) for _ in range(3))
    with tfast.backend(backend):
        tfast.attention(q, k, v, causal=True, dropout_p=0.1).square().sum().backward()
    gradients[backend] = torch.stack([q.grad, k.grad, v.grad])
assert torch.allclose(*gradients.values(), atol=1e-4), "the kernels and the reference differ"
model = tfast.Transformer(src_vocab=40, trg_vocab=40, d_model=32, N=1, heads=2, dropout=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
tokens = torch.randint(1, 40, (8, 10))
losses = []
for _ in range(30):
    logits = model(tokens, tokens[:, :-1], None, tfast.AttentionMask.causal())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
print(config["status"])
print("it works")
"""


@dataclasses.dataclass(frozen=True)
class Stranger:
    """A new environment with the wheel.

    Attributes:
        python: its Python.
        extension: beginning of the extension's name that is expected; empty: none.
    """

    python: Path
    extension: str


def new_environment(program: str, packages: Path, wheel: Path, environment: Path) -> Path:
    """Python of a new environment with the wheel; torch and the extras come from a folder by a path alone.

    A `.pth` file in that folder, such as that of an editable install, is not read through such a path.
    """
    shutil.rmtree(environment, ignore_errors=True)
    output([program, "-m", "venv", "--without-pip", str(environment)])
    (own,) = (environment / "lib").glob("python*/site-packages")
    (own / "borrowed.pth").write_text(f"{packages}\n")
    python = environment / "bin/python"
    pip = [program, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    output([*pip, "--ignore-installed", str(wheel)])
    return python


def output(command: list[str], cwd: Path = ROOT, accepted: tuple[int, ...] = (0,)) -> str:
    """Standard output of a command.

    Raises:
        Failed: another exit status than those accepted.
    """
    variables = variables_of(command[0])
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    if done.returncode not in accepted:
        raise Failed(f"{' '.join(command)} ({done.returncode})\n{done.stdout}{done.stderr}")
    return done.stdout


def check_use(stranger: Stranger, folder: Path) -> None:
    """Run the program SMOKE in an empty folder."""
    said = output([str(stranger.python), "-c", SMOKE, stranger.extension], folder)
    if not said.endswith("it works\n"):
        raise Failed(said)
    if not stranger.extension and f"there is no C++ extension for torch {UNKNOWN.rpartition('.')[0]} with" not in said:
        raise Failed(f"expected a message that the extension is missing, got: {said}")


def check_verify(stranger: Stranger, folder: Path) -> None:
    """The parity table; exit code 1 where no kernel ran."""
    expected = 0 if stranger.extension else 1
    output([str(stranger.python.parent / "transformer-fast"), "verify"], folder, (expected,))


def check_demo(stranger: Stranger, folder: Path) -> None:
    """The demo from an empty folder: exit code 1 after a training so short, but all that it makes is there."""
    command = [str(stranger.python.parent / "transformer-fast"), "demo", "--max-time", DEMO_TIME]
    said = output(command, folder, (0, 1))
    made = {path.name for path in (folder / "demo").iterdir()}
    if made != {"attention.png", "data", "positional_encoding.png", "run"} or "FAILED" in said:
        raise Failed(f"made {sorted(made)}\n{said}")


CHECKS: dict[str, Callable[[Stranger, Path], None]] = {"use": check_use, "verify": check_verify, "demo": check_demo}


def stranger_of(row: Row, program: str, folder: Path, wheel: Path, unknown: bool) -> Stranger:
    """A new environment with the torch of a row; with `unknown`, this torch says that it is another one."""
    borrowed = prepared(row, program, folder)
    packages, version = output([borrowed, "-c", "import torch; print(torch.__path__[0], torch.__version__)"]).split()
    python = new_environment(borrowed, Path(packages).parent, wheel, FOLDER / "environment")
    if unknown:
        (own,) = python.parent.parent.glob("lib/python*/site-packages")
        (own / "unknown_torch.pth").write_text(AS_ANOTHER_TORCH)
    return Stranger(python, "" if unknown else f"_C.torch{'.'.join(version.split('.')[:2])}.")


def run_row(stranger: Stranger, row: str, names: list[str]) -> list[str]:
    """Result of each check of these names."""
    results = []
    for name in names:
        empty = FOLDER / "empty"
        shutil.rmtree(empty, ignore_errors=True)
        empty.mkdir(parents=True)
        start = time.monotonic()
        try:
            CHECKS[name](stranger, empty)
            results.append(f"passed ({time.monotonic() - start:.0f} s)")
        except Failed as failure:
            say(f"{row}: {name}: {failure}")
            results.append("FAILED")
    return results


def wheel_of_a_clone() -> Path:
    """The wheel for every pair, from a clone of the last commit, whose compiled objects are kept between runs."""
    clone = FOLDER / "clone"
    if not clone.exists():
        output(["git", "clone", "--quiet", str(ROOT), str(clone)])
    output(["git", "fetch", "--quiet", "origin", "HEAD"], clone)
    output(["git", "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"], clone)
    output(["git", "clean", "--quiet", "-xdff", "--exclude=build/wheel"], clone)
    if subprocess.run([sys.executable, "tools/wheel_all.py"], cwd=clone).returncode != 0:
        sys.exit("release-check: no wheel")
    (wheel,) = (clone / "dist").glob("*.whl")
    return wheel


def say(text: str) -> None:
    print(f"release-check: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to run, by parts of their names: python3.12, torch2.11")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=[*CHECKS], help="checks to run (default: all)")
    parser.add_argument("--wheel", type=Path, help="wheel to check (default: the wheel built from a clone)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".venv-pythons", help="folder with the environments of `make pythons`"
    )
    options = parser.parse_args()
    if options.wheel and not options.wheel.is_file():
        sys.exit(f"release-check: there is no {options.wheel}")
    wheel = (options.wheel or wheel_of_a_clone()).resolve()
    programs = pythons()
    known = rows(list(programs))
    if known[-1].python != known[0].python:
        known.append(dataclasses.replace(known[-1], python=known[0].python))  # the oldest of both
    chosen = [row for row in known if not options.names or any(name in row.name for name in options.names)]
    table = [["", *options.checks]]
    for row, unknown in [*((row, False) for row in chosen), *((row, True) for row in chosen[:1])]:
        name = f"{row.name.partition('-')[0]}-torch{UNKNOWN}" if unknown else row.name
        try:
            stranger = stranger_of(row, programs[row.python], options.folder, wheel, unknown)
            table.append([name, *run_row(stranger, name, options.checks)])
        except Failed as failure:
            say(f"{name}: no environment: {failure}")
            table.append([name, *("FAILED" for _ in options.checks)])
    size = wheel.stat().st_size / 1e6
    say(f"{wheel.name}: {size:.1f} MB")
    for line in table:
        say("   ".join(f"{cell:24}" for cell in line).rstrip())
    return int(size > MEGABYTES or any("FAILED" in line for line in table))


if __name__ == "__main__":
    sys.exit(main())
