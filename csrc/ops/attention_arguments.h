// Conversion between the flat arguments of the attention ops' schemas and AttentionParams.
#pragma once

#include "attention.h"
#include "by_triton.h"
#include "eager_call.h"
#include "operator.h"
#include "seed.h"

#include <string>
#include <type_traits>
#include <utility>

namespace transformer_fast::attention_op {
namespace {

const std::string kMask = "Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor? bias, ";
const std::string kSequences =
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? seqused_k, bool "
    "bottom_right, "
    "Tensor? bias, Tensor? bias_starts, ";
const std::string kOptions =
    "SymInt? causal, SymInt? window, float scale, float dropout_p, Tensor? seed, bool zero_empty_rows, "
    "Tensor? distance_bias=None, Tensor? query_ids=None, Tensor? key_ids=None, Tensor? sinks=None, "
    "float? softcap=None)";

// Arguments between the inputs and the options, for padded and for packed batches.
inline void set_keys(AttentionParams& params, const OptionalTensor& keep, const OptionalTensor& key_keep,
                     const OptionalTensor& lengths, const OptionalTensor& bias) {
  params.keep = keep, params.key_keep = key_keep, params.lengths = lengths, params.bias = bias;
}
inline void set_keys(AttentionParams& params, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                     c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k, const OptionalTensor& seqused_k,
                     bool bottom_right, const OptionalTensor& bias, const OptionalTensor& bias_starts) {
  params.packed = {cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q), std::move(max_seqlen_k), seqused_k,
                   bias_starts,  bottom_right};
  params.bias = bias;
}

template <typename... Others>
const Tensor& first(const Tensor& tensor, const Others&...) {
  return tensor;
}

// Wrappers with flat arguments for an op's functions, which take AttentionParams as their first argument.
template <auto function, typename... Keys>
struct Flat;
template <typename Result, typename... Inputs, Result (*function)(const AttentionParams&, Inputs...), typename... Keys>
struct Flat<function, Keys...> {
  static Result call(Inputs... inputs, Keys... keys, OptionalSymInt causal, OptionalSymInt window, double scale,
                     double dropout_p, const OptionalTensor& seed, bool zero_empty_rows,
                     const OptionalTensor& distance_bias, const OptionalTensor& query_ids,
                     const OptionalTensor& key_ids, const OptionalTensor& sinks, std::optional<double> softcap) {
    AttentionParams params;
    set_keys(params, std::move(keys)...);
    params.distance_bias = distance_bias, params.query_ids = query_ids, params.key_ids = key_ids, params.sinks = sinks;
    params.causal = std::move(causal), params.window = std::move(window), params.softcap = softcap;
    params.scale = scale, params.dropout_p = dropout_p;
    params.seed = seed, params.zero_empty_rows = zero_empty_rows;
    params.by_triton = runs_on_triton(first(inputs...));
    return function(params, inputs...);
  }
};
template <auto function>
using Padded =
    Flat<function, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&>;
template <auto function>
using Packed = Flat<function, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, const OptionalTensor&, bool,
                    const OptionalTensor&, const OptionalTensor&>;

// Calls an op by the dispatcher: the packed op for a packed batch, else the padded op.
template <auto function, typename... Inputs>
auto dispatch(const char* name, const char* packed_name, const AttentionParams& p, const Inputs&... inputs) {
  const OptionalTensor seed = seed_beside(first(inputs...), p.seed);
  const auto call = [&](const auto& op, const auto&... keys) {
    return op(inputs..., keys..., p.causal, p.window, p.scale, p.dropout_p, seed, p.zero_empty_rows, p.distance_bias,
              p.query_ids, p.key_ids, p.sinks, p.softcap);
  };
  if (p.is_packed()) {
    static const Operator<std::remove_pointer_t<decltype(&Packed<function>::call)>> op(packed_name);
    return call(op, *p.packed.cu_seqlens_q, *p.packed.cu_seqlens_k, p.packed.max_seqlen_q, p.packed.max_seqlen_k,
                p.packed.seqused_k, p.packed.bottom_right, p.bias, p.packed.bias_starts);
  }
  static const Operator<std::remove_pointer_t<decltype(&Padded<function>::call)>> op(name);
  return call(op, p.keep, p.key_keep, p.lengths, p.bias);
}

}  // namespace
}  // namespace transformer_fast::attention_op
