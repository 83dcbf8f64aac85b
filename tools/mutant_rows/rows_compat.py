"""Faults in the signatures of the peers."""

from .fault import Fault
from .places import PACKAGE

COMPAT = PACKAGE + "compat/"

ROWS = (
    Fault(
        name="causal leaves the right bound of a window",
        path=COMPAT + "bounds.py",
        old="return left, 0 if causal else right",
        new="return left, right if right is not None or not causal else 0",
        tests=("tests/compat/test_flash_attention.py",),
    ),
    Fault(
        name="ALiBi of a peer counts from the top left corner",
        path=COMPAT + "bounds.py",
        old="AttentionMask.alibi(alibi_slopes, offset)",
        new="AttentionMask.alibi(alibi_slopes)",
        tests=("tests/compat/test_flash_attention.py",),
    ),
    Fault(
        name="sequences of other lengths are aligned at their first tokens",
        path=COMPAT + "ragged.py",
        old='"bottom_right": not same}',
        new='"bottom_right": False}',
        tests=("tests/compat/test_flash_varlen.py",),
    ),
    Fault(
        name="a ragged batch of one query each sees all keys in spite of a window",
        path=COMPAT + "ragged.py",
        old="if left is None and self.alibi_slopes is None and right",
        new="if self.alibi_slopes is None and right",
        tests=("tests/compat/test_flash_varlen.py",),
    ),
    Fault(
        name="the padding of a ragged batch is seen",
        path=COMPAT + "ragged.py",
        old="    if not of_k.is_full:\n        key",
        new="    if False:\n        key",
        tests=("tests/compat/test_flash_varlen.py",),
    ),
    Fault(
        name="queries of a cache are rotated at their own places without causal",
        path=COMPAT + "kv_cache.py",
        old="if bounds == (None, None):",
        new="if False:",
        tests=("tests/compat/test_kv_cache.py",),
    ),
    Fault(
        name="new keys are not among those that queries see",
        path=COMPAT + "kv_cache.py",
        old="        lengths = lengths + k.shape[1]\n",
        new="",
        tests=("tests/compat/test_kv_cache.py",),
    ),
    Fault(
        name="a cache that is indexed is read in order",
        path=COMPAT + "kv_cache.py",
        old="return batch_idx[:, None]",
        new="return torch.arange(B, device=q.device)[:, None]",
        tests=("tests/compat/test_kv_cache.py",),
    ),
    Fault(
        name="full blocks of a block mask go by its function",
        path=COMPAT + "block_masks.py",
        old="allowed = allowed | in_full_block[:, :, lines][..., columns]",
        new="allowed = allowed | False",
        tests=("tests/compat/test_block_masks.py",),
    ),
    Fault(
        name="heads of a block mask that differ are those of the first",
        path=COMPAT + "block_masks.py",
        old="            self.heads_agree = False\n",
        new="            pass\n",
        tests=("tests/compat/test_block_masks.py",),
    ),
    Fault(
        name="a form of a block mask is compared with its first rows alone",
        path=COMPAT + "block_masks.py",
        old="        if not forms:\n            return None\n",
        new="        return forms[0] if forms else None\n",
        tests=("tests/compat/test_block_masks.py",),
    ),
    Fault(
        name="a sliced window of a block mask stays at the first rows",
        path=COMPAT + "block_masks.py",
        old='parts["window_offset"] = form.window_offset + first',
        new='parts["window_offset"] = form.window_offset',
        tests=("tests/compat/test_block_masks.py",),
    ),
    Fault(
        name="the logsumexp beside decoding is the output",
        path=PACKAGE + "ops/attention_decode.py",
        old="**options, backend=backend)\n    return (out, logsumexp) if return_logsumexp else out",
        new="**options, backend=backend)\n    return (out, out[..., 0]) if return_logsumexp else out",
        tests=("tests/ops/test_attention_decode.py",),
    ),
)
