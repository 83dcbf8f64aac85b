"""Comparison of embeddings with those of torch in fp32, for ``benchmarks/sentence_embeddings.py``."""

from __future__ import annotations

from typing import NamedTuple

import numpy
from sentence_texts import MIXED, NEIGHBOURS
from sentence_ways import LIMITS, WAYS

Array = numpy.ndarray


class Quality(NamedTuple):
    """Embeddings beside those of torch in fp32.

    Attributes:
        difference: the largest of any element; embeddings have length 1.
        cosine: the least between two embeddings of the same text.
        spearman: of the similarities of all pairs of different texts.
        first: share of captions to which their second wording is the nearest of all second wordings.
        mixed: the least cosine in a batch of captions and passages, which has the most padding.
    """

    difference: float
    cosine: float
    spearman: float
    first: float
    mixed: float


def quality(found: Array, expected: Array) -> Quality:
    """Compare embeddings (texts, d) with the expected ones, both in the order of ``sentence_texts.compared()``."""
    cosine = (found * expected).sum(1) / numpy.linalg.norm(found, axis=1) / numpy.linalg.norm(expected, axis=1)
    mixed = float(cosine[-MIXED:].min())
    found, expected, cosine = found[:-MIXED], expected[:-MIXED], cosine[:-MIXED]
    upper = numpy.triu_indices(len(found), 1)
    pairs = [ranks((e @ e.T)[upper]) for e in (found, expected)]
    spearman = float(numpy.corrcoef(*pairs)[0, 1])
    captions, seconds = found[:NEIGHBOURS], found[NEIGHBOURS : 2 * NEIGHBOURS]
    first = float(((captions @ seconds.T).argmax(1) == numpy.arange(NEIGHBOURS)).mean())
    return Quality(float(abs(found - expected).max()), float(cosine.min()), spearman, first, mixed)


def ranks(values: Array) -> Array:
    """Ranks of values, (n,)."""
    found = numpy.empty(len(values))
    found[values.argsort()] = numpy.arange(len(values))
    return found


def wrong(way: str, embeddings: dict[str, Array]) -> str:
    """Return what is wrong with the embeddings of a way, or ""."""
    found, (largest, least) = quality(embeddings[way], embeddings["torch"]), LIMITS[WAYS[way].kind]
    if found.difference <= largest and min(found.cosine, found.mixed) >= least:  # a comparison with NaN is False
        return ""
    cosines = f"cosine {found.cosine:.5f}, {found.mixed:.5f} beside long texts (at least {least})"
    return f"{way}: difference {found.difference:.1e} (at most {largest}), {cosines}"
