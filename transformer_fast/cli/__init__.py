"""The command line: `python -m transformer_fast`, also `transformer-fast`.

Exit codes: 0 success; 1 the command cannot run here (or, for `verify` and `demo`, a check failed); 2 wrong arguments or
files; 130 interrupted. An expected error is one line on standard error; set TRANSFORMER_FAST_DEBUG=1 to see its
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch

from .. import __version__, backends
from .info import EXTRAS


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        help: line in the list of commands.
        module: module with ``add_arguments(parser)`` and ``run(args)``, which returns the exit code.
        options: the common options that the command takes, of --backend and --device.
    """

    help: str
    module: str
    options: tuple[str, ...] = ()


BOTH = "backend", "device"
COMMANDS = {
    "demo": Command(
        "train a small translator, check and time every op on this machine, draw two pictures", ".demo", BOTH
    ),
    "train": Command("train a translator on two line-aligned files", "..translation.commands.train", ("backend",)),
    "translate": Command(
        "translate lines from standard input to standard output", "..translation.commands.translate", BOTH
    ),
    "score": Command("compute the BLEU of translations against their references", "..translation.commands.score"),
    "average": Command("average the weights of a run's last checkpoints", "..translation.commands.average"),
    "import": Command(
        "import a Marian or OPUS-MT model of Hugging Face as a run", "..translation.commands.import_marian"
    ),
    "export": Command("export a run to Hugging Face transformers or CTranslate2", "..translation.commands.export"),
    "verify": Command("print the error of every op on this machine; exit code 1 if one is too large", ".verify", BOTH),
    "measure": Command(
        "time a model of Hugging Face on your texts, plain and accelerated, and compare the results", ".measure", BOTH
    ),
    "info": Command(
        "print versions, the build of the extension, and the chosen backends with the reasons", ".info", ("backend",)
    ),
    "plot": Command("draw the positional encoding, and the attention of a translation", ".plot", BOTH),
}
NEEDED = {"demo": ("translation", "plots")}  # optional dependencies of commands that need several


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see the top of this file)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(argv[0] if argv else "").parse_args(argv)
        if "device" in COMMANDS[argv[0]].options:  # of `train`, it is a setting of the run
            args.device = _device(args.device)
        with backends.backend(getattr(args, "backend", None) or backends.current()):
            return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output (head, less) has closed the pipe; Python must not write to the pipe at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        code = _exit_code(error)
        if code is None or os.environ.get("TRANSFORMER_FAST_DEBUG") == "1":
            raise
        print(f"transformer_fast: error: {_message(error, argv[0])}", file=sys.stderr)
        return code


def _exit_code(error: Exception) -> int | None:
    """Exit code of an expected error; None for a bug, which keeps its traceback."""
    if isinstance(error, ModuleNotFoundError):
        return 1 if _missing(error) in EXTRAS else None
    # The translation package needs its extras to be imported; its errors can only come from it when it was.
    translation = sys.modules.get("transformer_fast.translation.errors")
    if translation and isinstance(error, translation.DivergedError):
        return 1
    if translation and isinstance(error, translation.TranslationError):
        return 2
    wrong_path = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
    if isinstance(error, (ValueError, *wrong_path)):
        return 2
    if isinstance(error, (OSError, backends.BackendError, FloatingPointError, torch.OutOfMemoryError)):
        return 1
    return None


def _missing(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


def _message(error: Exception, command: str) -> str:
    if isinstance(error, ModuleNotFoundError):
        extras = NEEDED.get(command, (EXTRAS[_missing(error)],))
        # All packages that are missing, not only the first one imported; that one may be there, but too old.
        packages = [name for name, extra in EXTRAS.items() if extra in extras and find_spec(name) is None]
        needed = ", ".join(packages or [_missing(error)])
        return f"this command needs {needed}; run: pip install 'transformer_fast[{','.join(extras)}]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Parser of all commands, with the arguments of the chosen command; only that command's module is imported."""
    parser = argparse.ArgumentParser(
        prog="transformer-fast",
        description="Padded Transformers, faster in PyTorch on a CPU and a GPU, without changing what they compute.",
    )
    parser.add_argument("--version", action="version", version=f"transformer_fast {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (help_line, module_name, options) in COMMANDS.items():
        command = commands.add_parser(name, help=help_line)
        if name != chosen:
            continue
        if "backend" in options:
            command.add_argument("--backend", choices=backends.NAMES, help="which kernels to run (default: auto)")
        if "device" in options:
            command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
        module = import_module(module_name, __package__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {name!r}, but torch sees {torch.cuda.device_count()} GPUs on this machine")
    return device
