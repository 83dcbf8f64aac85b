"""The laboratory: GPU kernels executed without a GPU. README.md says what it found."""
