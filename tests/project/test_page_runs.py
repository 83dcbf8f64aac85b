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


def own_commands(page: Path) -> list[str]:
    """Return each command of a page that is run here, from the name of the subcommand on."""
    return [said[1] for line in pages.commands(page) if (said := OWN.fullmatch(line))]


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
    for line in own_commands(page):
        files = dict(pages.REDIRECTION.findall(line))
        words = pages.with_omitted(shlex.split(pages.REDIRECTION.sub("", line)))
        data = Path(files["<"]).read_bytes() if "<" in files else b""
        if words[0] == "train":
            shutil.rmtree(words[words.index("--save") + 1], ignore_errors=True)
            words = [*words, *SMALL]
        code, out, err = command(*words, data=data)
        assert code == 0, f"{line}: {err}"
        if ">" in files:
            Path(files[">"]).write_text("".join(f"{text}\n" for text in out))
            assert len(out) >= data.count(b"\n")
