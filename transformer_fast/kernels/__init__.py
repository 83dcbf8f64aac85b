"""Kernels and their launchers: Triton for the GPU, the C++/CUDA extension beside them.

One module an op, each readable from top to bottom: kernel, then launcher. A launcher
trusts its inputs (the checks are in ``transformer_fast.ops``) and imports nothing of
the package above this one except the tile tables of :mod:`transformer_fast.configs`.

Nothing is imported here, so that a machine without Triton can still load the extension.
"""
