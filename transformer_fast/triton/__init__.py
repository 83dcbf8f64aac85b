"""Triton kernels and their launchers.

One module an op: kernel, then launcher; attention, which has several kernels, is a folder. A launcher trusts its inputs
(the checks are in ``transformer_fast.ops``) and imports nothing of the packages above but the cache on tensors and the
loader of the extension.

Nothing is imported here, so that a machine without Triton can still import the package.
"""
