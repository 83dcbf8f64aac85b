"""Requests of a search: forms of sources and prefixes, and every refused request."""

import math

import pytest
import torch
from generation_oracle import EOS, MARKS, Oracle, sources
from torch import nn

from transformer_fast import GenerationConfig, beam_search, generate, greedy


def test_the_three_ways_to_say_what_to_read_agree():
    model = Oracle(5)
    src = torch.tensor([[5, 9, 4, 3], [7, 8, 3, 3]])
    lengths = torch.tensor([3, 2])
    mask = (torch.arange(4) < lengths[:, None]).unsqueeze(1)
    expected = greedy(model, src, src_lengths=lengths, **MARKS)
    assert greedy(model, src, src_mask=mask, **MARKS) == expected
    assert greedy(model, src, src_mask=mask.int(), **MARKS) == expected
    assert greedy(model, src, pad=3, **MARKS) == expected
    assert greedy(model, src, **MARKS) != expected


@pytest.mark.parametrize("decode", ["greedy", "beam"])
def test_a_sentence_does_not_depend_on_its_batch(decode):
    def run(rows, lengths):
        if decode == "greedy":
            return greedy(model, rows, src_lengths=lengths, **MARKS)
        return beam_search(model, rows, src_lengths=lengths, **MARKS, beam=3)

    model, src = Oracle(5, spread=2.0), sources(8, width=6, seed=5)
    lengths = torch.tensor([6, 1, 4, 2, 6, 3, 5, 1])
    together = run(src, lengths)
    alone = [run(src[i : i + 1, :n], lengths[i : i + 1])[0] for i, n in enumerate(lengths.tolist())]
    assert together == alone
    assert len({str(answer) for answer in together}) > 4  # the answers differ from one another


def test_evaluation_mode_and_back():
    model = Oracle(5)
    model.train()
    model.out.eval()  # a module someone froze stays frozen
    greedy(model, sources(2), **MARKS)
    beam_search(model, sources(2), **MARKS)
    assert model.modes == {(False, False)}
    assert model.training and model.dropout.training and not model.out.training

    broken = Oracle(5, edit=lambda logits, prefix: logits * torch.nan)
    broken.train()
    for decode in (greedy, beam_search):
        with pytest.raises(FloatingPointError, match="logits for token 1 are NaN"):
            decode(broken, sources(1), **MARKS)
    assert broken.training and broken.dropout.training


def test_an_empty_batch():
    model, none = Oracle(5), torch.zeros(0, 7, dtype=torch.long)
    assert greedy(model, none, **MARKS) == []
    assert beam_search(model, none, src_lengths=torch.zeros(0, dtype=torch.long), **MARKS) == []


# Errors

WRONG_CONFIGS = {
    "no beam": ({"beam": 0}, "beam must be an int >= 1, got 0"),
    "fractional beam": ({"beam": 2.5}, "beam must be an int >= 1, got 2.5"),
    "n_best beyond the beam": ({"beam": 2, "n_best": 3}, "n_best is 3, but a beam of 2"),
    "penalty": ({"length_penalty": math.nan}, "length_penalty must be a finite number, got nan"),
    "infinite penalty": ({"length_penalty": math.inf}, "length_penalty must be a finite number, got inf"),
    "norm": ({"length_norm": "wu"}, 'length_norm must be "gnmt" or "power", got \'wu\''),
    "patience": ({"patience": 0.0}, "patience must be a number > 0, got 0.0"),
    "temperature": ({"temperature": 0}, "temperature must be a number > 0, got 0"),
    "top_p": ({"top_p": 1.2}, r"top_p must be a number in \(0, 1\], got 1.2"),
    "top_k": ({"top_k": 2.0}, "top_k must be an int >= 0, got 2.0"),
    "seed": ({"seed": -1}, "seed must be None or an int >= 0, below 2\\*\\*63, got -1"),
    "max_length": ({"max_length": 0}, "max_length must be an int >= 1"),
    "span": ({"min_length": (1.0,)}, "min_length must be an int >= 0"),
    "suppress": ({"suppress": ("<unk>",)}, "suppress must be target ids"),
    "sample with a beam": ({"sample": True, "beam": 4}, "expected beam 1, got 4"),
    "temperature without sample": ({"temperature": 0.5}, "needs sample True, .* got temperature 0.5 and sample False"),
    "top_k without sample": ({"top_k": 5, "beam": 4}, "top_k needs sample True, .* got top_k 5"),
    "top_p without sample": ({"top_p": 0.9}, "top_p needs sample True, .* got top_p 0.9"),
    "slots": ({"slots": "open"}, 'slots must be "close" or "keep", got \'open\''),
    "early_stop": ({"early_stop": "never"}, "early_stop must be True, False or \"now\", got 'never'"),
    "now without slots": ({"early_stop": "now"}, 'early_stop "now" needs slots "keep", got slots \'close\''),
    "slots and patience": (
        {"beam": 2, "slots": "keep", "patience": 2.0},
        'slots "keep" supports no patience; expected patience 1, got 2.0',
    ),
    "flag": ({"alignments": 1}, "alignments must be True or False, got 1"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_options_that_cannot_work_are_named(case):
    options, message = WRONG_CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**options)


WRONG_INPUTS = {
    "float src": ({"src": torch.zeros(2, 3)}, r"src must be an integer tensor .* torch.float32 \(2, 3\)"),
    "one-dimensional src": ({"src": torch.zeros(3, dtype=torch.long)}, r"\(batch, length\).*\(3,\)"),
    "list src": ({"src": [[1, 2]]}, "src must be an integer tensor .* got list"),
    "no positions": ({"src": torch.zeros(2, 0, dtype=torch.long)}, "2 sentences but no positions"),
    "other device": ({"src": torch.zeros(2, 3, dtype=torch.long, device="meta")}, "src is on meta .* cpu"),
    "bos too large": ({"bos": 5}, "bos is token 5, outside the model's target vocabulary of 5"),
    "eos negative": ({"eos": -1}, "eos must be a token id"),
    "mask and lengths": (
        {"src_lengths": torch.tensor([1, 1]), "src_mask": torch.ones(2, 1, 3, dtype=torch.bool)},
        "src_lengths or src_mask, not both",
    ),
    "mask without its query axis": ({"src_mask": torch.ones(2, 3, dtype=torch.bool)}, r"\(2, 1, 3\), got .* \(2, 3\)"),
    "float mask": ({"src_mask": torch.ones(2, 1, 3)}, "bool keep mask .* got torch.float32"),
    "too many lengths": ({"src_lengths": torch.tensor([1, 1, 1])}, "2 integers"),
    "length past the width": ({"src_lengths": torch.tensor([1, 4])}, r"lie in \[0, 3\]"),
    "no room for an answer": ({"max_length": 0}, "max_length must be an int >= 1"),
    "limits for other sentences": ({"max_length": [3, 4, 5]}, "max_length must be .* 2 of them"),
    "no transformer": ({"model": nn.Linear(2, 2)}, "Linear has no encoder, decoder, out"),
}


@pytest.mark.parametrize("decode", [greedy, beam_search])
@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_wrong_input_is_named(case, decode):
    change, message = WRONG_INPUTS[case]
    arguments = {"model": Oracle(5), "src": sources(2), **MARKS, **change}
    with pytest.raises(ValueError, match=message):
        decode(**arguments)


WRONG_OPTIONS = {
    "prefix of other sentences": ({"prefix": [[2]]}, {}, "prefix has 1 entries; expected one list .* 2 sentences"),
    "EOS in the prefix": ({"prefix": [[2], [EOS]]}, {}, r"prefix\[1\] has 1; expected target ids, and no EOS"),
    "prefix outside": ({"prefix": [[9], []]}, {}, r"prefix\[0\] has 9"),
    "EOS suppressed": ({}, {"suppress": (EOS,)}, "suppress names token 1: it is EOS"),
    "suppressed outside": ({}, {"suppress": (9,)}, "suppress names token 9"),
    "lengths that cross": ({}, {"min_length": 9, "max_length": 4}, "min_length is 9, more than max_length 4"),
    "no model": ({"model": []}, {}, "model is an empty list"),
    "two vocabularies": ({"model": [Oracle(5), Oracle(6)]}, {}, "target vocabularies of different sizes"),
    "no attention to read": ({}, {"alignments": True}, "has no layers whose attention weights can be read"),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_calls_that_cannot_work_are_named(case):
    change, options, message = WRONG_OPTIONS[case]
    with pytest.raises(ValueError, match=message):
        generate(**{"model": Oracle(5), "src": sources(2), **MARKS, **change}, config=GenerationConfig(**options))
