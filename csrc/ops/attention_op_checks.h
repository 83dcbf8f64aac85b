// Checks of the arguments that the attention ops share.
#pragma once

#include "attention.h"
#include "checks.h"

namespace transformer_fast::attention_op {

// Sizes of a call. Lq and Lk of a packed batch are those of the longest sequences.
struct Sizes {
  c10::SymInt B, H, Lq, Lk;
};

// Checks q (B, H, Lq, D), k and v (B, Hkv, Lk, D); packed: q (Tq, H, D), k and v (Tk, Hkv, D). And the mask, biases,
// sinks, and dropout; on a CPU also the values of the tensors that kernels index with.
void check_arguments(const Checks& check, const AttentionParams& params, const Tensor& q, const Tensor& k,
                     const OptionalTensor& v);

// Checks that q and keys share a head_dim of at least 1.
void check_head_dims(const Checks& check, const Tensor& q, const char* keys, const Tensor& k);

// Checks that q, keys and values share dtype and device, q and keys the head_dim, and that the heads fit: dimension
// `key_heads` of the keys.
void check_heads(const Checks& check, const Tensor& q, const char* keys, const Tensor& k, const char* values,
                 const OptionalTensor& v, int64_t key_heads);

// Checks the arguments that attention to a cache has too. `queries` and `keys` are the sizes of the ids.
void check_special(const Checks& check, const Tensor& q, const Sizes& sizes, c10::SymIntArrayRef queries,
                   c10::SymIntArrayRef keys, const OptionalTensor& distance_bias, const OptionalTensor& query_ids,
                   const OptionalTensor& key_ids, const OptionalTensor& sinks, std::optional<double> softcap);

// Checks a logsumexp (B, H, Lq), packed (H, Tq), or the gradient of one.
void check_statistics(const Checks& check, const char* name, const OptionalTensor& statistics, const Tensor& q);

// Checks that lengths on the CPU, of any integer type, lie in [0, most]; the message has texts before `most` and behind
// the range. Lengths up to a number of `heads` look as if the dimensions of q were transposed.
void check_lengths(const Checks& check, const Tensor& lengths, int64_t most, const char* before, const char* behind,
                   int64_t heads = -1);

// Checks that the Triton kernels take the head_dim of x.
void check_head_dim(const Checks& check, const char* name, const Tensor& x);

}  // namespace transformer_fast::attention_op
