"""The laboratory: GPU kernels executed and timed without a GPU. README.md says what it found."""
