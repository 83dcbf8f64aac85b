"""Masked attention: kernels and launchers.

All kernels use the same argument names. A missing part of a call is None; the kernel is then compiled without that
part. Arguments are not grouped in tuples, because Triton specialises each integer in a tuple by its value and would
compile a kernel anew for each length.

========================== ============================================================================================
argument                   meaning
========================== ============================================================================================
q, out, grad_out, grad_q   pointer to (B, H, Lq, D), last stride 1; of a packed batch (Tq, H, D)
k, v, grad_k, grad_v       pointer to (B, Hkv, Lk, D), last stride 1; of a packed batch (Tk, Hkv, D)
x_batch, x_head, x_row     strides of such a tensor x, in units of UNIT elements
logsumexp, delta           pointer to fp32 (B, H, Lq), contiguous; packed (H, Tq). delta is, per query, the sum over the
                           keys of weight times gradient
sums                       pointer to fp32 like logsumexp: true sum of the weights per query; None where not corrected
grad_logsumexp             pointer to fp32 like logsumexp, or None
empty_flags                pointer to int32: one flag per FLAG_ROWS queries, not 0 where one of them has no key
dropout_bits                  pointer to int32: bits of dropout from the forward, one per weight (:mod:`.dropout_bits`)
keep                       pointer to int32 (b, h, rows, words): 32 keys per word (:mod:`.tile_map`). Strides
                           keep_batch, keep_head and keep_query are in chunks of 8 words, keep_word is 0 or 1
key_keep                   pointer to int32 (b, h, 1, words) of the same kind: a mask on keys alone
lengths                    pointer to int32 (B,) or (B, Lq): keys per batch, or per query
bias                       pointer to (b, h, q, k); strides bias_batch, bias_head, bias_query in units of MASK_UNIT
                           elements. Packed: (h, pairs), a sequence's pairs row by row from bias_starts on
distance_bias              pointer to fp32 (b, h, distances): entry ``distance_zero + j - i`` is added to the score
query_ids, key_ids         pointer to int32 (b, Lq), (b, Lk): query i sees key j of the same id
sinks                      pointer to fp32 (H,): score of one more key, without a value
seed                       pointer to int64 (1,), or the number itself
cu_seqlens_q, cu_seqlens_k pointer to int32 (B + 1,): first row per sequence of a packed batch; None if padded
seqused_k                  pointer to int32 (B,): keys of each sequence that count, from its first on; None for all
bias_starts                pointer to int64 (B + 1,): first pair of each sequence in a packed bias
batch_order                pointer to int32 (B,): batches by falling work
tile_list, tile_counts     pointer to int32: for each tile of rows the tiles that hold work, and their numbers
tile_order                 pointer to int32: tiles of rows by falling work
map_batch, map_head        strides of these three lists, 0 where all batches or heads share one
heads, group               H, and the number of query heads per key head
queries, keys              Lq and Lk; of a packed batch at least those of its longest sequence
total_queries              Lq, or Tq of a packed batch: last size of logsumexp
total_keys, pairs          Tk, and the pairs of the bias, of a packed batch
causal_offset, window      query i sees keys j with ``i + window <= j <= i + causal_offset``
threshold, rescale         dropout drops draws below threshold, of 65,536; kept weights are multiplied by rescale
scale, softcap             scores are ``softcap * tanh(scale * q k / softcap)``; without a softcap ``scale * q k``
HEAD_DIM, BLOCK_D          D, and the power of two that holds it
BLOCK_QUERIES, BLOCK_KEYS  tile of a program
UNIT, MASK_UNIT            elements per unit of stride: more than 1 where all strides allow it, to tell the alignment
ZERO_EMPTY_ROWS            a query without keys gets 0 instead of the mean of the values
BOTTOM_RIGHT               positions count from the end of a sequence: its last query is at its last key
========================== ============================================================================================

A kernel's own arguments are explained beside it.
"""
