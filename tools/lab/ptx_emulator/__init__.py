"""Emulator of compiled PTX on the CPU; reports faults such as races and invalid accesses. See README.md in this
folder."""

from .launch import Argument, launch
from .report import EmulationError, Finding, Report

__all__ = ["Argument", "EmulationError", "Finding", "Report", "launch"]
