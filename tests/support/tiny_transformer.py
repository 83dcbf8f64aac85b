"""A small Transformer to test decoding with: its choices are far from ties, so that rounding decides nothing."""

from __future__ import annotations

import torch

from transformer_fast import Transformer

BOS, EOS, VOCAB = 0, 1, 30
MARKS = {"bos": BOS, "eos": EOS}


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **options: object) -> Transformer:
    """A model in evaluation mode, whose answers have many lengths; options are those of `Transformer`."""
    torch.manual_seed(seed)
    options = {"d_ff": 48, "norm": "layer", **options}
    model = Transformer(VOCAB, VOCAB, 32, 2, 4, 0.1, **options).to(dtype)
    with torch.no_grad():
        model.out.weight.mul_(1 if options.get("tie_weights") else 8)
        for layer in model.decoder.layers:  # what is said shall depend on what was read and said
            for attention in (layer.attn_1, layer.attn_2):
                attention.v_linear.weight.mul_(8)
                attention.k_linear.weight.mul_(4)
    return model.eval()


def batch(size: int = 6, width: int = 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random sources (size, width), and their lengths (size,)."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(2, VOCAB, (size, width), generator=generator)
    return src, torch.randint(1, width + 1, (size,), generator=generator)
