"""Site of the documentation: it has every public name, command and environment variable, and a complete navigation."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import transformer_fast
from transformer_fast.swap.forms import FORMS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
SETTINGS = ROOT / "tools/site/mkdocs.yml"
NAVIGATION = re.search(r"^nav:\n((?: .*\n|\n)*)", SETTINGS.read_text(), re.MULTILINE)[1]
INTERNAL = {
    "transformer_fast.accelerate.packed",
    "transformer_fast.huggingface",
}
"""Packages whose ``__all__`` is for their parent package."""

LOADED = re.compile(r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* rel="(?!canonical)[^>]* href="https?:')
"""URLs that a page loads from another host."""


def hook(name: str) -> ModuleType:
    """Load a file of tools/site."""
    spec = spec_from_file_location(name, ROOT / f"tools/site/{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public_modules() -> Iterator[ModuleType]:
    """Yield each module that has ``__all__``, and its names."""
    yield transformer_fast
    for found in pkgutil.walk_packages(transformer_fast.__path__, "transformer_fast."):
        path = ROOT / (found.name.replace(".", "/") + ("/__init__.py" if found.ispkg else ".py"))
        if path.exists() and "\n__all__ = " in path.read_text() and found.name not in INTERNAL:
            yield importlib.import_module(found.name)


def directives() -> Iterator[tuple[str, list[str] | None]]:
    """Yield (module, names) per directive of the API pages; names is None for the whole ``__all__``."""
    for page in sorted(REFERENCE.glob("*.md")):
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text(), re.MULTILINE):
            members = re.search(r"^ +members: \[(.*)\]", options, re.MULTILINE)
            yield name, members[1].split(", ") if members else None
            if "show_submodules: true" in options:
                left_out = re.findall(r'"!(.*?)"', options)
                for module in pkgutil.iter_modules(importlib.import_module(name).__path__):
                    if not any(re.search(pattern, module.name) for pattern in left_out):
                        yield f"{name}.{module.name}", None


def shown() -> Iterator[tuple[str, object]]:
    """Yield the name and the object of everything on the API pages."""
    for name, members in directives():
        module = importlib.import_module(name)
        yield name, module
        for member in members or getattr(module, "__all__", own_functions(module)):
            yield f"{name}.{member}", getattr(module, member)


def own_functions(module: ModuleType) -> list[str]:
    """Return the public functions and classes that a module defines."""
    own = ((name, getattr(value, "__module__", "")) for name, value in vars(module).items())
    return [name for name, home in own if home == module.__name__ and not name.startswith("_")]


@pytest.mark.parametrize("module", list(public_modules()), ids=lambda module: module.__name__)
def test_every_public_name_is_on_a_page(module: ModuleType) -> None:
    on_pages = {id(value) for _, value in shown()}
    missing = [name for name in module.__all__ if id(getattr(module, name)) not in on_pages]
    assert not missing, "add a `::: module` to a page of docs/reference"


def test_the_pages_name_only_what_exists() -> None:
    assert len(dict(shown())) > 200


def test_every_public_name_has_a_docstring() -> None:
    """The site omits names without a docstring. Constants and aliases have a string after them."""
    bare = [name for name, value in shown() if callable(value) and not (value.__doc__ or "").strip()]
    assert not bare


def test_every_page_is_in_the_navigation_and_the_other_way_round() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    named = re.findall(r"(\S+\.md)$", NAVIGATION, re.MULTILINE)
    assert len(named) == len(set(named)) and pages <= set(named)
    outside = {
        name.replace("readme", "README").replace("examples/", "") for name in named if not (DOCS / name).exists()
    }
    notebooks = {f"{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")}
    assert notebooks < outside and all((ROOT / name).exists() for name in outside - notebooks)


def test_a_reader_has_few_pages_to_choose_from() -> None:
    """Five groups hold the how-tos; a new one takes the place of another or becomes a part of one."""
    groups = dict(re.findall(r"^  - (.+):\n((?:      .*\n)+)", NAVIGATION, re.MULTILINE))
    how_tos = ("Start", "Speed up a model", "Attention", "GPU", "Translate and deploy")
    assert [*groups] == [*how_tos, "Learn", "Reference", "Results", "Develop"]
    assert sum(len(groups[name].splitlines()) for name in how_tos) <= 22


def test_every_page_of_the_reference_is_in_its_table() -> None:
    index = (REFERENCE / "index.md").read_text()
    assert {path.name for path in REFERENCE.glob("*.md")} - {"index.md"} == set(re.findall(r"\]\((\w+\.md)\)", index))


def test_links_of_the_reference_lead_somewhere() -> None:
    for page in REFERENCE.glob("*.md"):
        for path in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / path).exists(), f"{page.name}: {path}"


def test_what_a_tool_writes_is_up_to_date() -> None:
    """The page of the commands says what they say."""
    tool = "tools/command_page.py"
    done = subprocess.run([sys.executable, tool, "--check"], cwd=ROOT)
    assert done.returncode == 0, f"python {tool} writes it again"


def test_the_table_of_hand_written_modules_has_the_names_of_each_form() -> None:
    page = (DOCS / "accelerate.md").read_text()
    table = page.split("| hand-written structure, by")[1].split("\n\n")[0]
    for form in FORMS.values():
        names = {*form.children, *form.parameters, *form.attributes}
        assert any(f"`{name}`" in table for name in names) or form.bases, f"the table has no name of {form.name}"


def test_every_environment_variable_is_on_its_page() -> None:
    sources = [*(ROOT / "transformer_fast").rglob("*.py"), ROOT / "setup.py", *ROOT.glob("tests/project/test_pack*.py")]
    read = {name for path in sources for name in re.findall(r"environ\S*\W(\w*TRANSFORMER_FAST_\w+)", path.read_text())}
    listed = set(
        re.findall(r"^\| .*?`(TRANSFORMER_FAST_\w+)`", (REFERENCE / "environment.md").read_text(), re.MULTILINE)
    )
    assert read == listed and len(read) > 5


def test_every_public_exception_is_on_its_page() -> None:
    page = (REFERENCE / "errors.md").read_text()
    errors = {
        name
        for module in public_modules()
        for name in module.__all__
        if isinstance(value := getattr(module, name), type) and issubclass(value, Exception)
    }
    assert errors and errors == set(re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE))


@pytest.mark.skipif(find_spec("griffe") is None, reason="griffe is missing: `make setup` installs it")
def test_each_argument_has_a_row_of_its_own() -> None:
    """A docstring may join names ("q, k, v: ..."); the site shows one row per argument, with its default."""
    griffe, tool = importlib.import_module("griffe"), hook("docstrings")
    loaded = {"search_paths": [str(ROOT)], "extensions": griffe.load_extensions(tool.MarkdownDocstrings)}
    package, rows, joined = griffe.load("transformer_fast", **loaded), {}, []
    for module in tool.modules(package):
        for member in (module, *module.members.values()):
            if member.is_alias or not member.docstring:
                continue
            cells = [
                cell for line in member.docstring.value.splitlines() if line[:1] == "|" for cell in line.split("|")
            ]
            assert all(cell.count("<autoref") == cell.count("</autoref>") for cell in cells), "a cell cuts a link"
            for section in member.docstring.parse("google", warnings=False):
                if section.kind.value == "parameters":
                    rows[member.path] = {row.name: row.default for row in section.value}
                    joined += [(member.path, row.name) for row in section.value if "," in row.name]
    assert len(rows) > 100 and not joined
    embedding = rows["transformer_fast.dialects.bert.BERTEmbedding"]  # its docstring says "vocab_size, embed_size: ..."
    assert embedding["vocab_size"] is None and embedding["embed_size"] == "512"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is missing: `make setup` installs it")
def test_the_first_page_names_the_repository_before_its_first_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = hook("outside_files")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"), meta={})
    text = (DOCS / "index.md").read_text()
    monkeypatch.setenv("TRANSFORMER_FAST_URL", "https://host/owner/name")
    first, _, _ = tool.on_page_markdown(text, page).partition("![")
    assert "[Repository](https://host/owner/name)" in first and "```python" in first and "    pip install" in first
    monkeypatch.delenv("TRANSFORMER_FAST_URL")
    assert "[Repository]" not in tool.on_page_markdown(text, page)


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is missing: `make setup` installs it")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_a_page_with_its_code_and_output(path: Path) -> None:
    name = f"examples/{path.name}"
    page, cells = hook("outside_files").notebook_page(name), json.loads(path.read_text())["cells"]
    assert page.startswith(cells[0]["source"][0].strip()) and f"jupyter lab {name}" in page
    for cell in cells:
        if cell["cell_type"] == "code":
            assert "```python\n{}\n```".format("".join(cell["source"])) in page
        for output in cell.get("outputs", []):
            assert "".join(output.get("text", [])).rstrip() in page
    pictures = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    assert page.count("](data:image/png;base64,") == pictures


def test_nothing_of_the_site_comes_from_another_host() -> None:
    settings = SETTINGS.read_text()
    assert "font: false" in settings and not re.search(r"https?://", settings)


@pytest.mark.slow("builds the site, half a minute")
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is missing: `make setup` installs it")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """MkDocs is strict: a dead link, a missing page or an unknown name fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SETTINGS), "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    found = {section["title"] for section in index["docs"]}
    hidden = {
        name
        for module in public_modules()
        for name in module.__all__
        if not isinstance(getattr(module, name), ModuleType) and name not in found
    }
    assert not hidden, "the search does not find them"
    texts = " ".join(f"{section['title']} {section['text']}" for section in index["docs"]).lower()
    missing = [word for word in ("sentence-transformers", "save_pretrained", "lora", "speedup") if word not in texts]
    assert not missing, "the search does not find what users of sentence-transformers look for"
    assert "fixed_dropout_seed" in (tmp_path / "examples/attention_kernel.html").read_text()
    outside = [page.name for page in tmp_path.rglob("*.html") if LOADED.search(page.read_text())]
    assert not outside, "they load something from another host"
