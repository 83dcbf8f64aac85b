"""Functions of a PTX module, put in where they are called.

A compiler calls a function for what is long and rare, such as the power of two doubles. Its parameters and its result
become local memory of the caller, its body a block of the caller's, whose registers and labels are its own.
"""

from __future__ import annotations

import itertools
import re

FUNCTION = re.compile(
    r"\.func\s*(?:\(\s*(?P<result>[^()]*?)\s*\)\s*)?(?P<name>[\w$]+)\s*\(\s*(?P<parameters>[^()]*?)\s*\)(?P<attributes>[^;{]*)\{"
)
CALL = re.compile(
    r"call(?:\.uni)?\s+(?:\(\s*(?P<result>[\w$]+)\s*\)\s*,\s*)?(?P<name>[\w$]+)\s*(?:,\s*\(\s*(?P<given>[^()]*?)\s*\)\s*)?;"
)
PARAMETER = re.compile(r"\.param(\s+(?:\.align\s+\d+\s+)?\.\w+\s+)([\w$]+)(\s*(?:\[\d+\])?\s*;)")
LABEL = re.compile(r"(?<![\w$%])(\$?[\w$]+)\s*:(?!:)")


def with_calls_inlined(text: str) -> str:
    """A module without comments in which no function is called that it defines; every character keeps its line."""
    functions = {}
    while found := FUNCTION.search(text):
        end = _closing_brace(text, found.end() - 1)
        functions[found["name"]] = found, text[found.end() : end]
        text = text[: found.start()] + re.sub(r"[^\n]", " ", text[found.start() : end + 1]) + text[end + 1 :]
    numbers = itertools.count()
    while call := next((c for c in CALL.finditer(text) if c["name"] in functions), None):
        head, body = functions[call["name"]]
        inlined = _inlined(next(numbers), call, head, body)
        start = _in_local_memory(text, call)
        lines = "\n" * text.count("\n", call.start(), call.end())
        text = start + " ".join(inlined.split()) + lines + _of_result(text[call.end() :], call["result"])
    return text


def _inlined(number: int, call: re.Match[str], head: re.Match[str], body: str) -> str:
    """The body of a function as a block, for one call."""
    own = {
        *(name for _, name, _ in PARAMETER.findall(body)),
        *re.findall(r"\.local\s+(?:\.align\s+\d+\s+)?\.\w+\s+([\w$]+)", body),
        *LABEL.findall(body),
    }
    names = {name: f"{name}$call{number}" for name in own}
    given = [name.strip() for name in (call["given"] or "").split(",") if name.strip()]
    names |= dict(
        zip((declared.split()[-1] for declared in head["parameters"].split(",") if declared), given, strict=True)
    )
    if head["result"]:
        names[re.sub(r"\[\d+\]$", "", head["result"].split()[-1])] = call["result"]
    body = re.sub(r"(?<![\w$%.])[\w$]+", lambda found: names.get(found.group(), found.group()), body)
    body = re.sub(r"\b(ld|st)\.param\b", r"\1.local", body)
    body = PARAMETER.sub(r".local\1\2\3", body)
    end = f"$end$call{number}"
    return "{" + re.sub(r"\bret\s*;", f"bra.uni {end};", body) + f" {end}: " + "}"


def _in_local_memory(text: str, call: re.Match[str]) -> str:
    """What stands before a call, in whose block its parameters and result are declared and stored."""
    start = text.rindex("{", 0, call.start())
    block = PARAMETER.sub(r".local\1\2\3", text[start : call.start()])
    return text[:start] + re.sub(r"\bst\.param\b", "st.local", block)


def _of_result(text: str, result: str | None) -> str:
    """What stands behind a call, in whose block its result is loaded."""
    end = text.index("}")
    if result is None:
        return text
    return (
        re.sub(rf"\bld\.param(\.\w+(?:\.\w+)?\s+[^;]*\[\s*{re.escape(result)}\b)", r"ld.local\1", text[:end])
        + text[end:]
    )


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.start()
    raise ValueError("a function of the PTX text is not closed")
