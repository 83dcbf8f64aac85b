"""The commands of `transformer-fast` that pages show are run in a folder with small files of the names that they use.

A new command is run by itself. Two are not run here: `verify` (test_verify.py), and `train` under torchrun
(tests/translation/test_ranks.py).
"""

from __future__ import annotations

import gzip
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pages
import pytest

pytest.importorskip("transformers")
from marian_folders import write_marian
from small_training import TINY, command, flags_of, numbers  # noqa: F401

SMALL = flags_of({**TINY, "max_steps": 3, "valid_every": 1, "bleu_sentences": 2, "device": "cpu"})
OWN = re.compile(r"(?:[A-Z_]+=\S+ )?(?:python -m transformer_fast|transformer-fast) (?!verify)(.+)")
OMITTED = {"...": ["--source", "train.en", "--target", "train.de", "--save", "runs/en-de"]}


def own_commands(page: Path) -> list[list[str]]:
    """Return the arguments of each command of a page that is run here."""
    found = [shlex.split(said[1]) for line in pages.commands(page) if (said := OWN.fullmatch(line))]
    return [[part for word in words for part in OMITTED.get(word, [word])] for words in found]


def prepare(folder: Path, numbers: Path) -> None:  # noqa: F811
    """Write the texts and the models that pages name."""
    for side in ("en", "de"):
        lines = (numbers / "data" / f"train.{side}").read_bytes().splitlines(keepends=True)
        for name, count in {"train": 200, "val": 8, "test": 8, "some": 4}.items():
            text = b"".join(lines[:count])
            (folder / f"{name}.{side}").write_bytes(text)
            (folder / f"{name}.{side}.gz").write_bytes(gzip.compress(text))
    for run in ("runs/en-de", "demo/run"):
        shutil.copytree(numbers / "one", folder / run)
    write_marian(folder / "opus-mt-en-de")


@pages.of_pages([page for page in pages.PAGES if own_commands(page)])
def test_the_commands_of_a_page_run(
    page: Path,
    numbers: Path,  # noqa: F811
    command: Callable[..., tuple[int, list[str], str]],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(tmp_path, numbers)
    monkeypatch.chdir(tmp_path)
    for words in own_commands(page):
        data, target = b"", None
        if "<" in words:
            at = words.index("<")
            data, words = Path(words[at + 1]).read_bytes(), words[:at] + words[at + 2 :]
        if ">" in words:
            at = words.index(">")
            target, words = Path(words[at + 1]), words[:at] + words[at + 2 :]
        if words[0] == "train":
            shutil.rmtree(words[words.index("--save") + 1], ignore_errors=True)
            words = [*words, *SMALL]
        code, out, err = command(*words, data=data)
        assert code == 0, f"{shlex.join(words)}: {err}"
        if target is not None:
            target.write_text("".join(f"{line}\n" for line in out))
            assert len(out) >= data.count(b"\n")
