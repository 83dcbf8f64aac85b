"""Texts for ``benchmarks/sentence_embeddings.py``, the same in each run: queries, captions, second wordings, passages.

A scene is a person with clothes, an action, a place and a time. A caption tells a scene in one order of words, its
second wording in another order and with other words. Scenes of a list share many parts, so a right neighbour has close
rivals.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

PEOPLE = (
    ("a man", "a guy"), ("a woman", "a lady"), ("a young boy", "a little kid"), ("a girl", "a female child"),
    ("a couple", "a pair"), ("a group of friends", "a party of young people"), ("an elderly man", "an old gentleman"),
    ("a worker", "a laborer"), ("a musician", "a performer"), ("a child", "a toddler"),
    ("a soccer player", "an athlete"), ("a street vendor", "a merchant"),
)  # fmt: skip
CLOTHES = (
    ("a red shirt", "a crimson top"), ("a blue jacket", "a navy coat"), ("a white hat", "a pale cap"),
    ("black sunglasses", "dark glasses"), ("an orange vest", "a bright vest"), ("a green dress", "an emerald gown"),
    ("a striped sweater", "a pullover with stripes"), ("a yellow raincoat", "a coat against the rain"),
)  # fmt: skip
ACTIONS = (
    ("riding a bicycle", "on a bike"), ("playing the guitar", "making music with a guitar"),
    ("reading a newspaper", "looking at the news on paper"), ("walking a large dog", "out with a big dog on a leash"),
    ("cooking food over a fire", "preparing a meal above the flames"), ("jumping into water", "leaping into a pool"),
    ("climbing a steep rock", "going up a cliff with a rope"), ("painting a picture", "working on a canvas"),
    ("throwing a ball", "about to pitch"), ("eating ice cream", "enjoying a frozen dessert"),
    ("repairing a car engine", "fixing a motor"), ("taking photographs", "busy with a camera"),
    ("selling fresh fruit", "offering apples and oranges"), ("sleeping on a bench", "taking a nap on a wooden seat"),
)  # fmt: skip
PLACES = (
    ("in front of a brick building", "near a house of red stone"), ("on a crowded street", "amid a busy road"),
    ("at the beach", "by the sea"), ("in a green field", "on the grass of a meadow"), ("inside a kitchen", "indoors"),
    ("next to a lake", "at the shore of a pond"), ("on a snowy mountain", "high up in the snow"),
    ("at a railway station", "where the trains stop"), ("under a bridge", "below an overpass"),
    ("in a city park", "among the trees in town"),
)  # fmt: skip
TIMES = (
    ("at night", "after dark"), ("in the morning", "early in the day"), ("while it rains", "in wet weather"),
    ("on a sunny day", "in bright sunshine"), ("", ""), ("", ""),
)  # fmt: skip
SHORTEST, LONGEST = 17, 214
"""Words of a passage: with this vocabulary about 20 to 256 tokens."""


def capital(text: str) -> str:
    """Return a text with a capital letter at its begin."""
    return text[0].upper() + text[1:]


class Scene(NamedTuple):
    """Parts of a scene, each in two wordings."""

    person: tuple[str, str]
    clothes: tuple[str, str]
    action: tuple[str, str]
    place: tuple[str, str]
    time: tuple[str, str]

    def caption(self) -> str:
        """A sentence of 10 to 25 words."""
        tail = f" {self.time[0]}" if self.time[0] else ""
        return capital(f"{self.person[0]} with {self.clothes[0]} is {self.action[0]} {self.place[0]}{tail}.")

    def second(self) -> str:
        """The same scene in other words."""
        head = f"{self.time[1]}, " if self.time[1] else ""
        return capital(f"{head}{self.place[1]}, there is {self.person[1]} {self.action[1]}, wearing {self.clothes[1]}.")

    def query(self, words: random.Random) -> str:
        """Two or three parts of the scene, as typed into a search box."""
        parts = [self.person[0].partition(" ")[2], self.action[0], self.clothes[0], self.place[0]]
        return " ".join(words.sample(parts, words.choice((1, 2, 2, 3))))


def scenes(count: int, seed: int = 0) -> list[Scene]:
    """Return different scenes."""
    words = random.Random(seed)
    found: dict[Scene, None] = {}
    while len(found) < count:
        found[Scene(*(words.choice(parts) for parts in (PEOPLE, CLOTHES, ACTIONS, PLACES, TIMES)))] = None
    return list(found)


def captions(count: int) -> list[str]:
    """Return captions of different scenes."""
    return [scene.caption() for scene in scenes(count)]


def second_wordings(count: int) -> list[str]:
    """Return the second wordings of the scenes of :func:`captions`, in the same order."""
    return [scene.second() for scene in scenes(count)]


def queries(count: int) -> list[str]:
    """Return short queries."""
    words = random.Random(1)
    return [scene.query(words) for scene in scenes(count, seed=2)]


def passages(count: int) -> list[str]:
    """Return passages of several sentences, their lengths spread evenly from the shortest to the longest."""
    words = random.Random(3)
    found = []
    for _ in range(count):
        length, text = words.randint(SHORTEST, LONGEST), ""
        for scene in scenes(LONGEST // 8, seed=words.randrange(10**6)):
            text += f" {scene.caption() if words.random() < 0.5 else scene.second()}"
        found.append(" ".join(text.split()[:length]))
    return found


class Case(NamedTuple):
    """Texts of a measurement, and how they are given to ``encode``.

    Attributes:
        texts: in the order in which they come.
        one_by_one: a call for each text, else one call for all, in batches of 32.
    """

    texts: list[str]
    one_by_one: bool = False


CASES: dict[str, Callable[[], Case]] = {
    "a query": lambda: Case(queries(16), one_by_one=True),
    "32 queries": lambda: Case(queries(32)),
    "captions": lambda: Case(captions(128)),
    "passages": lambda: Case(passages(64)),
    "long passages": lambda: Case(sorted(passages(64), key=len)[32:]),
}
"""Cases by name. "long passages" is the first of the two batches that ``encode`` makes of "passages"."""

NEIGHBOURS = 128
"""Captions that look for their second wording."""


MIXED = 16
"""Texts of the batch with the most padding: half of them are captions, half passages."""


def compared() -> list[list[str]]:
    """Texts on which ways are compared, a list for each call: captions, their second wordings in the same order,
    queries, and a batch of both captions and passages."""
    mixed = [*captions(MIXED // 2), *passages(MIXED // 2)]
    return [captions(NEIGHBOURS), second_wordings(NEIGHBOURS), queries(32), mixed]
