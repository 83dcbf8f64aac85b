"""A text translated by several workers: answers, order and reports are those of one worker."""

import copy
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from op_calls import on_threads
from test_translate import LINES

from transformer_fast import GenerationConfig, backends
from transformer_fast.translation import worker_pool
from transformer_fast.translation.errors import ConfigError
from transformer_fast.translation.translator import Translator


@pytest.fixture(scope="module")
def translator(trained):
    return Translator(trained.model, trained.tokenizer, config=GenerationConfig(beam=3, n_best=2, alignments=True))


def test_answers_are_those_of_one_worker(translator):
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


@pytest.mark.parametrize("workers", [1, 2])
def test_without_on_error_the_errors_are_those_of_one_worker(trained, workers):
    model = copy.deepcopy(trained.model)
    model.out.bias.data[0] = math.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        list(Translator(model, trained.tokenizer, beam=2).translate(LINES, chunk_lines=2, workers=workers))


def test_lines_are_read_no_further_ahead_than_the_workers_need(translator):
    read = []
    lines = (read.append(line) or line for line in itertools.cycle(LINES))
    found = translator.translations(lines, chunk_lines=3, workers=2)
    for _ in range(10):
        next(found)
    assert len(read) <= 10 + 3 * 4 + 1
    found.close()


def test_models_and_threads_are_as_before(translator):
    """Models in training mode translate as in evaluation mode and are restored, even if the caller stops early."""
    threads = torch.get_num_threads()
    expected = [one[0].text for one in translator.translations(LINES)]
    translator.models[0].train()
    try:
        found = translator.translations(LINES * 20, chunk_lines=3, workers=2)
        assert [next(found)[0].text for _ in LINES] == expected and not translator.models[0].training
        found.close()
        assert all(module.training for module in translator.models[0].modules())
    finally:
        translator.models[0].eval()
    assert torch.get_num_threads() == threads
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == threads


def test_threads_are_shared(translator, monkeypatch):
    seen = []
    answer = worker_pool._answer
    monkeypatch.setattr(worker_pool, "_answer", lambda *a: seen.append(torch.get_num_threads()) or answer(*a))
    with on_threads(4):
        list(translator.translations(LINES, chunk_lines=1, workers=2))
    assert seen == [2] * len(LINES)


def test_numbers_of_workers_that_cannot_be(translator, monkeypatch):
    with pytest.raises(ConfigError, match="workers is 0; expected a whole number >= 1"):
        next(translator.translations(LINES, workers=0))
    monkeypatch.setattr(translator, "device", type("Device", (), {"type": "cuda", "__str__": lambda _: "cuda:0"})())
    with pytest.raises(ConfigError, match="workers=2 is for models on a CPU; expected 1 for one on cuda:0"):
        next(translator.translations(LINES, workers=2))


def test_the_command(numbers, command):
    given, text = ["translate", "--model", numbers / "one", "--scores"], b"seven\nf\xfcnf\none hundred one\n" * 3
    expected = command(*given, data=text)
    assert command(*given, "--workers", 2, data=text) == expected
    assert expected[0] == 1 and len(expected[1]) == 9


def test_workers_run_on_the_backend_of_the_caller():
    seen = []

    def translate(lines, first, keep):
        seen.append((threading.get_ident(), backends.current()))
        return [[] for _ in lines]

    with backends.backend("reference"):
        list(worker_pool.translate_chunks(translate, [["a"], ["b"]], [], workers=2, on_error=None))
    assert [backend for _, backend in seen] == ["reference"] * 2
    assert threading.get_ident() not in {thread for thread, _ in seen}
