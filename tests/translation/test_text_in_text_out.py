"""Commands on unusual texts: one stream of random numbers, limits that one line cannot meet, broken files."""

from __future__ import annotations

import copy
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_fast import GenerationConfig, generate
from transformer_fast.generation.sampling import Sampler
from transformer_fast.translation import ConfigError
from transformer_fast.translation.translator import Translator


def test_a_file_has_one_stream_for_any_batch_chunk_and_number_of_workers(trained: Any) -> None:
    config = GenerationConfig(sample=True, seed=1, max_length=12)
    lines = ["seven"] * 300

    def drawn(batch_tokens: int = 512, **options: int) -> list[str]:
        translator = Translator(trained.model, trained.tokenizer, config=config, batch_tokens=batch_tokens)
        return list(translator.translate(lines, **options))

    expected = drawn()
    assert len(set(expected)) > 100
    for first in (0, 50, 100):
        assert expected[first : first + 50] != expected[first + 50 : first + 100]
    assert (
        drawn(chunk_lines=40) == drawn(batch_tokens=64, chunk_lines=110) == drawn(workers=2, chunk_lines=40) == expected
    )


def test_an_answer_that_is_drawn_does_not_depend_on_its_batch(trained: Any) -> None:
    config = GenerationConfig(sample=True, seed=5, n_best=3, max_length=10)
    source = torch.tensor(trained.tokenizer.encode_source(["seven"] * 4))
    marks: dict[str, Any] = {"bos": trained.tokenizer.bos, "eos": trained.tokenizer.eos, "config": config}
    together = generate(trained.model, source, streams=[3, 9, 2**40, 3], **marks)
    for index, stream in enumerate((3, 9, 2**40, 3)):
        (alone,) = generate(trained.model, source[:1], streams=[stream], **marks)
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in together[index]]
    assert together[0] != together[1] and len({tuple(answer.tokens) for answer in together[0]}) == 3
    with pytest.raises(ValueError, match="streams must be 4 numbers >= 0"):
        generate(trained.model, source, streams=[1, 2, 3, -1], **marks)


def test_the_numbers_are_uniform_and_each_is_drawn_once() -> None:
    sampler = Sampler(GenerationConfig(sample=True, seed=3, n_best=2), torch.arange(500))
    numbers = torch.cat([sampler._uniform(first) for first in (0, 64)], dim=1)
    assert numbers.shape == (1000, 128) and len(numbers.unique()) == numbers.numel()
    counts = torch.histc(numbers, 20, 0.0, 1.0)
    assert ((counts - 6400).abs() < 6 * 6400**0.5).all()


@pytest.mark.parametrize("temperature", [1e-39, 1e-300, 1e-3])
def test_a_temperature_of_almost_nothing_is_greedy(trained: Any, temperature: float) -> None:
    source = torch.tensor(trained.tokenizer.encode_source(["forty-one"]))
    marks: dict[str, Any] = {"bos": trained.tokenizer.bos, "eos": trained.tokenizer.eos}
    greedy = generate(trained.model, source, config=GenerationConfig(max_length=12), **marks)
    config = GenerationConfig(sample=True, seed=0, temperature=temperature, max_length=12)
    assert generate(trained.model, source, config=config, **marks)[0][0].tokens == greedy[0][0].tokens


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam": 3},
        {"beam": 3, "slots": "keep"},
        {"sample": True},
        {"beam": 3, "suppress": (5,), "renormalize": True},
    ],
    ids=str,
)
def test_a_logit_that_is_no_number_is_an_error(
    trained: Any, options: dict[str, Any], dtype: torch.dtype, value: float
) -> None:
    model = copy.deepcopy(trained.model).to(dtype)
    model.out.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.tensor([7]), value))
    source = torch.tensor(trained.tokenizer.encode_source(["seven"]))
    marks: dict[str, Any] = {"bos": trained.tokenizer.bos, "eos": trained.tokenizer.eos}
    with pytest.raises(FloatingPointError, match="are NaN or infinite"):
        generate(model, source, config=GenerationConfig(**options), **marks)


Command = Callable[..., tuple[int, list[str], str]]


def test_a_limit_that_one_line_cannot_meet_fails_that_line_alone(numbers: Path, command: Command) -> None:
    long = b"nine hundred ninety-nine thousand three hundred fifty-nine\n"
    given = long * 3 + b"two\n" + long * 2
    options = ["--beam", 1, "--min-length", 25, "--max-length", "1,20"]
    code, out, err = command("translate", "--model", numbers / "one", *options, data=given)
    assert code == 1 and len(out) == 6 and out[3] == "" and all(out[:3] + out[4:])
    assert "line 4: min_length 25 asks for at least 25 tokens, max_length (1.0, 20.0) allows" in err
    code, out, err = command("translate", "--model", numbers / "one", "--min-length", 25, "--max-length", 9, data=given)
    assert code == 2 and out == [] and "min_length is 25, more than max_length 9" in err


def test_several_models_have_no_logits_to_penalise(trained: Any) -> None:
    config = GenerationConfig(repetition_penalty=1.3)
    source = torch.tensor(trained.tokenizer.encode_source(["seven"]))
    with pytest.raises(ValueError, match=r"repetition_penalty 1\.3 needs logits, but the mean of 2 models"):
        generate([trained.model] * 2, source, bos=2, eos=3, config=config)
    with pytest.raises(ConfigError, match="expected one model, or repetition_penalty 1"):
        Translator([trained.model] * 2, trained.tokenizer, config=config)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("force_eos", [False, True])
@pytest.mark.parametrize("options", [{}, {"suppress": (6, 7)}, {"no_repeat_ngram": 1}, {"min_length": 3}], ids=str)
def test_a_prefix_is_whole_whatever_the_other_rules_say(
    trained: Any, options: dict[str, Any], force_eos: bool, beam: int
) -> None:
    prefix = [6, 7, 8, 6, 9, 7]
    config = GenerationConfig(beam=beam, max_length=4, force_eos=force_eos, **options)
    source = torch.tensor([[5, 6, 3], [7, 8, 3]])
    found = generate(trained.model, source, bos=2, eos=3, prefix=[prefix, []], config=config)
    assert found[0][0].tokens == prefix and found[0][0].finished == force_eos
    assert len(found[1][0].tokens) <= 4


@pytest.mark.parametrize("cut", ["end", "middle", "flipped"])
@pytest.mark.parametrize("piped", [False, True])
def test_what_is_whole_of_a_damaged_file_is_translated(
    numbers: Path, tmp_path: Path, command: Command, cut: str, piped: bool
) -> None:
    lines = [f"{word}\n" for word in ("seven", "two", "one hundred one", "nine")] * 10
    whole = gzip.compress("".join(lines).encode(), mtime=0)
    data = {"end": whole[:-8], "middle": whole[:-20], "flipped": whole[:-6] + b"xx" + whole[-4:]}[cut]
    path = tmp_path / "cut.gz"
    path.write_bytes(data)
    given = [] if piped else ["--input", path]
    code, out, err = command("translate", "--model", numbers / "one", "--beam", 1, *given, data=data)
    assert code == 2 and "is a damaged or truncated gzip file, after line " in err and "Traceback" not in err
    assert len(out) == int(err.split("after line ")[1].split(":")[0])
    assert len(out) == (40 if cut != "middle" else len(out)) and len(out) <= 40
    _, expected, _ = command("translate", "--model", numbers / "one", "--beam", 1, data="".join(lines).encode())
    assert out == expected[: len(out)]


def test_every_reader_of_text_has_one_sentence_for_a_fault(numbers: Path, tmp_path: Path, command: Command) -> None:
    plain = tmp_path / "plain.gz"
    plain.write_bytes(b"seven\n")
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "nowhere", "does not exist"), (plain, "not a gzip file")):
        for given in (
            ("translate", "--model", numbers / "one", "--input", path),
            ("score", "--hypotheses", path, "--references", path),
        ):
            code, _, err = command(*given)
            assert code == 2 and said in err


def test_blank_hypotheses_have_a_bleu_of_zero_and_an_empty_file_has_none(tmp_path: Path, command: Command) -> None:
    for name, text in (("blank", "\n\n"), ("empty", ""), ("right", "a b c d\ne f g h\n")):
        (tmp_path / name).write_text(text)
    code, out, _ = command("score", "--hypotheses", tmp_path / "blank", "--references", tmp_path / "right")
    assert code == 0 and "BLEU   0.00" in out[0]
    code, _, err = command("score", "--hypotheses", tmp_path / "empty", "--references", tmp_path / "empty")
    assert code == 2 and "is empty; expected one sentence per line" in err
