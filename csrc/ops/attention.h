// Attention of tensors on the CPU. The caller checks the inputs; the last dimensions have unit stride.
#pragma once

#include "tensors.h"

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace transformer_fast {

constexpr int64_t kUnknown = -(int64_t{1} << 40);  // length of the longest sequence that was not given

// Boundaries of the sequences of a packed batch.
struct PackedBatch {
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // int32 (sequences + 1,), rising from 0; none: the batch is not packed
  c10::SymInt max_seqlen_q = 0, max_seqlen_k = 0;  // lengths of the longest
  OptionalTensor seqused_k;                        // int32 (sequences,): number of keys in use per sequence
  OptionalTensor bias_starts;                      // int64 (sequences + 1,): first pair of each sequence in the bias
  bool bottom_right = false;                       // bottom-right alignment: the last query is at the last key
};

// An argument of the ops: its name in their schemas and in Python, and where it is.
template <typename T>
struct Field {
  const char* name;
  T& value;
  bool of_packed = false;
};
template <typename T>
Field(const char*, T&) -> Field<T>;
template <typename T>
Field(const char*, T&, bool) -> Field<T>;

// Mask, scale and dropout, in the normal form that transformer_fast/ops/attention.py makes of its arguments.
struct AttentionParams {
  static constexpr size_t kTensors = 13;

  OptionalTensor keep;            // bool (B | 1, H | 1, Lq | 1, Lk | 1)
  OptionalTensor key_keep;        // bool (B | 1, H | 1, 1, Lk)
  OptionalTensor lengths;         // int32 (B,) or (B, Lq): number of keys visible to a query
  OptionalTensor bias;            // float (B | 1, H | 1, Lq | 1, Lk | 1), added to the scaled scores; packed
                                  // (H | 1, pairs), contiguous: the (Lq, Lk) of all sequences, concatenated
  OptionalTensor distance_bias;   // fp32 or fp64 (B | 1, H | 1, Lq + Lk - 1): entry Lq - 1 + j - i, as the bias
  OptionalTensor query_ids;       // int32 (B | 1, Lq), packed (Tq,): query i sees the keys with its own id
  OptionalTensor key_ids;         // int32 (B | 1, Lk), packed (Tk,)
  OptionalTensor sinks;           // fp32 or fp64 (H,): score of one additional key without a value
  OptionalSymInt causal;          // query i sees keys up to i + causal
  OptionalSymInt window;          // ... and from i + window on
  std::optional<double> softcap;  // scaled scores s become softcap * tanh(s / softcap) before biases are added
  std::optional<double> scale;    // none only in a schema
  double dropout_p = 0;
  OptionalTensor seed;  // int64 (1,), with dropout
  bool zero_empty_rows = false;
  bool by_triton = false;  // whether the Triton kernels compute the call
  PackedBatch packed;

  bool is_packed() const { return packed.cu_seqlens_q.has_value(); }

  // The fields in the order of the schemas: what handles all of them alike reads this list.
  template <typename Params>
  static auto fields(Params& p) {
    return std::tuple{Field{"keep", p.keep},
                      Field{"key_keep", p.key_keep},
                      Field{"lengths", p.lengths},
                      Field{"bias", p.bias},
                      Field{"distance_bias", p.distance_bias},
                      Field{"query_ids", p.query_ids},
                      Field{"key_ids", p.key_ids},
                      Field{"sinks", p.sinks},
                      Field{"cu_seqlens_q", p.packed.cu_seqlens_q, true},
                      Field{"cu_seqlens_k", p.packed.cu_seqlens_k, true},
                      Field{"max_seqlen_q", p.packed.max_seqlen_q, true},
                      Field{"max_seqlen_k", p.packed.max_seqlen_k, true},
                      Field{"seqused_k", p.packed.seqused_k, true},
                      Field{"bias_starts", p.packed.bias_starts, true},
                      Field{"bottom_right", p.packed.bottom_right, true},
                      Field{"causal", p.causal},
                      Field{"window", p.window},
                      Field{"softcap", p.softcap},
                      Field{"scale", p.scale},
                      Field{"dropout_p", p.dropout_p},
                      Field{"seed", p.seed},
                      Field{"zero_empty_rows", p.zero_empty_rows}};
  }
  // Calls a function with each field.
  template <typename Params, typename Visit>
  static void visit(Params& params, const Visit& visit) {
    std::apply([&](auto... field) { (visit(field), ...); }, fields(params));
  }

  // Autograd saves tensors separately, to detect in-place changes. These functions return the tensors (undefined for
  // missing parts), the params without tensors, and the params with the tensors put back.
  std::array<Tensor, kTensors> tensors() const;
  AttentionParams without_tensors() const;
  AttentionParams with(const Tensor* saved) const;
};

// Results of a forward. In training a CPU forward may keep weights for its backward, by tiles; a GPU forward may keep
// the dropout bits.
struct AttentionResult {
  Tensor out, logsumexp;
  OptionalTensor saved_probs, saved_factors, dropout_bits;
};

// The gradients of a call; those of biases and sinks only if needed.
struct AttentionGradients {
  Tensor q, k, v, bias, distance_bias, sinks;
};

// The needed gradients besides that of q. The kernels of a CPU compute those of k and v in any case.
struct GradientNeeds {
  bool bias = false, distance_bias = false, sinks = false, keys = true;
};

// q (B, H, Lq, D), k and v (B, Hkv, Lk, D) -> out like q, logsumexp (B, H, Lq); packed: q (T, H, D), k and v
// (Tk, Hkv, D) -> out like q, logsumexp (H, T). Weights are supported for padded batches only.
AttentionResult attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params,
                                  bool training);
AttentionGradients attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                      const AttentionParams& params, GradientNeeds needs);

// The gradient of the sinks, on any device: the score gradient of a key without a value, summed over the queries.
Tensor sinks_gradient(const Tensor& grad_out, const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                      const AttentionParams& params);

// The gradient of the bias alone.
Tensor attention_grad_bias(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                           const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                           const AttentionParams& params);
// (B, H, Lq, Lk), recomputed from q and k.
Tensor attention_weights(const Tensor& q, const Tensor& k, const AttentionParams& params);

}  // namespace transformer_fast
