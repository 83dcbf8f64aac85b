"""Answers that no CPU gives, or whose package does not install: read in the sources, with version and place.

fairseq 0.12.2 does not run with Python 3.11, and OpenNMT-py 3.5.1 not with PyTorch 2.13.
"""

from __future__ import annotations

FA2 = "csrc/flash_attn/flash_api.cpp"
KERNELS = "kernels-community, `flash-attn2/{}` at 2d6ecf3c (2026-07-20)"

ATTENTION: list[dict[str, str]] = [
    {
        "library": "flash-attn, `flash_attn_func`",
        "version": "2.8.4, commit 0251105a (2026-08-15)",
        "empty": "zeros",
        "mask": "none; lengths by `cu_seqlens`, an ALiBi slope, a window",
        "causal": "bottom right (since 2.1)",
        "dropout": "applied, in the kernel",
        "source": "README.md, flash_attn/flash_attn_interface.py",
    },
    {
        "library": "fairseq, `MultiheadAttention`",
        "version": "0.12.2",
        "empty": "as `F.multi_head_attention_forward`, which it calls",
        "mask": "`key_padding_mask` (B, Lk): True drops; `attn_mask` (Lq, Lk): is added",
        "causal": "by a square mask of its own",
        "dropout": "applied",
        "source": "fairseq/modules/multihead_attention.py",
    },
]

MODELS: list[dict[str, str]] = [
    {
        "library": "fairseq",
        "version": "0.12.2",
        "smoothing": "eps / (V - 1) to the others, padding among them",
        "positions": "sinusoidal, halves, rates of tensor2tensor, from padding_idx + 1; padding is skipped",
        "scores": "sum of log probabilities by the tokens, the end included",
        "source": "criterions/label_smoothed_cross_entropy.py, utils.py, sequence_generator.py",
    },
    {
        "library": "OpenNMT-py",
        "version": "3.5.1",
        "smoothing": "as `nn.CrossEntropyLoss`, which it calls",
        "positions": "sinusoidal, interleaved, from 0; padding counts",
        "scores": "sum of log probabilities; by the length with `length_penalty: avg`, by GNMT's with `wu`",
        "source": "utils/loss.py, modules/embeddings.py, translate/penalties.py",
    },
]

DROPOUT: list[dict[str, str]] = [
    {
        "kernel": "FlashAttention-2, as released",
        "version": "flash-attn 2.8.4, commit 0251105a (2026-08-15)",
        "dropout": "applied",
        "source": FA2,
    },
    {
        "kernel": "FlashAttention-2, FLASH_ATTENTION_DISABLE_DROPOUT=TRUE, which one wheel for every PyTorch needs",
        "version": "flash-attn, commit 00756db9 (2026-07-24); pull request 2688 is open",
        "dropout": "refused with an error",
        "source": f"setup.py, {FA2}",
    },
    {
        "kernel": "the same from the Hub, on CUDA",
        "version": "kernels-community/flash-attn2, version 3",
        "dropout": "refused with an error",
        "source": KERNELS.format("flash_attn/flash_api.cpp"),
    },
    {
        "kernel": "the same, on a CPU",
        "version": "kernels-community/flash-attn2, version 3",
        "dropout": "taken, and ignored",
        "source": KERNELS.format("flash_attn_cpu/flash_api.cpp"),
    },
    {
        "kernel": "FlashAttention-3",
        "version": "flash-attention, commit 0251105a (2026-08-15)",
        "dropout": "no argument",
        "source": "hopper/flash_attn_interface.py",
    },
    {
        "kernel": "FlashAttention-4",
        "version": "flash-attention, commit 0251105a (2026-08-15); pull request 2657 is open",
        "dropout": "no argument",
        "source": "flash_attn/cute/interface.py",
    },
]
