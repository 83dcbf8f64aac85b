"""Faults in the Triton kernels; Triton's interpreter runs them."""

from .fault import Fault

ROWS = (
    Fault(
        name="a causal query does not see its own key",
        path="transformer_fast/triton/attention/mask.py",
        old="tl.minimum(rows + bounds.causal_offset + 1, bounds.keys)",
        new="tl.minimum(rows + bounds.causal_offset, bounds.keys)",
        tests=("tests/interpreter/test_attention_kernels.py",),
    ),
    Fault(
        name="documents are ignored beside a dense mask",
        path="transformer_fast/triton/attention/mask.py",
        old="            allowed = allowed & same_document(rows, start_key, mask.bounds, KEYS)\n        return allowed",
        new="            allowed = allowed\n        return allowed",
        tests=("tests/interpreter/test_attention_kernels.py",),
    ),
    Fault(
        name="tiles at the front edge of a window are taken for full",
        path="transformer_fast/triton/attention/steps.py",
        old="full = tl.cdiv(first_visible(last_row, bounds), BLOCK_KEYS)",
        new="full = first_visible(last_row, bounds) // BLOCK_KEYS",
        tests=("tests/interpreter/test_attention_kernels.py",),
    ),
    Fault(
        name="keys of a packed batch that are not used get what is in memory for a gradient",
        path="transformer_fast/triton/attention/steps.py",
        old="row_stride, logsumexp, first + count, end, ROWS",
        new="row_stride, logsumexp, end, end, ROWS",
        tests=("tests/interpreter/test_attention_kernels_packed.py",),
    ),
    Fault(
        name="kept weights are not scaled up",
        path="transformer_fast/triton/attention/forward.py",
        old="acc *= (rescale / divisor)[:, None]",
        new="acc *= (1.0 / divisor)[:, None]",
        tests=("tests/interpreter/test_attention_kernels.py",),
    ),
    Fault(
        name="a NaN in a value that a query does not see shows in its result",
        path="transformer_fast/triton/attention/forward.py",
        old="seen = tl.where(allowed, 1.0, 0.0).to(v_tile.dtype)",
        new="seen = tl.where(allowed, 1.0, 1.0).to(v_tile.dtype)",
        tests=("tests/interpreter/test_attention_kernels.py",),
    ),
    Fault(
        name="heads of a group after the first give keys no gradient",
        path="transformer_fast/triton/attention/backward_kv.py",
        old="for member in tl.range(0, group, disable_licm=True):",
        new="for member in tl.range(0, 1, disable_licm=True):",
        tests=("tests/interpreter/test_attention_kernels.py",),
    ),
    Fault(
        name="parts of a cache are joined without their maxima",
        path="transformer_fast/triton/attention/decode.py",
        old="row_sum = row_sum * decay + tl.sum(sum_tile * factor, 0)",
        new="row_sum = row_sum + tl.sum(sum_tile * factor, 0)",
        tests=("tests/interpreter/test_attention_kernels_decode.py",),
    ),
    Fault(
        name="the gradient of a norm's bias is summed over the weight's parts",
        path="transformer_fast/triton/norm_backward.py",
        old="bias_sum += load_tile(partials, rows + programs, columns, inside, d)",
        new="bias_sum += load_tile(partials, rows, columns, inside, d)",
        tests=("tests/interpreter/test_norm.py",),
    ),
    Fault(
        name="all heads drop the same weights",
        path="transformer_fast/triton/philox.py",
        old="head = tl.cast(random.head, tl.uint32) + blank",
        new="head = blank",
        tests=("tests/interpreter/test_attention_kernels.py",),
    ),
    Fault(
        name="an ignored target has a gradient",
        path="transformer_fast/triton/cross_entropy.py",
        old="            gradient = tl.where(counts, gradient, 0.0)\n",
        new="",
        tests=("tests/interpreter/test_cross_entropy.py",),
    ),
)
