"""Models that skip the padding of a batch: ``accelerate(model, packed=True)``. ``walk.py`` is the way in."""

from .walk import pack

__all__ = ["pack"]
