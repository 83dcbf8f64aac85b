"""The command `verify`: the parity table of every op on this device."""

from __future__ import annotations

import argparse

import torch

from .. import backends, extension
from .verification import describe, parity, print_parity


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add nothing: the common options are all."""


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 if an op fails, or no kernel ran."""
    print(describe(args.device))
    passed = print_parity(parity(args.device))
    if backends.current() == "auto" and backends.choose("attention", args.device, torch.float32)[0] == "reference":
        print(f"no kernel ran, the reference was compared with itself: {extension.status()}")
        return 1
    return 0 if passed else 1
