"""Products and layers that training never needs: weights in layouts of their own, int8, attention layers in one call.

The rooms before this one (:mod:`..ops`, ...) do not import it, and :mod:`..layers` only inside of functions, when a
module has such weights or is evaluated. `csrc/inference` has its kernels' tensors.
"""
