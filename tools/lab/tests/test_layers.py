"""Imports of the laboratory run one way: the emulator's modules in the order of its layers, and nothing of the project
in the emulator."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LAB = Path(__file__).resolve().parents[1]
EMULATOR = LAB / "ptx_emulator"
LAYERS = {
    "text and numbers": ("report", "arithmetic", "fragments", "wgmma_layout", "kernel", "functions", "parser"),
    "machine state": ("state", "program", "wgmma_analysis"),
    "memory": ("sanitizer", "wgmma_shadow", "memory", "machine"),
    "instructions": ("accesses", "async_copy", "warp", "wgmma_operands", "wgmma"),
    "kernels": (
        *("codegen", "codegen_values", "codegen_arithmetic", "codegen_memory", "codegen_warp", "codegen_wgmma"),
        "blocks",
    ),
    "runner": ("launch", "__init__", "triton_driver", "mutants", "idle_mutants", "judge"),
}
"""Modules of the emulator in order: each imports only earlier ones. Late and type-only imports count."""
OUTSIDE = {"numpy", "torch", "triton"}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports; those of its own package with a dot before their name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield f".{node.module}"
        elif isinstance(node, ast.ImportFrom):  # from . import module, or a name of the package itself
            for alias in node.names:
                yield f".{alias.name}" if (path.parent / f"{alias.name}.py").exists() else ".__init__"


def test_each_module_of_the_emulator_imports_those_before_it() -> None:
    order = [f".{name}" for layer in LAYERS.values() for name in layer]
    assert sorted(order) == sorted(f".{path.stem}" for path in EMULATOR.glob("*.py"))
    up = [
        f"{name} imports {target}"
        for place, name in enumerate(order)
        for target in imports(EMULATOR / f"{name[1:]}.py")
        if target.startswith(".") and target not in order[:place]
    ]
    assert not up


def test_the_emulator_uses_nothing_of_the_project() -> None:
    found = {target.split(".")[0] for path in EMULATOR.glob("*.py") for target in imports(path)}
    assert found - {""} - sys.stdlib_module_names <= OUTSIDE
