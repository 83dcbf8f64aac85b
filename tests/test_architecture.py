"""Structure of the package: allowed imports, sizes of files, and numbers of parameters."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import transformer_fast

PACKAGE = Path(transformer_fast.__file__).parent
ROOT = PACKAGE.parent

ORDER = (
    *("tracing", "function_mode", "extension", "backends", "tensors", "tensor_cache", "lazy_tensor", "target_checks"),
    *("masks", "attention_params", "reference"),
    *("triton", "ops", "explain", "testing", "compat"),
    "inference",
    *("layers", "models", "dialects"),
    *("huggingface", "integrations", "generation", "swap", "accelerate"),
    *("translation", "cli"),
)
"""Packages and root modules in order: each imports only earlier ones. Late and type-only imports count."""

MOST_LINES, MOST_PARAMETERS = 400, 12

OPS = {"attention", "attention_decode", "attention_packed"}
"""Functions with the parameters of a PyTorch or peer function, and functions that compute them."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(module: str) -> tuple[tuple[str, str], ...]:
    """Return (module, name) of everything that a module of the package imports from it; name is "" for a module."""
    found = []
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name.startswith("transformer_fast")]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            if base.split(".")[0] == "transformer_fast":
                whole = [f"{base}.{alias.name}" for alias in node.names]
                found += [(w, "") if w in MODULES else tuple(w.rsplit(".", 1)) for w in whole]
    return tuple(found)


def room(module: str) -> str:
    """Return the package, or the root module, that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def across() -> Iterator[tuple[str, str, str]]:
    """Yield (module, imported module, imported name) of all imports between packages."""
    for module in MODULES:
        if room(module) not in ("", "__main__"):
            for target, name in imports(module):
                if room(target) != room(module):
                    yield module, target, name


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).exists()]


def test_each_package_imports_those_before_it() -> None:
    rank = {name: number for number, name in enumerate(ORDER)}
    assert {room(module) for module in MODULES} - {"", "__main__"} == set(ORDER)
    up = [
        f"{module} imports {target}"
        for module, target, _ in across()
        if room(target) and rank.get(room(target), len(ORDER)) > rank[room(module)]
    ]
    assert not up


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: {target for target, _ in imports(module) if target in MODULES} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


TRAINED = {"masks", "reference", "triton", "ops", "compat", "layers", "models", "dialects", "huggingface"}
"""Packages that a training step runs."""


def test_training_imports_nothing_of_inference() -> None:
    """In packages that a training step runs, only a function imports it, for a module in evaluation."""
    found = [
        module
        for module in MODULES
        if room(module) in TRAINED
        for node in parsed(MODULES[module]).body
        if isinstance(node, ast.ImportFrom) and "inference" in (node.module or "").split(".")
    ]
    assert not found


def test_no_private_name_leaves_its_package() -> None:
    private = re.compile(r"^_(?!_)")
    found = [
        f"{module}: {target}.{name}"
        for module, target, name in across()
        if any(private.match(part) for part in (*target.split("."), name))
    ]
    assert not found


def test_the_root_is_that_of_a_library() -> None:
    assert len({path.relative_to(ROOT).parts[0] for path in tracked()}) <= 22
    assert len((ROOT / "Makefile").read_text().splitlines()) < 90


def test_files_are_short() -> None:
    files = tracked("*.py", "*.cpp", "*.h", "*.cu", "*.cuh")
    assert files
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files}
    assert not {name: count for name, count in lengths.items() if count > MOST_LINES}


def test_functions_have_few_parameters() -> None:
    """Exempt are kernels, which have all arguments of a launch, and functions and models with a peer's signature."""
    found = []
    for module, path in MODULES.items():
        allowed = {"models": {"__init__"}}.get(room(module), OPS)
        for node in ast.walk(parsed(path)) if room(module) != "compat" else ():
            if isinstance(node, ast.FunctionDef) and node.name not in allowed and not is_kernel(node):
                count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                found += [f"{module}.{node.name}: {count}"] * (count > MOST_PARAMETERS)
    assert not found


def is_kernel(function: ast.FunctionDef) -> bool:
    """Return True for a Triton kernel or device function, and for a function that passes its arguments on."""
    if function.name.endswith(("_kernel", "_launches")):
        return True
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_a_field_has_a_name() -> None:
    """No index into an indexed value, and no third element of a call's result.

    Sizes of a tensor have no names, and neither has the state of a textbook's decoder.
    """
    found = []
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if not (isinstance(node, ast.Subscript) and is_number(node.slice)):
                continue
            inner = node.value
            twice = isinstance(inner, ast.Subscript) and is_number(inner.slice) and ast.unparse(inner.value) != "state"
            third = (
                isinstance(inner, ast.Call) and ast.literal_eval(node.slice) > 1 and ast.unparse(inner.func) != "sizes"
            )
            found += [f"{module}: {ast.unparse(node)}"] * (twice or third)
    assert not found


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def test_no_size_is_looked_up_in_a_written_list() -> None:
    """No ``size in (1, limit)`` with a local value in the list.

    torch.compile compares a constant only with the constants of a list, and misses a symbolic size: it takes
    ``4 in (1, H)`` for false where H is a symbol that is 4. ``broadcasts`` and ``==`` stand for that form. No sizes are
    a dtype, a type, a member of an enumeration, the values beside a string, and what a package reads from files.
    """
    found = []
    for module, path in MODULES.items():
        for function in ast.walk(parsed(path)) if room(module) not in ("translation", "cli") else ():
            if isinstance(function, ast.FunctionDef | ast.Lambda):
                found += [f"{module}: {ast.unparse(node)}" for node in looked_up(function)]
    assert not sorted(set(found))


def looked_up(function: ast.FunctionDef | ast.Lambda) -> Iterator[ast.Compare]:
    """Yield the comparisons ``x in (...)`` of a function in whose written list a local name stands."""
    named = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    local = {node.id for node in named if isinstance(node.ctx, ast.Store)}
    local |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.In | ast.NotIn):
            continue
        listed, sought = node.comparators[0], ast.unparse(node.left)
        members = {
            id(part.value) for part in ast.walk(listed) if isinstance(part, ast.Attribute) and part.attr.isupper()
        }
        names = {part.id for part in ast.walk(listed) if isinstance(part, ast.Name) and id(part) not in members}
        strings = any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(listed))
        if strings or sought.endswith(".dtype") or sought.startswith("type("):
            continue
        if isinstance(listed, ast.Tuple | ast.List | ast.Set) and names & local:
            yield node


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("def f(n, H): return n in (1, H)", True),
        ("def f(n, H): return n not in [1, H]", True),
        ("def f(t, B): return t.shape in ((), (B,))", True),
        ("def f(t):\n    B = t.shape[0]\n    return 0 in {B, 2}", True),
        ("f = lambda t, q: t.shape[0] not in (1, q.shape[0])", True),
        ("def f(n): return n in (None, 0, ALL)", False),
        ("def f(q, k): return k.dtype in (torch.float32, q.dtype)", False),
        ("def f(t, known): return t in known", False),
        ("def f(p): return p.kind in (p.ONE, p.OTHER)", False),
        ("def f(name, names): return name in ('mask', *names)", False),
    ],
)
def test_what_counts_as_looked_up(code: str, refused: bool) -> None:
    functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    assert [bool(list(looked_up(function))) for function in functions] == [refused]


def test_the_sources_that_are_compiled_first_exist() -> None:
    """`setup.py` names them; a renamed one would be compiled last."""
    tracked("setup.py")
    (slow,) = (
        node.value
        for node in parsed(ROOT / "setup.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SLOW"
    )
    stems = [part.value for part in ast.walk(slow) if isinstance(part, ast.Constant)]
    assert stems and not [stem for stem in stems if not (ROOT / "csrc/cpu" / f"{stem}.cpp").exists()]
