"""``make hub``: the Triton attention as a kernel of Hugging Face's hub, in build/hub, for its kernel-builder.

hub/ has what is written for it: build.toml, the card, the public function (kernel.py), and a stand-in for the C++
extension. The modules of the package that they import are copied as they are. The copies import each other by relative
names, and torch, Triton and the standard library. The hub allows no other import, and any other is an error here.
"""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "transformer_fast"
NAME = "transformer_fast_attention"
OWN = {"": ROOT / "hub/kernel.py", "extension": ROOT / "hub/extension.py"}
ALLOWED = {"torch", "triton", *sys.stdlib_module_names}


def file_of(module: str) -> Path | None:
    """The file of a module, by its name in the kernel; None where it is a name within another module."""
    if module in OWN:
        return OWN[module]
    path = PACKAGE / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def imports(module: str, file: Path) -> set[str]:
    """Modules of the kernel that a module imports, late and type-only imports too.

    Raises:
        ValueError: it imports what the hub does not allow.
    """
    is_package = module == "" or file.name == "__init__.py"
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = module.split(".") if module else []
            up = node.level - is_package
            parts = [*parts[: len(parts) - up], *filter(None, [node.module])]
            base = ".".join(parts)
            inner = {".".join([*parts, alias.name]) for alias in node.names}
            found |= {base} | {name for name in inner if file_of(name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if others := {name.split(".")[0] for name in names} - ALLOWED:
                raise ValueError(
                    f"{file.relative_to(ROOT)} imports {', '.join(sorted(others))}; the hub has no such module"
                )
    return {".".join(name.split(".")[:count]) for name in found for count in range(1, name.count(".") + 2)} - {""}


def needed() -> dict[str, Path]:
    """Each module of the kernel and its file."""
    modules: dict[str, Path] = {}
    left = {""}
    while left:
        module = left.pop()
        modules[module] = file = file_of(module)
        left |= imports(module, file) - modules.keys()
    return modules


def make(folder: Path) -> Path:
    """Write the kernel's sources; return the folder of its package."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "torch-ext" / NAME
    for module, file in needed().items():
        path = package / module.replace(".", "/")
        is_package = module == "" or file.name == "__init__.py"
        target = path / "__init__.py" if is_package else path.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    for name in ("build.toml", "README.md"):
        shutil.copy(ROOT / "hub" / name, folder)
    return package


if __name__ == "__main__":
    made = make(ROOT / "build/hub")
    print(f"{made}: {len(list(made.rglob('*.py')))} modules")
