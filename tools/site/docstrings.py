"""Extension of Griffe: docstrings as Markdown.

References such as ``:func:`name` `` become links, and simple tables of reStructuredText become tables of Markdown.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`(~?)([\w.]+)`")
OPTION = re.compile(r"_option\((.+?), (?:f?['\"])(.*?)['\"][,)]", re.DOTALL)
"""A field of ``TrainConfig``: its default and its line in ``train --help``."""
RULE = re.compile(r"=+(?: +=+)+")
RESULT = re.compile(r"^(Returns|Yields):\n( +)(?=\S)", re.MULTILINE)
"""The head of a result. An empty type in front of the text makes Griffe take the type of the signature."""
JOINED = re.compile(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*)")
"""Entry of a section of arguments that has several names."""
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
"""The head of an example. Griffe has such a section under another name, and lets it keep its title."""


class MarkdownDocstrings(griffe.Extension):
    """Rewrites each docstring, and lets a function stand for the module of its name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        functions = {f"{module.path}.{name}": (module, name) for module in modules(pkg) for name in shadowed(module)}
        for module in list(modules(pkg)):
            for alias in (member for member in module.members.values() if member.is_alias):
                if alias.target_path not in functions:
                    with contextlib.suppress(griffe.AliasResolutionError):
                        alias.resolve_target()  # by its path, which may end below
        rewrite(pkg)
        for module, name in functions.values():
            module.members[name] = griffe.Alias(name, module.members[name].members[name], parent=module)


def shadowed(package: griffe.Module) -> Iterator[str]:
    """Yield the names in ``__all__`` that a package imports from modules of the same names that have no other name."""
    for name in map(str, package.exports or ()):
        member = package.members.get(name)
        is_file = isinstance(member, griffe.Module) and not member.is_init_module and len(member.exports or ()) < 2
        if is_file and package.imports.get(name) == f"{member.path}.{name}":
            yield name


def rewrite(obj: griffe.Object) -> None:
    """Turn the docstrings of an object and of all in it into Markdown; their summaries become one line."""
    if obj.docstring:
        text = RESULT.sub(r"\1:\n\2: ", obj.docstring.value)
        text = with_one_name_per_line(EXAMPLE.sub("Examples: Example:", text))
        summary, gap, rest = text.partition("\n\n")
        lines = [*([summary] if RULE.search(summary) else [" ".join(summary.split())]), gap.strip("\n")]
        text = "\n".join(with_tables([*lines, *rest.splitlines()]))  # before links, which are longer than columns
        obj.docstring.value = ROLE.sub(lambda match: link(match, obj), text)
    if isinstance(obj, griffe.Function):
        for parameter in list(obj.parameters):
            parameter.default = plain_default(parameter.default)
            if str(parameter.annotation) == "Never":  # there to refuse it
                del obj.parameters[parameter.name]
    if isinstance(obj, griffe.Attribute) and (said := OPTION.match(str(obj.value))):
        obj.docstring = obj.docstring or griffe.Docstring(f"{said[2]}.", parent=obj)
        obj.value = plain_default(obj.value)
    for member in obj.members.values():
        if not member.is_alias:
            rewrite(member)


def plain_default(default: Any) -> Any:
    """Return the default of an option of ``TrainConfig``, None if it has none; any other default as it is."""
    if said := OPTION.match(str(default)):
        return None if said[1].endswith("MISSING") else said[1]
    return default


def modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """Yield a package and all modules in it."""
    yield package
    for member in package.members.values():
        if isinstance(member, griffe.Module):
            yield from modules(member)


def link(match: re.Match[str], obj: griffe.Object) -> str:
    """Return a reference as a link; without a target where the site has none."""
    short, name = match.groups()
    target = obj.package.imports.get(name.removeprefix("transformer_fast."), name)  # what stands in the root
    if not target.startswith("transformer_fast"):
        target = full_name(name, obj)
    shown = name.rpartition(".")[2] if short or name.startswith(".") else name
    return f'<autoref identifier="{target}" optional>`{shown}`</autoref>' if target else f"`{shown}`"


def full_name(name: str, obj: griffe.Object) -> str:
    """Return the dotted path of a name that a docstring uses; "" if it is not found."""
    scope: griffe.Object | None = obj
    while scope is not None:
        try:
            return scope.resolve(name)
        except griffe.NameResolutionError:
            scope = scope.parent
    return ""


def with_one_name_per_line(text: str) -> str:
    """Return a docstring whose sections of arguments name one argument per entry: "q, k: text" becomes two entries."""
    out: list[str] = []
    names: list[str] = []
    entry: list[str] = []

    def close() -> None:
        for name in names:
            out.extend([f"    {name}: {entry[0]}", *entry[1:]])
        names.clear()
        entry.clear()

    inside = False
    for line in text.splitlines():
        if not line.startswith(" ") and line.strip():
            close()
            inside = line in ("Args:", "Attributes:")
        joined = JOINED.fullmatch(line) if inside else None
        if joined or (names and re.match(r" {4}\S", line)):
            close()
        if joined:
            names, entry = joined[1].split(", "), [joined[2]]
        elif names:
            entry.append(line)
        else:
            out.append(line)
    close()
    return "\n".join(out)


def with_tables(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with its simple tables as Markdown."""
    out: list[str] = []
    rules = [number for number, line in enumerate(lines) if RULE.fullmatch(line.strip())]
    at = 0
    while rules:
        first = rules.pop(0)
        columns = [match.span() for match in re.finditer("=+", lines[first])]
        last = rules.pop(0)
        head, body = [], lines[first + 1 : last]
        if rules and lines[rules[0]] == lines[first] and not any(not line.strip() for line in lines[last : rules[0]]):
            head, body, last = body, lines[last + 1 : rules[0]], rules.pop(0)
        rows = [cells(line, columns) for line in body]
        merged: list[list[str]] = []
        for row in rows:
            if row[0] or not merged:
                merged.append(row)
            else:  # it continues the row above
                merged[-1] = [" ".join(filter(None, pair)) for pair in zip(merged[-1], row, strict=True)]
        titles = cells(head[0], columns) if head else [""] * len(columns)
        table = [titles, ["---"] * len(columns), *merged]
        out += [*lines[at:first], "", *(f"| {' | '.join(row)} |" for row in table), ""]
        at = last + 1
    return out + lines[at:]


def cells(line: str, columns: list[tuple[int, int]]) -> list[str]:
    """Return the cells of a line of a simple table; the last one has no right edge."""
    starts = [start for start, _ in columns]
    ends: list[int | None] = [*starts[1:], None]
    return [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
