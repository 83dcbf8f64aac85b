"""The oracle: every op, layer and dialect in plain eager PyTorch, written for reading. Kernels are held to it."""

from . import attention, cross_entropy, dialects, dropout, embedding, layers, norm, quantized_linear

__all__ = ["attention", "cross_entropy", "dialects", "dropout", "embedding", "layers", "norm", "quantized_linear"]
