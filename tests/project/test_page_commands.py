"""Each command on a page exists and takes the shown options; new pages are included automatically."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from pathlib import Path

import nox.registry
import pages
import pytest
from pages import ROOT, of_pages

import noxfile
import transformer_fast
from transformer_fast import cli

MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().partition("optional-dependencies")[2], re.M)
VARIABLES = (pages.REFERENCE / "environment.md").read_text() + (pages.DOCS / "troubleshooting.md").read_text()
OF_PYTEST = {"-k", "-n", "-m", "-q", "-x", "--all"}


def check(command: str, *, whole: bool) -> None:
    """Fail unless the command can be run as shown; an inline command may lack required arguments."""
    words = shlex.split(pages.REDIRECTION.sub("", command))
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        variable = words.pop(0).partition("=")[0]
        assert f"`{variable}`" in VARIABLES or f"{variable}=" in VARIABLES, f"no page has {variable}"
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        check_make(rest)
    elif program == "nox":
        check_nox(rest)
    elif program == "pip":
        check_pip(rest)
    elif program == "pytest":
        check_script("pytest", rest)
    elif program == "transformer-fast":
        check_cli(rest, whole=whole)
    elif "-m" in rest and rest[rest.index("-m") + 1] == "transformer_fast":
        check_cli(rest[rest.index("-m") + 2 :], whole=whole)
    elif program == "torchrun":  # options of the reader's own script
        assert not rest or rest[-1] == "train.py"
    elif program in ("python", "python3") and rest[:2] == ["-m", "http.server"]:
        pass
    elif program in ("python", "python3") and rest[0] == "-m":
        module = rest[1].replace(".", "/")
        check_script(module if (ROOT / module).is_dir() else f"{module}.py", rest[2:])
    elif program in ("python", "python3"):
        check_script(*rest[:1], rest[1:])
    else:
        check_script(program, rest)


def check_make(words: list[str]) -> None:
    """Check that targets and variables are those of the Makefile."""
    for word in words:
        variable, equals, _ = word.partition("=")
        found = rf"^{variable} \?=|\$\({variable}\)" if equals else rf"^{re.escape(word)}:"
        assert re.search(found, MAKEFILE, re.MULTILINE), word


def check_nox(words: list[str]) -> None:
    """Check that the session is one of the noxfile, and that words of ``-k`` are in names of its rows."""
    options, _, _ = " ".join(words).partition(" -- ")
    if options == "--list":
        return
    match = re.fullmatch(r"-s (\w+)(?: -k (.+))?", options)
    assert match, options
    session, rows = match.groups()
    assert session in nox.registry.get(), session
    names = " ".join(noxfile.row_name(*row) for row in noxfile.rows())
    assert all(word in names for word in re.findall(r"\w+", rows or "") if word != "and"), rows


def check_pip(words: list[str]) -> None:
    """Check the version of a wheel and the name of an extra."""
    for word in words:
        if said := re.match(r"(?:dist/)?transformer_fast-([^-]+)-", word):
            assert said[1] == transformer_fast.__version__
        if said := re.match(r"transformer_fast\[(.*)\]", word):
            assert set(said[1].split(",")) <= set(EXTRAS)


def check_cli(words: list[str], *, whole: bool) -> None:
    """Check that the command line parses the words."""
    if not words:
        return
    words = pages.with_omitted(words)
    parser = cli._parser(words[0])
    if whole:
        with contextlib.suppress(SystemExit) if "--help" in words else contextlib.nullcontext():
            parser.parse_args(words)
        return
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    known = subparsers.choices[words[0]]._option_string_actions
    assert {word for word in words if word.startswith("--")} <= known.keys()


def check_script(script: str, words: list[str]) -> None:
    """Check that the script exists and its source has the options; a benchmark may also have pytest's options."""
    for word in words:
        if re.match(r"(tests|benchmarks|tools)/", word) and "<" not in word:
            assert (ROOT / word.partition("::")[0]).exists(), word
    options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    if script == "pytest" or Path(script).name.startswith("bench_"):
        options -= OF_PYTEST
    if script == "pytest" and any(word.startswith("benchmarks/") for word in words):
        own = (ROOT / "benchmarks/conftest.py").read_text()
        options -= {option for option in options if f'"{option}"' in own} | {"--benchmark-json"}
    if script == "pytest" or "<" in script:
        assert not options
        return
    path = ROOT / script
    assert path.exists(), script
    source = "".join(file.read_text() for file in ([path] if path.is_file() else path.glob("*.py")))
    assert all(f'"{option}"' in source for option in options), options


@of_pages()
def test_the_commands_of_a_page_can_be_run(page: Path) -> None:
    for command in pages.commands(page):
        check(command, whole=True)


@of_pages(pages.PAGES)
def test_the_commands_in_the_sentences_exist(page: Path) -> None:
    for command in pages.inline_commands(page):
        check(command, whole=False)


@pytest.mark.parametrize(
    "command",
    [
        "make tset", "make bench GPU=avx2", "transformer-fast train --sauce a", "transformer-fast plot --in x",
        "python benchmarks/nothing.py", "python benchmarks/gpu.py --hours 9", "pip install 'transformer_fast[cuda]'",
        "python -m benchmarks.nothing", "python tools/sanitize.py --hours 9", 
        ".venv/bin/nox -s nothing", "nox -s pythons -k nothing",
        "TRANSFORMER_FAST_NOTHING=1 transformer-fast info", "sudo make test", "pytest tests/nothing.py",
        "pytest benchmarks/bench_norm.py --hours 9",
        "pip install transformer_fast-9.9.9-*.whl", "pip install dist/transformer_fast-9.9.9-*.whl",
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check(command, whole=True)
