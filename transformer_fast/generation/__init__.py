"""Decoding: from source ids and a trained model to target ids."""

from .beam import beam_search
from .config import GenerationConfig
from .generate import generate
from .greedy import greedy
from .request import Hypothesis

__all__ = ["GenerationConfig", "Hypothesis", "beam_search", "generate", "greedy"]
