"""What benchmarks/bench_generation.py makes of its sides: turns, comparison, table and record."""

from __future__ import annotations

import json
import sys

import bench_generation
import pytest
from bench_generation import Case, Result


@pytest.fixture
def turns(monkeypatch):
    """Sides without a model; one is not installed, another says other words."""
    turns = []

    def side(name, answers):
        def run(src):
            turns.append(name)
            if answers is None:
                raise RuntimeError("the library is not installed")
            return answers(src)

        return run

    sides = {
        "ours": side("ours", lambda src: src.tolist()),
        "Marian": side("Marian", None),
        "CTranslate2": side("CTranslate2", lambda src: [*src[:1].tolist(), *(src[1:] + 1).tolist()]),
        "ours int8": side("ours int8", lambda src: src.tolist()),
    }
    monkeypatch.setattr(bench_generation, "ways", lambda *_: sides)
    return turns


def test_sides_take_turns_and_are_compared_with_ours(turns):
    found = {r.side: r for r in bench_generation.compare(Case("small", "greedy", 4, 8), "cpu", 3, False)}
    assert turns == ["ours", "Marian", "CTranslate2", "ours int8"] * 4
    assert {name: len(result.seconds) for name, result in found.items()} == {
        "ours": 3, "Marian": 0, "CTranslate2": 3, "ours int8": 3
    }  # fmt: skip
    assert found["Marian"].refused == "the library is not installed" and found["Marian"].same is None
    assert found["CTranslate2"].same == 0.25 and found["CTranslate2"].bleu is None
    assert found["ours int8"].same == 1.0 and found["ours int8"].bleu == pytest.approx(100.0)


def test_the_fastest_round_counts():
    ours = Result("beam", 2, "ours", [0.5, 0.25, 1.0])
    peer = Result("beam", 2, "peer", [1.0, 2.0, 0.5], same=0.5, bleu=12.34)
    assert peer.row(ours, 10) == "| beam | 2 | peer | 40 | 2.00 | 50%, BLEU 12.3 |"
    assert ours.row(ours, 10) == "| beam | 2 | ours | 80 | 1.00 |  |"
    refused = Result("beam", 2, "peer", [], refused="not here")
    assert refused.row(ours, 10) == "| beam | 2 | peer | not here | | |"


def test_the_record_has_every_round(turns, monkeypatch, tmp_path, capsys):
    arguments = ["--size", "small", "--length", "8", "--batch", "4", "--search", "greedy", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_generation.py", *arguments, "--out", str(tmp_path)])
    bench_generation.main()
    record = json.loads((tmp_path / "bench_generation.json").read_text(encoding="utf-8"))
    assert [(r["side"], len(r["seconds"])) for r in record["results"]] == [
        ("ours", 2), ("Marian", 0), ("CTranslate2", 2), ("ours int8", 2)
    ]  # fmt: skip
    assert record["threads"] >= 1 and "vector_unit" in record and record["length"] == 8
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 + 4 and all(line.count("|") == 7 for line in printed[1:])
