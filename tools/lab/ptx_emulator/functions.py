"""Inlining of the functions of a PTX module.

A compiler calls a function for what is long and rare, such as the power of two doubles. The parameters and the result
of the function become local memory of the caller, its body a block of the caller's with registers and labels of its
own.
"""

from __future__ import annotations

import itertools
import re

from .report import EmulationError

FUNCTION = re.compile(
    r"\.func\s*(?:\(\s*(?P<result>[^()]*?)\s*\)\s*)?(?P<name>[\w$]+)\s*\(\s*(?P<parameters>[^()]*?)\s*\)(?P<attributes>[^;{]*)\{"
)
CALL = re.compile(
    r"call(?:\.uni)?\s+(?:\(\s*(?P<result>[\w$]+)\s*\)\s*,\s*)?(?P<name>[\w$]+)\s*(?:,\s*\(\s*(?P<given>[^()]*?)\s*\)\s*)?;"
)
PARAMETER = re.compile(r"\.param(\s+(?:\.align\s+\d+\s+)?\.\w+\s+)([\w$]+)(\s*(?:\[\d+\])?\s*;)")
LABEL = re.compile(r"(?<![\w$%])(\$?[\w$]+)\s*:(?!:)")


def with_calls_inlined(text: str) -> str:
    """Inline all calls of functions that a module without comments defines; every character keeps its line."""
    functions = {}
    while found := FUNCTION.search(text):
        end = closing_brace(text, found.end() - 1)
        functions[found["name"]] = found, text[found.end() : end]
        text = text[: found.start()] + re.sub(r"[^\n]", " ", text[found.start() : end + 1]) + text[end + 1 :]
    numbers = itertools.count()
    while call := next((c for c in CALL.finditer(text) if c["name"] in functions), None):
        suffix = f"$call{next(numbers)}"
        # A compiler declares a call's parameters and its result in the block around it.
        start, end = text.rindex("{", 0, call.start()), text.index("}", call.end())
        block = _as_local_memory(text[start:end], suffix)
        call = next(c for c in CALL.finditer(block) if c["name"] in functions)
        inlined = " ".join(_inlined(suffix, call, *functions[call["name"]]).split())
        lines = "\n" * block.count("\n", call.start(), call.end())
        text = text[:start] + block[: call.start()] + inlined + lines + block[call.end() :] + text[end:]
    return text


def _as_local_memory(text: str, suffix: str) -> str:
    """Rewrite parameter declarations as local memory, with a suffix on their names."""
    text = _renamed(text, {name: name + suffix for _, name, _ in PARAMETER.findall(text)})
    text = PARAMETER.sub(r".local\1\2\3", text)
    return re.sub(rf"\b(ld|st)\.param(?=[^;]*{re.escape(suffix)}\b)", r"\1.local", text)


def _inlined(suffix: str, call: re.Match[str], head: re.Match[str], body: str) -> str:
    """Return the body of a function as a PTX block, for one call."""
    own = {*re.findall(r"\.local\s+(?:\.align\s+\d+\s+)?\.\w+\s+([\w$]+)", body), *LABEL.findall(body)}
    names = {name: name + suffix for name in own}
    given = [name.strip() for name in (call["given"] or "").split(",") if name.strip()]
    parameters = [parameter.split()[-1] for parameter in head["parameters"].split(",") if parameter.strip()]
    names |= dict(zip(parameters, given, strict=True))
    if head["result"]:
        names[re.sub(r"\[\d+\]$", "", head["result"].split()[-1])] = call["result"]
    body = re.sub(rf"\b(ld|st)\.param(?=[^;]*{re.escape(suffix)}\b)", r"\1.local", _renamed(body, names))
    end = f"$end{suffix}"
    return "{" + re.sub(r"\bret\s*;", f"bra.uni {end};", body) + f" {end}: " + "}"


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub(r"(?<![\w$%.])[\w$]+", lambda found: names.get(found.group(), found.group()), text)


def closing_brace(text: str, start: int) -> int:
    """Index of the closing brace for the brace at `start`."""
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
    raise EmulationError("a body of the PTX text is not closed")
