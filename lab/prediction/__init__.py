"""Times of the Triton kernels on an H100, predicted from their machine code."""
