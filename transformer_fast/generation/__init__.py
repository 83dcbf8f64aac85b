"""Decoding: from source ids and a trained model to target ids."""

from .beam import Hypothesis, beam_search
from .greedy import greedy

__all__ = ["Hypothesis", "beam_search", "greedy"]
