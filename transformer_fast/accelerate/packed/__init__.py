"""Models without the padding of their batches: ``accelerate(model, packed=True)``.

=========== ==========================================================================
classes.py  the class of a module that takes part, and how it is pickled
layer.py    a layer takes the padding out of its inputs, and puts it back
model.py    a model's arguments, output layer and loss
trial.py    the trial of a layer with and without padding
walk.py     which modules of a model take part
=========== ==========================================================================
"""

from .classes import Packed
from .walk import pack

__all__ = ["Packed", "pack"]
