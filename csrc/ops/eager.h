// The eager fast paths, one per public function of transformer_fast/ops. Each returns the result, or None if the call
// needs the dispatcher.
#pragma once

#include <pybind11/pybind11.h>

namespace transformer_fast::eager {

using pybind11::handle;
using pybind11::object;

// `by_triton`: true to use the Triton kernels, on any device, instead of the CPU kernels. Lengths must then be int32
// and within bounds, and the seed may be an int.
object attention(bool by_triton, handle q, handle k, handle v, handle keep, handle key_keep, handle lengths,
                 handle bias, handle causal, handle window, handle scale, handle dropout_p, handle seed,
                 handle empty_rows);
// nn.MultiheadAttention without gradients: queries, keys, values (B, L, E) or (L, B, E), its weights and biases, the mask in
// normal form -> (out, weights or None).
object multihead_attention(handle query, handle key, handle value, handle in_weight, handle in_bias, handle out_weight,
                           handle out_bias, handle heads, handle batch_first, handle keep, handle key_keep, handle bias,
                           handle causal, handle need_weights, handle average);
// Attention over packed sequences.
object attention_packed(bool by_triton, handle q, handle k, handle v, handle cu_seqlens_q, handle cu_seqlens_k,
                        handle max_q, handle max_k, handle causal, handle window, handle scale, handle dropout_p,
                        handle seed, handle empty_rows);
// Attention of the newest queries to a cache.
object attention_decode(bool by_triton, handle q, handle k_cache, handle v_cache, handle lengths, handle page_table,
                        handle causal, handle window, handle scale);
object dropout(bool by_triton, handle x, handle p, handle bias, handle residual, handle relu, handle seed);
object layer_norm(bool by_triton, handle x, handle weight, handle bias, handle eps, handle kind, handle residual,
                  handle dropout_p, handle seed);
object linear(handle x, handle weight, handle bias);
// Linear layers of one input in training under autocast, on any device: weights, and no biases or as many -> a tuple.
object projections(handle x, const pybind11::tuple& weights, const pybind11::tuple& biases);
object linear_cross_entropy(handle x, handle weight, handle bias, handle target, handle label_smoothing,
                            handle ignore_index, handle reduction, handle chunk_elements);
object embed(handle ids, handle weight, handle table, handle scale, handle offset, handle padding_idx, handle dropout_p,
             handle seed);
object add_positional(handle x, handle table, handle offset, handle dropout_p, handle seed);

// One int64 from torch's CPU generator, equal to torch.randint(-2**63, 2**63 - 1, (1,)).
object draw_seed();
int64_t draw_number();  // the seed as an int

}  // namespace transformer_fast::eager
