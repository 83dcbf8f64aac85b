// The arguments that the attention ops share: flat in their schemas, in functions as AttentionParams.
#pragma once

#include "attention.h"
#include "op.h"
#include "seed.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace transformer_fast::attention_op {
namespace {

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

// The type of a field as an argument of an op, and its text in a schema.
template <typename T>
struct Argument {
  using Type = T;
  static constexpr const char *kType = "float", *kDefault = "0.0";
};
template <>
struct Argument<bool> {
  using Type = bool;
  static constexpr const char *kType = "bool", *kDefault = "False";
};
template <>
struct Argument<std::optional<double>> {
  using Type = std::optional<double>;
  static constexpr const char *kType = "float?", *kDefault = "None";
};
template <>
struct Argument<OptionalTensor> {
  using Type = const OptionalTensor&;
  static constexpr const char *kType = "Tensor?", *kDefault = "None";
};
template <>
struct Argument<OptionalSymInt> {
  using Type = OptionalSymInt;
  static constexpr const char *kType = "SymInt?", *kDefault = "None";
};
template <>
struct Argument<c10::SymInt> : Argument<OptionalSymInt> {};  // of the longest sequence, which may be unknown

// The end of a schema: "Tensor? keep=None, ..., bool zero_empty_rows=False)".
const std::string kArguments = [] {
  std::string text;
  AttentionParams params;
  AttentionParams::visit(params, [&]<typename T>(const Field<T>& field) {
    text +=
        (text.empty() ? "" : ", ") + std::string(Argument<T>::kType) + " " + field.name + "=" + Argument<T>::kDefault;
  });
  return text + ")";
}();

// A wrapper with flat arguments for a function that takes AttentionParams as its first argument.
template <auto function, typename Fields = decltype(AttentionParams::fields(std::declval<AttentionParams&>()))>
struct Flat;
template <typename Result, typename Params, typename... Inputs, Result (*function)(Params, Inputs...), typename... T>
struct Flat<function, std::tuple<Field<T>...>> {
  static Result call(Inputs... inputs, typename Argument<T>::Type... arguments) {
    AttentionParams params;
    const auto set = []<typename Value>(Value& value, auto&& argument) {
      if constexpr (std::is_same_v<Value, c10::SymInt>)
        value = argument.value_or(kUnknown);
      else
        value = std::forward<decltype(argument)>(argument);
    };
    std::apply([&](auto... field) { (set(field.value, std::forward<typename Argument<T>::Type>(arguments)), ...); },
               AttentionParams::fields(params));
    const Tensor& q = first(inputs...);
    if (!params.scale) params.scale = default_scale(q);
    params.by_triton = runs_on_triton(q);
    return function(std::move(params), std::forward<Inputs>(inputs)...);
  }
};

// Calls an op by the dispatcher.
template <Name name, auto function, typename... Inputs>
auto dispatch(AttentionParams params, const Inputs&... inputs) {
  params.seed = seed_beside(first(inputs...), params.seed);
  return std::apply([&](auto... field) { return op<name, Flat<function>::call>()(inputs..., field.value...); },
                    AttentionParams::fields(params));
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
