"""Calls of transformer_fast whose compiled GPU kernels run in the PTX emulator."""
