"""The command line: `python -m transformer_fast`, also `transformer-fast`.

Exit codes: 0 done; 1 it could not be done here (or, for `verify` and `demo`, something failed its check); 2 the
arguments or the files given are wrong; 130 interrupted. An expected error is one line on standard error; set
TRANSFORMER_FAST_DEBUG=1 to see where it came from.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from .. import __version__, backends, extension
from . import checkpoints, info, score, translate
from .info import EXTRAS

NEEDED = {"demo": ("translation", "plots")}  # extras of a command that needs more than one


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see the top of this file)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(training=argv[:1] == ["train"]).parse_args(argv)
        with backends.backend(getattr(args, "backend", None) or backends.current()):
            return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output (head, less) has closed it; Python must not write there at exit either.
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
    """What an expected error exits with; None for a bug, which keeps its traceback."""
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


def _parser(*, training: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="transformer-fast", description="The classic Transformer, fast: train it, translate with it, check it."
    )
    parser.add_argument("--version", action="version", version=f"transformer_fast {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--backend", choices=backends.NAMES, help="which kernels to run (default: auto)")
    with_device = argparse.ArgumentParser(add_help=False, parents=[common])
    with_device.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "demo", parents=[with_device], help="train a small translator here, check and time every op, draw two pictures"
    )
    command.add_argument("--out", default="demo", metavar="DIR", help="folder for what it makes (default: %(default)s)")
    command.add_argument("--max-steps", type=int, metavar="N", help="updates of training (default: the recipe's)")
    command.add_argument(
        "--max-time", metavar="T", default="5m", help="stop training after this long (default: %(default)s)"
    )
    command.set_defaults(run=_demo)

    command = commands.add_parser("train", parents=[common], help="train a translator on two line-aligned files")
    command.usage = "%(prog)s --source F --target F --save DIR [options]"
    command.description = (
        "Train a translator on two text files whose lines belong together. Learns a joint subword vocabulary, trains,"
        " and writes checkpoints into --save; the same command again goes on where it stopped. Ctrl-C saves and ends."
    )
    if training:  # needs the extras for translation
        from . import train

        train.add_arguments(command)
        command.set_defaults(run=train.run)

    command = commands.add_parser("translate", parents=[with_device], help="translate lines: standard input to output")
    command.usage = "%(prog)s --model DIR [DIR ...] [options]"
    translate.add_arguments(command)
    command.set_defaults(run=lambda args: translate.run(args, _device(args.device)))

    command = commands.add_parser("score", help="BLEU of translations against their references")
    score.add_arguments(command)
    command.set_defaults(run=score.run)

    command = commands.add_parser("average", help="the mean of a run's last checkpoints, as a model")
    command.description = (
        "Write the mean of the weights of a run's last checkpoints (of epochs, where it validates each) into the run's"
        " folder; `translate --which average` uses it."
    )
    command.add_argument("--model", required=True, metavar="DIR", help="the folder that `train --save` wrote")
    command.add_argument(
        "--last", type=int, default=10, metavar="N", help="how many checkpoints (default: %(default)s)"
    )
    command.set_defaults(run=_average)

    command = commands.add_parser("import", help="a Marian or OPUS-MT model of Hugging Face, as a run")
    checkpoints.add_import_arguments(command)
    command.set_defaults(run=checkpoints.run_import)

    command = commands.add_parser("export", help="a run, for Hugging Face transformers or CTranslate2")
    checkpoints.add_export_arguments(command)
    command.set_defaults(run=checkpoints.run_export)

    command = commands.add_parser(
        "verify", parents=[with_device], help="parity table of every op here; exit code 1 if one fails"
    )
    command.set_defaults(run=_verify)

    command = commands.add_parser(
        "info", parents=[common], help="versions, the extension's build, which backend and why"
    )
    command.add_argument("--build", action="store_true", help="only the extension; exit code 1 if it is not there")
    command.set_defaults(run=info.run)

    command = commands.add_parser(
        "plot", parents=[with_device], help="draw the positional encoding, and a translation's attention"
    )
    command.add_argument("--out", default=".", metavar="DIR", help="folder for the pictures (default: here)")
    command.add_argument("--model", metavar="DIR", help="a trained model, for the attention")
    command.add_argument("--text", help="the sentence to translate and draw, with --model")
    command.set_defaults(run=_plot)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from ..translation import parse_duration
    from .demo import demo

    changes: dict[str, object] = {"max_time": parse_duration(args.max_time)}
    if args.max_steps is not None:
        changes["max_steps"] = args.max_steps
    return 0 if demo(args.out, device=_device(args.device), **changes) else 1


def _average(args: argparse.Namespace) -> int:
    from ..translation import RunFolder, average_checkpoints, save_average

    folder = RunFolder(args.model)
    average = average_checkpoints(folder, args.last)
    save_average(folder, average)
    print(f"{folder.average}: the mean of the checkpoints {', '.join(map(str, average.steps))}")
    print(f"translate with it: translate --model {args.model} --which average")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from .verification import describe, parity, print_parity

    device = _device(args.device)
    print(describe(device))
    passed = print_parity(parity(device))
    if backends.current() == "auto" and backends.choose("attention", device, torch.float32)[0] == "reference":
        print(f"no kernel ran, the reference was compared with itself: {extension.status()}")
        return 1
    return 0 if passed else 1


def _plot(args: argparse.Namespace) -> int:
    if (args.model is None) != (args.text is None):
        raise ValueError("--model and --text belong together: the picture of attention needs both")
    from .plots import attention_picture, positional_picture

    out = Path(args.out)
    print(positional_picture(out / "positional_encoding.png"))
    if args.model:
        from ..translation import load_trained
        from ..translation.translator import Translator

        trained = load_trained(args.model, device=_device(args.device))
        translator = Translator(trained.model, trained.tokenizer, config=trained.generation)
        ids = translator.decode_ids([args.text])[0]
        print(attention_picture(out / "attention.png", trained.model, trained.tokenizer, args.text, ids))
    return 0


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
