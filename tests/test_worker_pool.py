"""A text translated by several processes: the answers of one, in their order, with the same reports."""

import itertools
import os
import signal

import pytest
from test_translate import LINES, root, run, trained  # noqa: F401  (fixtures among them)

from transformer_fast import GenerationConfig
from transformer_fast.translation import worker_pool
from transformer_fast.translation.errors import ConfigError
from transformer_fast.translation.translator import Translator


@pytest.fixture(scope="module")
def translator(trained):  # noqa: F811
    return Translator(trained.model, trained.tokenizer, config=GenerationConfig(beam=3, n_best=2, alignments=True))


def test_answers_are_those_of_one_process(translator):
    lines = [*itertools.islice(itertools.cycle([*LINES, ValueError("torn")]), 23)]
    reports = {1: [], 2: []}
    answers = {}
    for workers, said in reports.items():
        options = {"chunk_lines": 5, "workers": workers, "on_error": lambda *report, said=said: said.append(report)}
        answers[workers] = [
            [(one.text, one.alignment) for one in found] for found in translator.translations(iter(lines), **options)
        ]
    assert answers[2] == answers[1] and len(answers[2]) == len(lines)
    assert reports[2] == reports[1] == [(7, "torn"), (14, "torn"), (21, "torn")]


def test_without_on_error_the_first_bad_line_raises(translator):
    lines = [*LINES, ValueError("torn"), *LINES]
    found = translator.translations(lines, chunk_lines=5, workers=2)
    with pytest.raises(ValueError, match="line 7: torn"):
        list(found)


def test_lines_are_read_no_further_ahead_than_the_workers_need(translator):
    read = []
    lines = (read.append(line) or line for line in itertools.cycle(LINES))
    found = translator.translations(lines, chunk_lines=3, workers=2)
    for _ in range(10):
        next(found)
    assert len(read) <= 10 + 3 * worker_pool.AHEAD * 2
    found.close()


def test_a_worker_that_is_killed_is_an_error(translator, monkeypatch):
    monkeypatch.setattr(worker_pool, "_translate", _die)
    with pytest.raises(ChildProcessError, match="one of 2 workers was killed, and lines from 1 on"):
        list(translator.translations(LINES, chunk_lines=2, workers=2))


def _die(lines, backend):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_short_text_starts_no_process(translator, monkeypatch):
    monkeypatch.setattr(worker_pool, "ProcessPoolExecutor", None)
    assert len(list(translator.translations([*LINES, ValueError("torn")], workers=9, on_error=lambda *_: None))) == 7
    assert list(translator.translations([], workers=2)) == []


def test_numbers_of_workers_that_cannot_be(translator, monkeypatch):
    with pytest.raises(ConfigError, match="workers is 0; expected a whole number >= 1"):
        next(translator.translations(LINES, workers=0))
    monkeypatch.setattr(translator, "device", type("Device", (), {"type": "cuda", "__str__": lambda _: "cuda:0"})())
    with pytest.raises(ConfigError, match="workers=2 is for models on a CPU; expected 1 for one on cuda:0"):
        next(translator.translations(LINES, workers=2))


def test_the_command(root, monkeypatch, capsysbinary):  # noqa: F811
    given, text = ["--model", root / "one", "--scores"], b"seven\nf\xfcnf\none hundred one\n" * 3
    expected = run(monkeypatch, capsysbinary, given, text)
    assert run(monkeypatch, capsysbinary, [*given, "--workers", 2], text) == expected
    assert expected[0] == 1 and len(expected[1]) == 9
