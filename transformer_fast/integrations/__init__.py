"""Other libraries' models on the fused ops. Each module imports its library only when it is used."""

from . import transformers

__all__ = ["transformers"]
