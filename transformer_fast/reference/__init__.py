"""Reference implementation of every op, layer and dialect in plain eager PyTorch. Kernels are tested against the
reference."""

from . import attention, cross_entropy, dialects, dropout, embedding, layers, norm, quantized_linear

__all__ = ["attention", "cross_entropy", "dialects", "dropout", "embedding", "layers", "norm", "quantized_linear"]
