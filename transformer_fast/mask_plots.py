"""Pictures of the mask dialects: :func:`mask_pictures` of :mod:`transformer_fast.cli.mask_plots`."""

from .cli.mask_plots import mask_pictures

__all__ = ["mask_pictures"]
