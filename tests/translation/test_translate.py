"""Translation of a corpus: columns, n-best, alignments, several models, and lines that fail."""

import copy
import io
import math
import subprocess
import sys

import pytest
import torch
from small_training import TINY

from transformer_fast import GenerationConfig, generate
from transformer_fast.translation import load_trained, train
from transformer_fast.translation.averaging import average_models
from transformer_fast.translation.errors import ConfigError
from transformer_fast.translation.numbers import numbers_config
from transformer_fast.translation.progress import Silent
from transformer_fast.translation.tokenizer import EOS
from transformer_fast.translation.translator import Translation, Translator

LINES = ["two thousand forty-one", "", "seven", "nine hundred ninety-nine thousand", "   ", "one hundred one"]
TEXT = "\n".join(LINES).encode()


def test_columns(numbers, trained, command):
    given = ["--model", numbers / "one", "--beam", 3, "--n-best", 2, "--scores", "--alignments"]
    code, out, err = command("translate", *given, data=TEXT)
    assert (code, err) == (0, "")
    config = GenerationConfig(beam=3, n_best=2, alignments=True)
    expected = []
    for number, found in enumerate(Translator(trained.model, trained.tokenizer, config=config).translations(LINES), 1):
        assert len(found) == (2 if LINES[number - 1].strip() else 1)
        for one in found:
            pairs = " ".join(f"{i}-{j}" for i, j in one.alignment)
            expected.append(f"{number}\t{one.score:.4f}\t{one.text}\t{pairs}")
    assert out == expected and any("0-0" in line for line in out)
    code, out, _ = command("translate", "--model", numbers / "one", "--scores", data=b"seven\n")
    assert code == 0 and len(out) == 1 and float(out[0].split("\t")[0]) < 0


def test_scores_and_texts_are_those_of_generate(trained):
    config = GenerationConfig(beam=3, n_best=3)
    ids = torch.tensor(trained.tokenizer.encode_source(["seven"]))
    [expected] = generate(trained.model, ids, bos=trained.tokenizer.bos, eos=EOS, config=config)
    [got] = Translator(trained.model, trained.tokenizer, config=config).translations(["seven"])
    assert [one.score for one in got] == pytest.approx([h.score for h in expected], abs=1e-5)
    assert [one.text for one in got] == trained.tokenizer.decode([h.tokens for h in expected])


def test_a_line_in_pieces_joins_their_scores_and_alignments(trained):
    config = GenerationConfig(beam=2, n_best=2, alignments=True)
    parts = ["two thousand.", "forty-one!"]
    longest = 1 + max(map(len, trained.tokenizer.encode(parts)))
    translator = Translator(trained.model, trained.tokenizer, config=config, longest=longest)
    first, second = translator.translations(parts)
    [whole] = translator.translations([" ".join(parts)])
    for rank, one in enumerate(whole):
        assert one.text == f"{first[rank].text} {second[rank].text}".strip()
        assert one.score == pytest.approx(first[rank].score + second[rank].score, abs=1e-4)
        moved = [(i + 2, j + len(first[rank].text.split())) for i, j in second[rank].alignment]
        assert one.alignment == (*first[rank].alignment, *moved)


def test_a_line_that_is_not_utf8_gets_an_empty_translation(numbers, command):
    given = ["--model", numbers / "one", "--beam", 1]
    _, expected, _ = command("translate", *given, data=b"seven\n\none hundred one\n")
    code, out, err = command("translate", *given, data=b"seven\nf\xfcnf\none hundred one\n")
    assert code == 1 and out == expected
    assert err == ("standard input, line 2: not valid UTF-8 (byte 0xfc at column 2); its translation is left empty\n")


def test_the_mark_of_utf8_is_no_text(numbers, command):
    given = ["--model", numbers / "one", "--beam", 1]
    expected = command("translate", *given, data=b"seven\nseven\n")
    assert command("translate", *given, data=b"\xef\xbb\xbfseven\nseven\n") == expected


def test_a_sentence_the_model_cannot_answer_gets_an_empty_translation(trained):
    """One source token gives NaN: the other four of a batch of five are translated as usual."""
    lines = ["seven", "two", "one thousand", "nine", "forty-one"]
    expected = list(Translator(trained.model, trained.tokenizer, beam=2).translate(lines))
    others = {token for ids in trained.tokenizer.encode([*lines[:2], *lines[3:]]) for token in ids}
    poisonous = next(token for token in trained.tokenizer.encode(lines[2:3])[0] if token not in others)
    model = copy.deepcopy(trained.model)
    weight = model.encoder.embed.lut.weight.detach().clone()  # its own, where the model shares it with the output
    weight[poisonous] = math.nan
    model.encoder.embed.lut = torch.nn.Embedding.from_pretrained(weight, padding_idx=0)
    translator = Translator(model, trained.tokenizer, beam=2)
    reports = []
    found = list(translator.translations(lines, on_error=lambda *report: reports.append(report)))
    assert [answers[0].text for answers in found] == [*expected[:2], "", *expected[3:]]
    assert math.isnan(found[2][0].score)
    [(number, reason)] = reports
    assert number == 3 and "NaN" in reason
    with pytest.raises(FloatingPointError, match="NaN"):
        list(translator.translate(lines))


def test_numbers_of_invalid_lines_count_from_the_start_of_the_text(trained):
    lines = ["seven", ValueError("torn"), "seven", ValueError("burnt"), ""]
    reports = []
    translator = Translator(trained.model, trained.tokenizer, beam=1)
    found = list(translator.translations(iter(lines), chunk_lines=2, on_error=lambda *report: reports.append(report)))
    assert reports == [(2, "torn"), (4, "burnt")]
    assert found[0] == found[2] and found[4] == [Translation("", alignment=())]
    with pytest.raises(ValueError, match="line 2: torn"):
        list(translator.translate(lines))


def scored(translator):
    return [f"{found[0].score:.4f}\t{found[0].text}" for found in translator.translations(LINES)]


def test_several_models_vote_or_are_averaged(numbers, trained, command):
    two = load_trained(numbers / "two")
    mean = average_models([trained.model, two.model])
    for name, parameter in mean.named_parameters():
        both = [dict(t.model.named_parameters())[name] for t in (trained, two)]
        torch.testing.assert_close(parameter, (both[0] + both[1]) / 2)
    for flags, models in (([], [trained.model, two.model]), (["--average"], mean)):
        given = ["--model", numbers / "one", numbers / "two", "--beam", 2, "--scores", *flags]
        code, out, _ = command("translate", *given, data=TEXT)
        assert code == 0 and out == scored(Translator(models, trained.tokenizer, beam=2))
    assert out != scored(Translator(trained.model, trained.tokenizer, beam=2))


def test_models_that_do_not_fit_each_other_are_refused(numbers, trained, command, tmp_path):
    other = tmp_path / "other"
    train(numbers_config(numbers / "data", other, **TINY | {"vocab_size": 50, "max_steps": 1}), Silent())
    code, _, err = command("translate", "--model", numbers / "one", other, data=b"seven\n")
    assert code == 2 and "has another tokenizer than" in err and len(err.splitlines()) == 1
    with pytest.raises(ConfigError, match="one size can be averaged"):
        average_models([trained.model, torch.nn.Linear(2, 2)])


def test_drawn_translations(numbers, command):
    given = ["--model", numbers / "one", "--sample", "--n-best", 3, "--top-k", 8, "--no-unk"]
    first, second, other = (command("translate", *given, "--seed", seed, data=b"seven\ntwo\n") for seed in (1, 1, 2))
    assert first == second != other and first[0] == 0
    assert [line.split("\t")[0] for line in first[1]] == ["1"] * 3 + ["2"] * 3
    code, _, err = command("translate", *given, "--beam", 4, data=b"seven\n")
    assert code == 2 and "expected beam 1, got 4" in err


def test_memory_does_not_grow_with_the_text(trained):
    """The input promises a million lines; answers are not kept, and no line is read ahead of its window."""
    read = 0

    def lines():
        nonlocal read
        for _ in range(10**6):
            read += 1
            yield "" if read % 50 else "seven"

    answers = Translator(trained.model, trained.tokenizer, beam=1).translations(lines(), chunk_lines=100)
    for done in range(1, 301):
        next(answers)
        assert read <= done + 100
    assert read == 300


def test_lengths_and_stopping(numbers, trained, command, capsysbinary):
    flags = ["--max-length", "0.5,2", "--min-length", 2, "--length-norm", "power", "--patience", 2, "--early-stop"]
    given = ["--model", numbers / "one", "--beam", 3, "--scores", *flags]
    code, out, _ = command("translate", *given, data=TEXT)
    config = GenerationConfig(
        beam=3, max_length=(0.5, 2.0), min_length=2, length_norm="power", patience=2.0, early_stop=True
    )
    assert code == 0 and out == scored(Translator(trained.model, trained.tokenizer, config=config))
    assert out != scored(Translator(trained.model, trained.tokenizer, beam=3))
    with pytest.raises(SystemExit):
        command("translate", "--model", numbers / "one", "--max-length", "long")
    assert "'long' is neither a whole number nor two numbers a,b" in capsysbinary.readouterr().err.decode()


def test_int8_weights(numbers, trained, command):
    given = ["--model", numbers / "one", "--beam", 3, "--scores", "--quantize", "int8"]
    code, out, _ = command("translate", *given, data=TEXT)
    config = GenerationConfig(beam=3, quantize="int8")
    assert code == 0 and out == scored(Translator(trained.model, trained.tokenizer, config=config))
    assert out != scored(Translator(trained.model, trained.tokenizer, beam=3))


# Prints the most that Python holds while 500, 2,000 and 20,000 lines go through, answers aside.
MEMORY = """
import sys, tracemalloc
from transformer_fast.translation import load_trained
from transformer_fast.translation.translator import Translator

trained = load_trained(sys.argv[1])
for count in (500, 2_000, 20_000):
    lines = ("seven" if n % 1000 == 0 else " " * 40 for n in range(count))
    tracemalloc.start()
    for _ in Translator(trained.model, trained.tokenizer, beam=1).translations(lines, chunk_lines=500):
        pass
    print(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
"""


@pytest.mark.slow("translates 20,000 lines")
def test_ten_times_the_lines_take_no_more_memory(numbers):
    """Memory is that of a chunk, not of the text; the test needs a new process, because all allocations count."""
    given = [sys.executable, "-c", MEMORY, str(numbers / "one")]
    _, few, many = map(int, subprocess.run(given, capture_output=True, text=True, check=True).stdout.split())
    assert many < 1.3 * few + 50_000, f"{few} bytes for 2,000 lines, {many} for 20,000"


def test_progress_is_on_a_terminal_only(numbers, monkeypatch, command, tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("seven\ntwo\n")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    code, out, _ = command("translate", "--model", numbers / "one", "--beam", 1, "--input", source)
    assert code == 0 and len(out) == 2 and "2/2" in terminal.getvalue()
