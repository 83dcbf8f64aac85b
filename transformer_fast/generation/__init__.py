"""Decoding: from source ids and a trained model to target ids."""

from .beam import beam_search
from .config import GenerationConfig
from .decoding import Hypothesis
from .generate import generate
from .greedy import greedy

__all__ = ["GenerationConfig", "Hypothesis", "beam_search", "generate", "greedy"]
