"""Settings of a training run: durations, checks, flags; and its progress reports."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import re
from typing import Any

import pytest

from transformer_fast.translation import ConfigError, TrainConfig, parse_duration
from transformer_fast.translation.commands.train import add_arguments, config_from_args
from transformer_fast.translation.progress import LineProgress, Status, TerminalProgress, format_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("20m", 1200), ("1.5h", 5400), ("1h30m", 5400), (" 2H ", 7200), (7, 7), ("0.5", 0.5)],
)
def test_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "20 minutes", "-5", "0", "0s", "nan", "inf", "1d", "m20"])
def test_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="expected something like 90s, 20m or 1h30m"):
        parse_duration(text)


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"d_model": 30, "heads": 4}, r"d_model is 30; expected a multiple of heads \(4\)"),
    ({"layers": 0}, "layers is 0; expected a whole number >= 1"),
    ({"d_ff": 2.5}, r"d_ff is 2.5; expected a whole number >= 1"),
    ({"accumulate": 0}, "accumulate is 0; expected a whole number >= 1"),
    ({"warmup": True}, "warmup is True; expected a whole number >= 1"),
    ({"dropout": 1.0}, r"dropout is 1.0; expected a probability, 0 <= p < 1"),
    ({"label_smoothing": -0.1}, "label_smoothing is -0.1; expected a probability"),
    ({"lr": 0.0}, "lr is 0.0; expected a positive learning rate"),
    ({"lr": math.nan}, "lr is nan; expected a positive learning rate"),
    ({"clip": -1.0}, "clip is -1.0; expected a gradient norm, or 0"),
    ({"max_time": 0.0}, "max_time is 0.0; expected a positive number of seconds"),
    ({"max_length": 4097}, r"batch_tokens is 4096; expected at least max_length \(4097\)"),
    ({"cooldown": 11, "max_steps": 10}, r"cooldown is 11; expected at most max_steps \(10\)"),
    ({"norm": "l2"}, "norm is 'l2'; expected one of layer, std, rms"),
    ({"amp": "int8"}, "amp is 'int8'; expected one of auto, off, bf16, fp16"),
    ({"device": "tpu"}, "device is 'tpu'; expected auto, cpu, cuda or cuda:N"),
    ({"lr": "fast"}, "lr is 'fast'; expected a number"),
    ({"dropout": None}, "dropout is None; expected a number"),
    ({"label_smoothing": True}, "label_smoothing is True; expected a number"),
    ({"norm_first": "no"}, "norm_first is 'no'; expected True or False"),
    ({"device": 3}, "device is 3; expected a text"),
    ({"valid_source": 3, "valid_target": 4}, "valid_source is 3; expected a text"),
    ({"seed": 2**63}, "seed is 9223372036854775808; expected a whole number below"),
    ({"valid_source": "v.en"}, "valid_target is missing: validation needs both"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS, ids=lambda value: str(value)[:30])
def test_bad_setting_is_named_with_what_was_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(source="a", target="b", save="c", **changes)


REQUIRED = ["--source", "a", "--target", "b", "--save", "c"]


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


def test_flags_give_the_same_settings(parser: argparse.ArgumentParser) -> None:
    assert config_from_args(parser.parse_args(REQUIRED)) == TrainConfig(source="a", target="b", save="c")
    args = parser.parse_args([*REQUIRED, "--max-time", "20m", "--no-tie-weights", "--d-model", "64", "--lr", "3e-4"])
    assert config_from_args(args) == TrainConfig(
        source="a", target="b", save="c", max_time=1200.0, tie_weights=False, d_model=64, lr=3e-4
    )
    shown = parser.format_help()
    for name in TrainConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in shown


def test_a_flag_that_is_no_duration_says_what_one_is(parser: argparse.ArgumentParser, capsys) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args([*REQUIRED, "--max-time", "3x"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("--max-time: cannot read '3x' as a duration; expected something like 90s, 20m or 1h30m")


def test_settings_survive_json() -> None:
    config = TrainConfig(source="a", target="b", save="c", max_time=12.5, norm_first=False)
    assert TrainConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STATUS = Status(step=1200, fraction=0.25, seconds=60.0, tokens_per_second=4321.0, loss=2.5)
LINE = " 25%  step 1,200  loss 2.500  4,321 tok/s  1:00 < 3:00\n"


@pytest.mark.parametrize(("interval", "lines"), [(3600.0, ""), (0.0, LINE + LINE)])
def test_a_line_now_and_then_where_there_is_no_terminal(interval: float, lines: str) -> None:
    progress = TerminalProgress(stream := io.StringIO(), interval)
    progress.update(STATUS)
    progress.update(STATUS)
    progress.message("validated")
    progress.close()
    assert stream.getvalue() == lines + "validated\n"


def test_a_bar_on_a_terminal() -> None:
    progress = TerminalProgress(stream := Terminal())
    progress.update(STATUS)
    progress.message("validated")
    progress.close()
    assert "validated\n" in stream.getvalue()
    assert re.search(r" 25% \|[#\d ]+\| step 1,200  loss 2.500  4,321 tok/s  1:00 < 3:00", stream.getvalue())
    with LineProgress(lambda: 4, stream=(stream := Terminal())) as translated:
        translated.update()
        translated.message("said")
    assert "said\n" in stream.getvalue() and "1/4" in stream.getvalue()


@pytest.mark.parametrize(
    ("interval", "hidden", "expected"),
    [(3600.0, False, []), (0.0, False, ["1 lines", "2 lines"]), (0.0, True, [])],
)
def test_lines_translated_are_told_now_and_then(interval: float, hidden: bool, expected: list[str]) -> None:
    def counted() -> int:
        pytest.fail("counted for no bar")

    with LineProgress(counted, hidden=hidden, stream=(stream := io.StringIO()), interval=interval) as progress:
        progress.update()
        progress.update()
        progress.message("said")
    *lines, said = stream.getvalue().splitlines()
    assert said == "said" and [line[:7] for line in lines] == expected and "\r" not in stream.getvalue()
    assert all(re.fullmatch(r"\d lines  [\d,.]+ lines/s  0:00", line) for line in lines)


def test_times_are_readable() -> None:
    assert [format_seconds(s) for s in (0, 61, 3723.4, math.inf)] == ["0:00", "1:01", "1:02:03", "?"]
    assert Status(0, 0.0, 0.0, 0.0, None).eta == math.inf
