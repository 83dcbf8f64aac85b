"""The command line on a briefly trained model: outputs, their order, and errors."""

import dataclasses
import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu
import torch
from small_training import TINY, flags_of

from transformer_fast import cli
from transformer_fast.cli import demo as demo_module
from transformer_fast.cli import info
from transformer_fast.translation import TrainConfig, TrainResult, load_trained
from transformer_fast.translation.commands import train as train_command
from transformer_fast.translation.numbers import is_held_out, numbers_config
from transformer_fast.translation.parts import split_spans
from transformer_fast.translation.progress import LineProgress
from transformer_fast.translation.translator import Translator

LINES = [
    "two thousand forty-one",
    "",
    "seven",
    "nine hundred ninety-nine thousand nine hundred ninety-nine",
    "   ",
    "seven",
    "one hundred one",
]
TEXT = "".join(f"{line}\n" for line in LINES).encode()


# Translating


@pytest.mark.parametrize("beam", [1, 3])
def test_translate_keeps_every_line_in_its_place(numbers, trained, command, beam):
    given = ["translate", "--model", numbers / "one", "--beam", beam, "--batch-tokens", 100]
    code, out, err = command(*given, data=TEXT)
    assert (code, err) == (0, "")
    alone = Translator(trained.model, trained.tokenizer, beam=beam)
    assert out == [next(alone.translate([line])) for line in LINES]
    assert [line == "" for line in out] == [not line.strip() for line in LINES]
    assert out[2] == out[5] != out[0]


def test_translate_reads_and_writes_files(numbers, command, tmp_path):
    plain, zipped, answer = tmp_path / "in.txt", tmp_path / "in.gz", tmp_path / "out.txt"
    plain.write_bytes("\r\n".join(LINES).encode())  # Windows line ends, and none at the end of the file
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    given = ["translate", "--model", numbers / "one", "--beam", 1]
    _, expected, _ = command(*given, data=TEXT)
    for source in (plain, zipped):
        code, out, _ = command(*given, "--input", source, "--output", answer)
        assert code == 0 and out == []
        assert answer.read_text().splitlines() == expected


def split(text, fits):
    return [text[begin:end] for begin, end in split_spans(text, lambda begin, end: fits(text[begin:end]))]


def test_a_line_may_be_of_any_length(trained):
    translator = Translator(trained.model, trained.tokenizer, beam=1, longest=20)
    parts = ["two thousand.", "forty-one!", "seven hundred"] * 4
    [whole] = translator.translate([" ".join(parts)])
    pieces = split(" ".join(parts), lambda text: len(trained.tokenizer.encode([text])[0]) < 20)
    assert len(pieces) > 3 and " ".join(pieces) == " ".join(parts)
    assert whole == " ".join(filter(None, translator.translate(pieces)))


def test_split_text_prefers_sentences_then_words_then_anything():
    assert split("One two. Three four five six", lambda text: len(text) < 20) == [
        "One two.",
        "Three four five six",
    ]
    assert split("aaaa bbbb cc dddd", lambda text: len(text) < 10) == ["aaaa bbbb", "cc dddd"]
    assert split("abcdefgh", lambda text: len(text) < 4) == ["ab", "cd", "ef", "gh"]
    assert split("ab", lambda text: False) == ["a", "b"]
    assert split("ae\u0301ie\u0301", lambda text: len(text) < 4) == ["ae\u0301", "ie\u0301"]
    long = "word " * 5000 + "end. " * 5000
    assert max(map(len, split(long.strip(), lambda text: len(text) < 100))) < 100


def test_as_a_program_in_a_pipe(numbers):
    """Run python -m transformer_fast between two pipes, with a reader that ends early."""
    given = [sys.executable, "-m", "transformer_fast", "translate", "--model", str(numbers / "one"), "--beam", "1"]
    done = subprocess.run(given, input=TEXT, capture_output=True, timeout=600)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, b"", len(LINES))

    child = subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    _, err = child.communicate(TEXT, timeout=600)
    assert child.returncode == 1 and err == b""


# The other commands


def test_train_from_the_command_line(numbers, command, tmp_path):
    flags = flags_of(TINY | {"max_steps": 3})
    data, save = numbers / "data", tmp_path / "run"
    given = ["train", "--source", data / "train.en", "--target", data / "train.de", "--save", save, *flags]
    code, out, err = command(*given)
    assert code == 0 and "3 updates" in out[0] and "max_steps" in out[0]
    assert "parameters" in err
    assert load_trained(save).step == 3
    code, _, err = command(*given, "--d-model=32")
    assert code == 2 and "d_model is 32, the run has 16" in err


def test_every_setting_of_a_run_is_a_flag(monkeypatch, command, tmp_path):
    """The whole command line is read, which has flags of its own beside those of a command."""
    config = TrainConfig(source="a", target="b", save=str(tmp_path))
    words = {True: "", False: "no-"}
    flags = [
        f"--{words[value]}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in ((name.replace("_", "-"), value) for name, value in dataclasses.asdict(config).items())
        if value is not None
    ]
    given = []
    for stopped, expected in {"max_steps": 0, "interrupted": 130}.items():
        result = TrainResult("", 0, stopped, 0.0, 0, {}, None, {}, {})
        monkeypatch.setattr(train_command, "train", lambda config, result=result, **_: given.append(config) or result)
        code, _, err = command("train", *flags)
        assert (code, given.pop()) == (expected, config), err


def test_quiet_shows_no_progress(numbers, monkeypatch, command, tmp_path):
    data, flags = numbers / "data", flags_of(TINY | {"max_steps": 1})
    files = "--source", data / "train.en", "--target", data / "train.de", "--save", tmp_path / "run"
    code, out, err = command("train", *files, *flags, "--quiet")
    assert (code, err) == (0, "") and "1 updates" in out[0]
    monkeypatch.setattr(
        LineProgress.__init__, "__kwdefaults__", {**LineProgress.__init__.__kwdefaults__, "interval": 0}
    )
    (tmp_path / "in").write_bytes(TEXT)
    for quiet in ([], ["--quiet"]):
        code, out, err = command(
            "translate", "--model", numbers / "one", "--input", tmp_path / "in", "--beam=1", *quiet
        )
        assert code == 0 and len(out) == len(LINES) and ("lines/s" in err) == (not quiet)


def test_score_is_sacrebleus(command, tmp_path):
    said = ["Ein Mann fährt Rad .", "zwei Hunde laufen über die Wiese."]
    right = ["ein Mann fährt Rad.", "Zwei Hunde laufen über eine Wiese."]
    for name, lines in (("said", said), ("right", right)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    given = ["score", "--hypotheses", tmp_path / "said", "--references", tmp_path / "right"]
    code, out, _ = command(*given, "--tokenized")
    assert code == 0 and len(out) == 6
    for lines, options in zip(
        (out[:2], out[2:4], out[4:]),
        ({}, {"lowercase": True}, {"lowercase": True, "tokenize": "none"}),
        strict=True,
    ):
        metric = sacrebleu.BLEU(**options, force=True)
        assert float(lines[0].split()[1]) == round(metric.corpus_score(said, [right]).score, 2)
        assert lines[1].strip() == str(metric.get_signature())
    assert "case:lc" in out[3] and "tok:13a" in out[3] and "tok:none" in out[5]
    assert len(command(*given)[1]) == 4


def test_train_help_is_in_parts_and_shows_every_default(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("text and folder:", "the model:", "learning:", "--recipe NAME", "(default: 0.1)", "(default: yes)"):
        assert words in shown


@pytest.mark.parametrize("name", ["train", "demo"])
def test_a_time_has_its_unit_in_the_help(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    (said,) = re.findall(r"--max-time T (stop .*?)(?: --|$)", shown)
    assert "20m" in said and ("in seconds" in said or "90s" in said)


def test_info(command):
    code, out, _ = command("info")
    text = "\n".join(out)
    assert code == 0 and torch.__version__ in text and "C++ extension:" in text
    for op in info.OPS:
        assert f"   {op}" in text
    code, out, _ = command("info", "--backend", "reference")
    assert code == 0 and any("reference: requested" in line for line in out)


@pytest.mark.parametrize("loaded", [True, False])
def test_info_build_tells_make_whether_the_extension_is_there(monkeypatch, command, loaded):
    monkeypatch.setattr(info.extension, "load", lambda: loaded)
    monkeypatch.setattr(info.extension, "status", lambda: "said so")
    assert command("info", "--build") == (1 - loaded, ["C++ extension: said so"], "")


def test_verify_exit_code(monkeypatch, command):
    from transformer_fast.cli import verification, verify

    row = verification.Parity("op", "case", torch.float32, "output", "native", 1.0, 2.0, 1.0)
    bad = verification.Parity("op", "case", torch.float32, "output", "native", 3.0, 2.0, 1.0)
    for rows, expected in (([row, row], 0), ([row, bad], 1)):
        monkeypatch.setattr(verify, "parity", lambda device, rows=rows: iter(rows))
        code, out, _ = command("verify", "--device", "cpu")
        assert code == expected
        assert ("FAIL" in "\n".join(out)) == bool(expected)


def test_plot(numbers, command, tmp_path):
    given = ["plot", "--out", tmp_path, "--model", numbers / "one", "--text", "forty-one"]
    code, out, _ = command(*given)
    assert code == 0
    assert [Path(line).name for line in out] == ["positional_encoding.png", "attention.png"]
    assert all(Path(line).read_bytes()[:4] == b"\x89PNG" for line in out)


def test_demo_runs_end_to_end(monkeypatch, command, tmp_path):
    monkeypatch.setattr(demo_module, "TRAINING_PAIRS", 800)
    monkeypatch.setattr(demo_module, "UNSEEN", 20)
    monkeypatch.setattr(
        demo_module, "numbers_config", lambda *a, **k: numbers_config(*a, **{**k, **TINY, "max_steps": 2})
    )
    monkeypatch.setattr(demo_module, "speed", lambda device: iter(()))
    monkeypatch.setattr(demo_module, "parity", lambda device, dtypes: iter(()))
    code, out, _ = command("demo", "--out", tmp_path, "--device", "cpu", "--max-time", "90s")
    text = "\n".join(out)
    assert code == 1 and "exactly right: 0.0% (0 of 20), below the goal of 98%" in text  # two updates teach nothing
    assert (tmp_path / "attention.png").exists() and (tmp_path / "positional_encoding.png").exists()
    trained = load_trained(tmp_path / "run")
    assert trained.step == 2 and trained.config.max_time == 90
    assert f"translate --model {tmp_path / 'run'}" in text


# Errors: one line on standard error, exit code 2, no traceback

TRAIN = "train --save {tmp}/run --source {tmp}"
TOO_LARGE = 2**63
WRONG = {
    "no such model": ("translate --model {tmp}/none", "config.json is missing"),
    "no such input": ("translate --model {run} --input {tmp}/none", "none does not exist"),
    "input is a folder": ("translate --model {run} --input {tmp}", "is a folder"),
    "output in no folder": ("translate --model {run} --output {tmp}/no/out", "No such file"),
    "output is the input": ("translate --model {run} --input {tmp}/latin --output {tmp}/latin", "the same file"),
    "no beam": ("translate --model {run} --beam 0", "beam must be an int >= 1, got 0"),
    "odd penalty": ("translate --model {run} --length-penalty nan", "length_penalty must be a finite"),
    "no such device": ("verify --device tpu", "--device is 'tpu'; expected auto, cpu, cuda or cuda:N"),
    "no such GPU": ("verify --device cuda:99", "but torch sees"),
    "text without a model": ("plot --text one", "--model and --text belong together"),
    "no such source": (f"{TRAIN}/none --target {{tmp}}/latin", "none does not exist"),
    "training text that is not UTF-8": (
        f"{TRAIN}/latin --target {{tmp}}/latin",
        "latin, line 2: not valid UTF-8 (byte 0xfc at column 2); convert the file to UTF-8",
    ),
    "unequal training text": (f"{TRAIN}/one --target {{tmp}}/two", "one has 1 lines, {tmp}/two has 2"),
    "empty training text": (f"{TRAIN}/empty --target {{tmp}}/two", "empty is empty; expected one sentence per line"),
    "a file where the run should go": (
        "train --source {tmp}/two --target {tmp}/two --save {tmp}/two",
        "cannot write to the folder {tmp}/two: File exists",
    ),
    "a model that is a file": ("translate --model {tmp}/two", "two is not a folder; expected that of a run"),
    "a cut gzip file": (
        "translate --model {run} --input {tmp}/cut.gz --output {tmp}/new",
        "cut.gz is a damaged or truncated gzip file, after line ",
    ),
    "a broken gzip file": (
        "translate --model {run} --input {tmp}/broken.gz",
        "broken.gz is a damaged or truncated gzip file",
    ),
    "a seed past 64 bits": (f"translate --model {{run}} --sample --seed {TOO_LARGE}", "below 2**63"),
    "a training seed past 64 bits": (
        f"{TRAIN}/two --target {{tmp}}/two --seed {TOO_LARGE}",
        f"seed is {TOO_LARGE}; expected a whole number below 2**63",
    ),
    "pictures into a file": ("plot --out {tmp}/two", "two: File exists"),
    "a picture of too much": (
        f"plot --out {{tmp}}/new --model {{run}} --text {'seven-' * 60}",
        "expected at most 80 each, which a picture can show",
    ),
    "no average": ("translate --model {run} --which average", "average --model {run}"),
    "nothing to average": ("average --model {tmp}/none", "has no checkpoint"),
    "unequal files to score": ("score --hypotheses {tmp}/one --references {tmp}/two", "has 1 lines"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_one_line(case, numbers, command, tmp_path):
    (tmp_path / "latin").write_bytes("eins\nfünf\n".encode("latin-1"))
    zipped = gzip.compress(b"seven\n" * 100)
    (tmp_path / "cut.gz").write_bytes(zipped[:-10])
    (tmp_path / "broken.gz").write_bytes(zipped[:2] + b"\xff" * 40)
    for name, lines in (("empty", ""), ("one", "a\n"), ("two", "a\nb\n")):
        (tmp_path / name).write_text(lines)
    arguments, message = (text.format(tmp=tmp_path, run=numbers / "one") for text in WRONG[case])
    code, _, err = command(*arguments.split(), data=b"one\n")
    assert code == 2 and message in err
    assert len(err.splitlines()) == 1 and err.startswith("transformer_fast: error: ")
    assert (tmp_path / "latin").stat().st_size == 10  # nothing was overwritten


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["translate"], ["train", "--source", "x"], ["info", "--backend", "gpu"]]
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.startswith("usage:") and len(said.splitlines()) <= 6


BARE = """
import sys
sys.modules.update(dict.fromkeys(["sentencepiece", "sacrebleu", "safetensors", "tqdm", "matplotlib"]))
from transformer_fast import cli
from transformer_fast.cli import verification
for arguments in (["info"], ["demo"], ["plot"], ["translate", "--model", "x"], ["train", "--source", "x"]):
    print(cli.main(arguments), flush=True)
"""


def test_without_the_extras_the_rest_works_and_each_is_named():
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-5:] == ["0", "1", "1", "1", "1"], done.stderr
    demo, plot, translate, train = done.stderr.splitlines()[-4:]
    every = "sentencepiece, sacrebleu, safetensors, tqdm"
    assert demo.endswith(f"needs {every}, matplotlib; run: pip install 'transformer_fast[translation,plots]'")
    assert plot.endswith("this command needs matplotlib; run: pip install 'transformer_fast[plots]'")
    for line in (translate, train):
        assert line.endswith(f"this command needs {every}; run: pip install 'transformer_fast[translation]'")


def test_a_bug_keeps_its_traceback_and_debug_shows_every_one(monkeypatch):
    monkeypatch.setattr(info, "_version_of", lambda name: {}[name])
    with pytest.raises(KeyError):
        cli.main(["info"])
    monkeypatch.setenv("TRANSFORMER_FAST_DEBUG", "1")
    with pytest.raises(ValueError, match="belong together"):
        cli.main(["plot", "--text", "x"])


def test_an_interrupt_is_not_an_error(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "_version_of", interrupted)
    assert cli.main(["info"]) == 130 and capsys.readouterr().err == "interrupted\n"


def test_the_picture_of_the_demo_is_of_an_unseen_number():
    assert is_held_out(demo_module.PICTURED)
