"""The oracle: every op and layer in plain eager PyTorch, written for reading. Kernels are held to it."""

from . import attention, cross_entropy, dropout, embedding, layers, norm

__all__ = ["attention", "cross_entropy", "dropout", "embedding", "layers", "norm"]
