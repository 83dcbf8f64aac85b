"""Writes docs/reference/commands.md: every command of the command line, and its options.

``python tools/command_page.py`` writes the page; with ``--check`` the exit code is 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from transformer_fast import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
HEAD = """# Command line

    transformer-fast COMMAND [options]

`python -m transformer_fast` is the same. `COMMAND --help` prints what stands here. `python tools/command_page.py`
writes this page.
"""
FOOT = """
## Exit codes

| code | meaning |
| --- | --- |
| 0 | done |
| 1 | the command failed on this machine; for `verify` and `demo`: a check failed |
| 2 | the arguments or the files given are wrong |
| 130 | interrupted |

An expected error is one line on standard error. `TRANSFORMER_FAST_DEBUG=1` shows the traceback.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(part for name in cli.COMMANDS for part in section(name)) + FOOT


def section(name: str) -> Iterator[str]:
    """Yield the parts of a command: its line, its description, and a table for each group of options."""
    parser = command_parser(name)
    yield f"\n## {name}\n\n{sentence(cli.COMMANDS[name].help)}\n"
    if parser.usage:
        yield f"\n    {parser.usage.replace('%(prog)s', parser.prog)}\n"
    if parser.description:
        yield f"\n{sentence(' '.join(parser.description.split()))}\n"
    for group in parser._action_groups:
        rows = [row(action) for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if rows:
            title = (group.title or "options").capitalize()
            note = f"\n{sentence(' '.join(group.description.split()))}\n" if group.description else ""
            yield f"\n### {name}: {title}\n{note}\n| option | what it does |\n| --- | --- |\n{''.join(rows)}"


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with its arguments."""
    parser = cli._parser(name)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices[name]


def row(action: argparse.Action) -> str:
    """Return the line of an option in its table."""
    value = ""
    if action.nargs != 0:
        name = action.metavar or (
            "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        )
        value = {"+": f" {name} [{name} ...]", "*": f" [{name} ...]", "?": f" [{name}]"}.get(action.nargs, f" {name}")
    names = [f"{option}{value}" for option in action.option_strings] or [value.strip()]
    text = " ".join((action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%").split())
    return f"| {', '.join(map(code, names))} | {cell(text)} |\n"


def code(text: str) -> str:
    """Mark a text as code of a table cell; Markdown would show the backslash before a bar."""
    return f"<code>{cell(text)}</code>" if "|" in text else f"`{cell(text)}`"


def cell(text: str) -> str:
    """Escape a text for a table cell."""
    return text.replace("<", "&lt;").replace("|", "&#124;")


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', ':')) else '.'}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
