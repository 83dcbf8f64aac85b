"""Masked attention: kernels and launchers."""
