"""Triton kernels and their launchers.

One module per op: kernel, then launcher; attention has several kernels and is a folder. A launcher does not check its
inputs; ``transformer_fast.ops`` does. A launcher imports only the tensor cache and the loader of the extension from the
packages above.

This file imports nothing, so that the package can be imported without Triton.
"""
