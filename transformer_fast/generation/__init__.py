"""Decoding: from source ids and a trained model to target ids."""

from transformer_fast.generation.beam import Hypothesis, beam_search
from transformer_fast.generation.greedy import greedy

__all__ = ["Hypothesis", "beam_search", "greedy"]
