// The arguments that the attention ops share: flat in their schemas, in functions as AttentionParams.
#pragma once

#include "attention.h"
#include "op.h"
#include "seed.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace transformer_fast::attention_op {
namespace {

const std::string kArguments =
    "Tensor? keep=None, Tensor? key_keep=None, Tensor? lengths=None, Tensor? bias=None, Tensor? distance_bias=None, "
    "Tensor? query_ids=None, Tensor? key_ids=None, Tensor? sinks=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? seqused_k=None, Tensor? "
    "bias_starts=None, "
    "bool bottom_right=False, SymInt? causal=None, SymInt? window=None, float? softcap=None, float? scale=None, "
    "float dropout_p=0.0, Tensor? seed=None, bool zero_empty_rows=False)";

template <typename... Others>
const Tensor& first(const Tensor& tensor, const Others&...) {
  return tensor;
}
template <typename... Others>
const Tensor& first(bool, const Tensor& tensor, const Others&...) {
  return tensor;
}

inline double default_scale(const Tensor& q) {
  if (q.dim() == 0) return 1;  // the check refuses such queries
  return 1 / std::sqrt(static_cast<double>(q.sym_size(-1).guard_int(__FILE__, __LINE__)));
}

// A wrapper with flat arguments for a function that takes AttentionParams as its first argument.
template <auto function>
struct Flat;
template <typename Result, typename Params, typename... Inputs, Result (*function)(Params, Inputs...)>
struct Flat<function> {
  static Result call(Inputs... inputs, const OptionalTensor& keep, const OptionalTensor& key_keep,
                     const OptionalTensor& lengths, const OptionalTensor& bias, const OptionalTensor& distance_bias,
                     const OptionalTensor& query_ids, const OptionalTensor& key_ids, const OptionalTensor& sinks,
                     const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                     OptionalSymInt max_seqlen_q, OptionalSymInt max_seqlen_k, const OptionalTensor& seqused_k,
                     const OptionalTensor& bias_starts, bool bottom_right, OptionalSymInt causal, OptionalSymInt window,
                     std::optional<double> softcap, std::optional<double> scale, double dropout_p,
                     const OptionalTensor& seed, bool zero_empty_rows) {
    const Tensor& q = first(inputs...);
    return function({.keep = keep,
                     .key_keep = key_keep,
                     .lengths = lengths,
                     .bias = bias,
                     .distance_bias = distance_bias,
                     .query_ids = query_ids,
                     .key_ids = key_ids,
                     .sinks = sinks,
                     .causal = std::move(causal),
                     .window = std::move(window),
                     .softcap = softcap,
                     .scale = scale ? *scale : default_scale(q),
                     .dropout_p = dropout_p,
                     .seed = seed,
                     .zero_empty_rows = zero_empty_rows,
                     .by_triton = runs_on_triton(q),
                     .packed = {cu_seqlens_q, cu_seqlens_k, max_seqlen_q.value_or(kUnknown),
                                max_seqlen_k.value_or(kUnknown), seqused_k, bias_starts, bottom_right}},
                    std::forward<Inputs>(inputs)...);
  }
};

// Calls an op by the dispatcher.
template <Name name, auto function, typename... Inputs>
auto dispatch(const AttentionParams& p, const Inputs&... inputs) {
  const PackedBatch& packed = p.packed;
  return op<name, Flat<function>::call>()(
      inputs..., p.keep, p.key_keep, p.lengths, p.bias, p.distance_bias, p.query_ids, p.key_ids, p.sinks,
      packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k, packed.seqused_k,
      packed.bias_starts, packed.bottom_right, p.causal, p.window, p.softcap, p.scale, p.dropout_p,
      seed_beside(first(inputs...), p.seed), p.zero_empty_rows);
}

// True if kernels read the rows of x as they are, without gaps. contiguous() leaves strides that nobody reads.
inline bool is_dense(const Tensor& x) {
  const auto is = [](const c10::SymBool& condition) { return condition.guard_bool(__FILE__, __LINE__); };
  return is(x.sym_stride(-1).sym_eq(1)) || is(x.sym_size(-1).sym_le(1)) || is(x.sym_numel().sym_eq(0));
}

// The length of the longest sequence; on a GPU this waits for the device. 0 for what the check refuses.
inline int64_t longest_sequence(const Tensor& starts) {
  if (starts.dim() != 1 || starts.numel() < 2 || starts.scalar_type() != at::kInt) return 0;
  const int64_t count = starts.numel() - 1;
  if (!starts.is_cpu() || !starts.is_contiguous())
    return std::max<int64_t>(0, (starts.narrow(0, 1, count) - starts.narrow(0, 0, count)).max().item<int32_t>());
  const int32_t* const values = starts.const_data_ptr<int32_t>();
  int64_t longest = 0;
  for (int64_t i = 0; i < count; ++i) longest = std::max<int64_t>(longest, values[i + 1] - values[i]);
  return longest;
}

// Lengths (B,) or (B, Lq) in int32. ATen takes a microsecond for a few numbers.
inline Tensor in_int32(const Tensor& lengths) {
  if (lengths.scalar_type() == at::kInt) return lengths;
  if (!lengths.is_cpu() || lengths.scalar_type() != at::kLong || lengths.dim() != 1) return lengths.to(at::kInt);
  const Tensor numbers = at::cpu::empty(lengths.sizes(), lengths.options().dtype(at::kInt));
  const int64_t* const from = lengths.const_data_ptr<int64_t>();
  int32_t* const to = numbers.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < lengths.size(0); ++b) to[b] = static_cast<int32_t>(from[b * lengths.stride(0)]);
  return numbers;
}

// The parts of a checked call as the kernels read them: lengths int32 (B,) or (B, Lq), and key_keep (.., 1, Lk).
inline void make_readable(AttentionParams& params, const Tensor& q, const Tensor& k) {
  if (OptionalTensor& lengths = params.lengths) {
    lengths = in_int32(*lengths);
    if (lengths->size(0) != q.size(0) || (lengths->dim() == 2 && lengths->size(1) != q.size(2))) {
      lengths = lengths->dim() == 2 ? lengths->expand({q.size(0), q.size(2)}) : lengths->expand({q.size(0)});
      if (params.by_triton) lengths = lengths->contiguous();
    }
  }
  if (OptionalTensor& keep = params.key_keep; keep && keep->size(3) != k.size(2))
    keep = keep->expand({-1, -1, -1, k.size(2)});
  if (OptionalTensor& used = params.packed.seqused_k) used = used->contiguous();
}
inline AttentionParams readable(AttentionParams params, const Tensor& q, const Tensor& k) {
  make_readable(params, q, k);
  return params;
}

}  // namespace
}  // namespace transformer_fast::attention_op
