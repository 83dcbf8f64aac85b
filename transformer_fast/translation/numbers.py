"""A translation task that needs no data: English number names to German ones, 0 to 999,999.

    2041    two thousand forty-one                       zweitausendeinundvierzig
    101     one hundred one                              einhunderteins
    121000  one hundred twenty-one thousand              einhunderteinundzwanzigtausend

The task is small, yet a real translation: units and tens change places ("forty-one" -> "einundvierzig"), the words of
one language are one compound in the other, and nearly all of the million sentences are unseen.

Conventions. English: American style, no "and", a hyphen inside 21..99. German (Duden): one word, lower case,
the long forms "einhundert" and "eintausend" (Duden also allows "hundert" and "tausend"); a final 1 is "eins"
("einhunderteins"), any other is "ein" ("einundzwanzig", "einhunderteintausend"); "sechzehn", "siebzehn",
"dreißig", "sechzig" and "siebzig" are irregular. num2words 0.5.14 writes the same, but "dreihunderteinstausend" for
301,000.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from .checkpoint import write_atomically
from .config import TrainConfig
from .errors import ConfigError
from .text import PathLike

LIMIT = 1_000_000
ALWAYS_TRAINED = 100  # 0..99 are the vocabulary of the task; from 100 on, everything is composed of them
GROUPS = (range(1), range(1, 10), range(10, 100), range(100, 1000))
GROUP_WEIGHTS = (1, 2, 3, 6)
HELD_OUT_SHARE = 10  # one number in ten is never trained on


ENGLISH_UNITS, ENGLISH_TENS, GERMAN_UNITS, GERMAN_TENS = (
    tuple(words.split())
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
        " seventeen eighteen nineteen",
        "- - twenty thirty forty fifty sixty seventy eighty ninety",
        "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn"
        " siebzehn achtzehn neunzehn",
        "- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    )
)


def _check(number: int) -> None:
    if not 0 <= number < LIMIT:
        raise ValueError(f"number {number} is outside 0..{LIMIT - 1:,}")


def english(number: int) -> str:
    """English name of `number`, 0..999,999: `english(2041) == "two thousand forty-one"`."""
    _check(number)
    words: list[str] = []
    thousands, rest = divmod(number, 1000)
    if thousands:
        words += [english(thousands), "thousand"]
    hundreds, rest = divmod(rest, 100)
    if hundreds:
        words += [ENGLISH_UNITS[hundreds], "hundred"]
    tens, unit = divmod(rest, 10)
    if rest >= 20:
        words.append(ENGLISH_TENS[tens] + (f"-{ENGLISH_UNITS[unit]}" if unit else ""))
    elif rest or not words:
        words.append(ENGLISH_UNITS[rest])
    return " ".join(words)


def german(number: int) -> str:
    """German name of `number`, 0..999,999: `german(2041) == "zweitausendeinundvierzig"`."""
    _check(number)
    stem = _german_stem(number)
    # Only the very last "ein" of a numeral is inflected: 101 einhunderteins, but 101,000 einhunderteintausend.
    return stem + "s" if number % 100 == 1 else stem


def _german_stem(number: int) -> str:
    thousands, rest = divmod(number, 1000)
    word = f"{_german_stem(thousands)}tausend" if thousands else ""
    hundreds, rest = divmod(rest, 100)
    if hundreds:
        word += f"{GERMAN_UNITS[hundreds]}hundert"
    tens, unit = divmod(rest, 10)
    if rest >= 20:
        word += (f"{GERMAN_UNITS[unit]}und" if unit else "") + GERMAN_TENS[tens]
    elif rest or not word:
        word += GERMAN_UNITS[rest]
    return word


def is_held_out(number: int, seed: int = 0) -> bool:
    """Return True for a number that may only be used to test.

    A hash decides for each number alone, so training and test never overlap, whatever their sizes. 0..99 are
    always trained on.
    """
    if number < ALWAYS_TRAINED:
        return False
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def sample_numbers(count: int, *, held_out: bool, seed: int = 0) -> list[int]:
    """`count` different numbers of one side of the split.

    The thousands and the rest each get their number of digits first, 0 to 3, so that short and round numbers
    are not drowned by the long ones: of all numbers below a million, 90 % have six digits. The training side also
    holds all of 0..99. Same arguments, same list.

    Raises:
        ConfigError: more than the split is known to have: 20,000 held out, 200,000 to train on.
    """
    most = 20_000 if held_out else 200_000
    if not 1 <= count <= most:
        raise ConfigError(
            f"cannot draw {count:,} {'held-out' if held_out else 'training'} numbers: expected 1..{most:,}"
        )
    rng = random.Random(f"transformer_fast numbers {seed} {held_out}")
    chosen = {} if held_out else dict.fromkeys(range(ALWAYS_TRAINED))
    while len(chosen) < count:
        thousands, rest = (rng.choices(GROUPS, GROUP_WEIGHTS)[0] for _ in range(2))
        number = 1000 * rng.choice(thousands) + rng.choice(rest)
        if number >= ALWAYS_TRAINED and is_held_out(number, seed) == held_out:
            chosen[number] = None
    return list(chosen)[:count]


def make_numbers_corpus(
    folder: PathLike, train_size: int = 25_000, held_out: int = 1_000, seed: int = 0
) -> dict[str, Path]:
    """Write the task as line-aligned files, the same ones for the same arguments.

    Args:
        folder: created if missing; receives train.en, train.de, test.en, test.de (UTF-8, one number per line).
        train_size: training pairs, 1..200,000.
        held_out: test pairs, 1..20,000, none of which is among the training pairs.
        seed: decides the split and the samples.

    Returns:
        The four paths under the keys "train_source", "train_target", "test_source", "test_target".
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for part, count in (("train", train_size), ("test", held_out)):
        numbers = sample_numbers(count, held_out=part == "test", seed=seed)
        for side, suffix, spell in (("source", "en", english), ("target", "de", german)):
            path = paths[f"{part}_{side}"] = folder / f"{part}.{suffix}"
            write_atomically(path, "".join(f"{spell(n)}\n" for n in numbers).encode("utf-8"))
    return paths


def numbers_config(folder: PathLike, save: PathLike, **changes: Any) -> TrainConfig:
    """The recipe for this task: about 150 s of CPU time, after which nearly every unseen number is exact.

    The learning-rate cooldown raises the share of exact answers to nearly all. BLEU is off, because it is meaningless
    for one-word sentences.

    Args:
        folder: folder that `make_numbers_corpus` wrote; save: the folder of the run.
        changes: settings to use instead of the recipe's; the cooldown keeps its share of `max_steps`.
    """
    folder, steps = Path(folder), changes.get("max_steps", 800)
    sizes = {"d_model": 128, "heads": 4, "layers": 2, "d_ff": 512, "dropout": 0.05, "vocab_size": 200}
    batches = {"max_length": 100, "batch_tokens": 2048, "lr": 2e-3, "warmup": 150}
    run = {"max_steps": steps, "cooldown": 3 * steps // 8, "valid_every": 400, "bleu_sentences": 0, "keep_last": 1}
    files = {"source": "train.en", "target": "train.de", "valid_source": "test.en", "valid_target": "test.de"}
    paths = {name: str(folder / file) for name, file in files.items()}
    return TrainConfig(**{**paths, "save": str(save), **sizes, **batches, **run, **changes})
