"""Executes compiled PTX on the CPU and reports what is wrong with it. See README.md in this folder."""

from .launch import Argument, launch
from .report import EmulationError, Finding, Report

__all__ = ["Argument", "EmulationError", "Finding", "Report", "launch"]
