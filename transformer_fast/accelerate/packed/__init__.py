"""Models that skip the padding of a batch: ``accelerate(model, packed=True)``.

=========== ==========================================================================
classes.py classes for modules that skip padding, and their pickling layer.py a layer removes the padding of its inputs
and restores it in its output model.py arguments, output layer and loss of a model trial.py comparison of a layer with
and without padding walk.py search for the modules that can skip padding
=========== ==========================================================================
"""

from .classes import Packed
from .walk import pack

__all__ = ["Packed", "pack"]
