"""Faults in the Triton kernels and in what launches them; the interpreter runs these kernels."""

from .fault import Fault

TRITON = "transformer_fast/triton/"
MASK = TRITON + "attention/mask.py"
STEPS = TRITON + "attention/steps.py"
FOLDER = "tests/interpreter/"
ATTENTION = (FOLDER + "test_attention_kernels.py",)
OUTPUTS = (FOLDER + "test_attention_outputs.py",)
TILE_MAP = (FOLDER + "test_attention_tile_map.py",)
PACKED = (FOLDER + "test_attention_kernels_packed.py",)
DECODE = (FOLDER + "test_attention_kernels_decode.py",)
NORM = (FOLDER + "test_norm.py",)
DROPOUT = (FOLDER + "test_dropout.py",)
LOSS = (FOLDER + "test_cross_entropy.py",)

ROWS = (
    Fault(
        name="a window of a packed batch counts from the start beside a look-ahead from the end",
        path=TRITON + "attention/forward.py",
        old="window = aligned(window, keys - queries, BOTTOM_RIGHT)",
        new="window = aligned(window, keys - queries, False)",
        tests=PACKED,
    ),
    Fault(
        name="distances of a packed batch count from the longest sequence of keys",
        path=TRITON + "attention/tiles.py",
        old="(packed.max_k if packed.bottom_right else packed.max_q) - 1",
        new="packed.max_k - 1",
        tests=PACKED,
    ),
    Fault(
        name="the bias of a sequence has rows of the keys that are used",
        path=TRITON + "attention/forward.py",
        old="sequence_bias_row(bias_query, bias_starts, stored_keys)",
        new="sequence_bias_row(bias_query, bias_starts, keys)",
        tests=PACKED,
    ),
    Fault(
        name="keys of a packed batch that are not used get what is in memory for a gradient",
        path=TRITON + "attention/steps.py",
        old="row_stride, logsumexp, first + count, end, ROWS",
        new="row_stride, logsumexp, end, end, ROWS",
        tests=PACKED,
    ),
    Fault(
        name="a causal query does not see its own key",
        path=MASK,
        old="tl.minimum(rows + bounds.causal_offset + 1, bounds.keys)",
        new="tl.minimum(rows + bounds.causal_offset, bounds.keys)",
        tests=ATTENTION,
    ),
    Fault(
        name="lengths for each query are those of the first",
        path=MASK,
        old="tl.load(bounds.lengths + rows.to(tl.int64) * bounds.lengths_query)",
        new="tl.load(bounds.lengths)",
        tests=ATTENTION,
    ),
    Fault(
        name="the first key of a window is masked",
        path=MASK,
        old="inside = inside & (key >= (rows + bounds.window)[:, None])",
        new="inside = inside & (key > (rows + bounds.window)[:, None])",
        tests=ATTENTION,
    ),
    Fault(
        name="documents are ignored beside a dense mask",
        path=MASK,
        old="            allowed = allowed & same_document(rows, start_key, mask.bounds, KEYS)\n        return allowed",
        new="            allowed = allowed\n        return allowed",
        tests=ATTENTION,
    ),
    Fault(
        name="the window is ignored beside a dense mask",
        path=MASK,
        old="bits &= (-1 << (before // 2)) << (before - before // 2)",
        new="bits &= -1",
        tests=ATTENTION,
    ),
    Fault(
        name="the slope of the softcap is that of its half",
        path=MASK,
        old="slope = tl.where(allowed, 1.0 - capped * capped, 0.0)",
        new="slope = tl.where(allowed, 1.0 - capped, 0.0)",
        tests=ATTENTION,
    ),
    Fault(
        name="-inf in a bias does not block",
        path=MASK,
        old='allowed = allowed & (added != float("-inf"))',
        new="allowed = allowed & (added == added)",
        tests=ATTENTION,
    ),
    Fault(
        name="the bias by distance is read along the other diagonal",
        path=MASK,
        old="(mask.distance_zero - rows)[:, None]",
        new="(mask.distance_zero + rows)[:, None]",
        tests=ATTENTION,
    ),
    Fault(
        name="tiles at the front edge of a window are taken for full",
        path=STEPS,
        old="full = tl.cdiv(first_visible(last_row, bounds), BLOCK_KEYS)",
        new="full = first_visible(last_row, bounds) // BLOCK_KEYS",
        tests=ATTENTION,
    ),
    Fault(
        name="the tile at the end of the lengths is taken for full",
        path=STEPS,
        old="full_end = tl.maximum(tl.min(limit, 0), 0) // BLOCK_KEYS",
        new="full_end = tl.cdiv(tl.maximum(tl.min(limit, 0), 0), BLOCK_KEYS)",
        tests=ATTENTION,
    ),
    Fault(
        name="keys of a causal mask pass over their first tile of queries",
        path=STEPS,
        old="first = first_row // BLOCK_QUERIES",
        new="first = tl.cdiv(first_row, BLOCK_QUERIES)",
        tests=ATTENTION,
    ),
    Fault(
        name="the sink is missing in the forward's sum",
        path=TRITON + "attention/forward.py",
        old="        row_sum += 1.0\n    acc",
        new="        row_sum += 0.0\n    acc",
        tests=OUTPUTS,
    ),
    Fault(
        name="kept weights are not scaled up",
        path=TRITON + "attention/forward.py",
        old="acc *= (rescale / divisor)[:, None]",
        new="acc *= (1.0 / divisor)[:, None]",
        tests=ATTENTION,
    ),
    Fault(
        name="a NaN in a value that a query does not see shows in its result",
        path=TRITON + "attention/forward.py",
        old="seen = tl.where(allowed, 1.0, 0.0).to(v_tile.dtype)",
        new="seen = tl.where(allowed, 1.0, 1.0).to(v_tile.dtype)",
        tests=ATTENTION,
    ),
    Fault(
        name="a row without keys has the mean of one key less",
        path=TRITON + "attention/forward.py",
        old="tl.maximum(keys, 1).to(tl.float32), row_sum)",
        new="tl.maximum(keys - 1, 1).to(tl.float32), row_sum)",
        tests=ATTENTION,
    ),
    Fault(
        name="the gradient of keys lacks the scale",
        path=TRITON + "attention/backward_kv.py",
        old="store_rows(grad_k, k_acc * scale,",
        new="store_rows(grad_k, k_acc,",
        tests=ATTENTION,
    ),
    Fault(
        name="the gradient of keys lacks the slope of the softcap",
        path=TRITON + "attention/backward_kv.py",
        old="                grad_scores *= slope\n",
        new="                grad_scores *= 1.0\n",
        tests=ATTENTION,
    ),
    Fault(
        name="heads of a group after the first give keys no gradient",
        path=TRITON + "attention/backward_kv.py",
        old="for member in tl.range(0, group, disable_licm=True):",
        new="for member in tl.range(0, 1, disable_licm=True):",
        tests=ATTENTION,
    ),
    Fault(
        name="the gradient of the logsumexp has the wrong sign beside a bias",
        path=TRITON + "attention/grad_scores.py",
        old="row_delta -= tl.load(grad_logsumexp + first_row + rows)",
        new="row_delta += tl.load(grad_logsumexp + first_row + rows)",
        tests=ATTENTION,
    ),
    Fault(
        name="the gradient of a bias forgets to scale what dropout kept",
        path=TRITON + "attention/grad_scores.py",
        old="grad_weights = tl.where(kept, grad_weights * rescale, 0.0)",
        new="grad_weights = tl.where(kept, grad_weights, 0.0)",
        tests=ATTENTION,
    ),
    Fault(
        name="a negative scale leaves its sign out of the gradient of q",
        path=TRITON + "attention/backward.py",
        old="grad_q * (-1.0 if params.scale < 0 else 0.0)",
        new="grad_q * (1.0 if params.scale < 0 else 0.0)",
        tests=ATTENTION,
    ),
    Fault(
        name="the joined parts of a cache leave out the sink",
        path=TRITON + "attention/decode.py",
        old="        row_sum = 1.0\n",
        new="        row_sum = 0.0\n",
        tests=DECODE,
    ),
    Fault(
        name="parts of a cache are joined without their maxima",
        path=TRITON + "attention/decode.py",
        old="row_sum = row_sum * decay + tl.sum(sum_tile * factor, 0)",
        new="row_sum = row_sum + tl.sum(sum_tile * factor, 0)",
        tests=DECODE,
    ),
    Fault(
        name="a page that is no multiple of a tile is read at its first row",
        path=TRITON + "attention/decode_part.py",
        old="(key % PAGE_SIZE) * row_stride)[:, None]",
        new="(key * 0) * row_stride)[:, None]",
        tests=DECODE,
    ),
    Fault(
        name="returned weights of a large logsumexp leave out the sink",
        path=TRITON + "attention/weights.py",
        old="weight_sum = tl.where(end > first_key, tl.math.exp2((mask.sink - shift) * LOG2E), 0.0)",
        new="weight_sum = tl.where(end > first_key, 0.0, 0.0)",
        tests=OUTPUTS,
    ),
    Fault(
        name="eps of the std stands under the root",
        path=TRITON + "norm.py",
        old="return 1.0 / (tl.sqrt(squares / (d - 1)) + eps)",
        new="return 1.0 / tl.sqrt(squares / (d - 1) + eps)",
        tests=NORM,
    ),
    Fault(
        name="the norm of a sum is that of a wider number than the one stored",
        path=TRITON + "norm.py",
        old="        tile = rounded.to(tl.float32)\n",
        new="",
        tests=NORM,
    ),
    Fault(
        name="a wide row is normed around the mean of its first block",
        path=TRITON + "norm.py",
        old="shift + tl.sum(sums, 1) / d  # rms",
        new="shift  # rms",
        tests=NORM,
    ),
    Fault(
        name="the gradient of a sum is lost beside dropout",
        path=TRITON + "norm_backward.py",
        old="    if grad_summed is not None:\n        gradient +=",
        new="    if grad_summed is not None and not DROPOUT:\n        gradient +=",
        tests=NORM,
    ),
    Fault(
        name="the gradient of a norm's bias is summed over the weight's parts",
        path=TRITON + "norm_backward.py",
        old="bias_sum += load_tile(partials, rows + programs, columns, inside, d)",
        new="bias_sum += load_tile(partials, rows, columns, inside, d)",
        tests=NORM,
    ),
    Fault(
        name="the gradient through ReLU and dropout is not scaled up",
        path=TRITON + "dropout.py",
        old="keep = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32) > 0.0\n"
        "        return tl.where(keep, tile * rescale, 0.0)",
        new="keep = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32) > 0.0\n"
        "        return tl.where(keep, tile, 0.0)",
        tests=DROPOUT,
    ),
    Fault(
        name="rows beyond 2^32 draw as those before",
        path=TRITON + "philox.py",
        old="row_high = (rows >> 32).to(tl.uint32)[:, None] + blank",
        new="row_high = blank",
        tests=DROPOUT,
    ),
    Fault(
        name="all heads drop the same weights",
        path=TRITON + "philox.py",
        old="head = tl.cast(random.head, tl.uint32) + blank",
        new="head = blank",
        tests=ATTENTION,
    ),
    Fault(
        name="smoothing takes the sum of the logits for their mean",
        path=TRITON + "cross_entropy.py",
        old="loss += smoothing * (log_sum + tl.sum(depths, 0) / vocabulary)",
        new="loss += smoothing * (log_sum + tl.sum(depths, 0))",
        tests=LOSS,
    ),
    Fault(
        name="the loss of a row is a difference from its largest logit",
        path=TRITON + "cross_entropy.py",
        old="loss = (1.0 - smoothing) * (depth + log_sum)",
        new="loss = (1.0 - smoothing) * ((row_max + log_sum) - at_target)",
        tests=LOSS,
    ),
    Fault(
        name="an ignored target has a gradient",
        path=TRITON + "cross_entropy.py",
        old="            gradient = tl.where(counts, gradient, 0.0)\n",
        new="",
        tests=LOSS,
    ),
    Fault(
        name="the gradient of a target is always computed from the others",
        path=TRITON + "cross_entropy.py",
        old="tl.where(others > wanted_power, of_target, of_others)",
        new="of_others",
        tests=LOSS,
    ),
    Fault(
        name="kept bits of dropout swap the halves of a word",
        path=TRITON + "attention/kept_bits.py",
        old="return bits00 | (bits01 << 8) | (bits10 << 16) | (bits11 << 24)",
        new="return bits00 | (bits10 << 8) | (bits01 << 16) | (bits11 << 24)",
        tests=(FOLDER + "test_attention_kept_bits.py",),
    ),
)
