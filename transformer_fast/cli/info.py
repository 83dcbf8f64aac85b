"""The command `info`: versions, the extension's build, and which backend each op takes and why."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

import torch

from .. import __version__, backends, extension

EXTRAS = {
    "sentencepiece": "translation",
    "sacrebleu": "translation",
    "safetensors": "translation",
    "tqdm": "translation",
    "matplotlib": "plots",
    "tensorboard": "tensorboard",
    "transformers": "transformers",
    "ctranslate2": "ctranslate2",
}
OPS = ("attention", "norm", "dropout", "embedding")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.add_argument(
        "--build",
        action="store_true",
        help="print the state of the C++ extension only; exit code 1 if it is not loaded",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; with --build, exit code 1 if the extension is not there."""
    if args.build:
        print(f"C++ extension: {extension.status()}")
        return 0 if extension.load() else 1
    print(f"transformer_fast {__version__}, Python {platform.python_version()}, {platform.platform()}")
    numpy, triton = (_version_of(name) or "not installed" for name in ("numpy", "triton"))
    print(f"torch {torch.__version__}, numpy {numpy}, triton {triton}, {torch.get_num_threads()} threads")
    print(f"C++ extension: {extension.status()}")
    for name, value in extension.build_info().items():
        print(f"   {name}: {value}")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        print("CUDA: torch sees no GPU")
    for device in devices:
        what = "cpu" if device.type == "cpu" else f"{device}: {torch.cuda.get_device_name(device)}"
        print(f"{what} (backend {backends.current()})")
        for op in OPS:
            for dtype in (torch.float32, torch.bfloat16):
                print(f"   {op:10} {str(dtype).removeprefix('torch.'):9} {_choice(op, device, dtype)}")
    for module, extra in EXTRAS.items():
        print(f"{module}: {_version_of(module) or f'missing (pip install transformer_fast[{extra}])'}")
    return 0


def _choice(op: str, device: torch.device, dtype: torch.dtype) -> str:
    try:
        name, reason = backends.choose(op, device, dtype)
    except backends.BackendError as error:
        return f"none: {error}"
    return f"{name}: {reason}"


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
