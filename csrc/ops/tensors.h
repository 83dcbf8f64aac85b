// Tensors as the kernels of the CPU take them.
#pragma once

#include "../cpu/element.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_cpu_dispatch.h>

#include <optional>

namespace transformer_fast {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalSymInt = std::optional<c10::SymInt>;

// The number that a kernel takes; while a graph is made, it may be a symbol.
inline std::optional<int64_t> known(const OptionalSymInt& number) {
  return number ? std::optional(number->guard_int(__FILE__, __LINE__)) : std::nullopt;
}

// The type of the arithmetic on x, and of sums and statistics: float64 for float64, else float32.
inline at::ScalarType arithmetic_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// x in another type. ATen's own call costs a tenth of a microsecond to find out that there is nothing to do.
inline at::Tensor in_type(const at::Tensor& x, at::ScalarType type) { return x.scalar_type() == type ? x : x.to(type); }

// Parameters (d), of any type, as a kernel for elements of type T takes them; what had to be converted lives as long.
template <typename T>
class ParameterTensor {
  using A = Accumulate<T>;

 public:
  explicit ParameterTensor(const OptionalTensor& given) {
    if (!given) return;
    const bool narrow = given->scalar_type() == c10::CppTypeToScalarType<T>::value && !std::is_same_v<T, A>;
    const Tensor typed = narrow ? *given : in_type(*given, c10::CppTypeToScalarType<A>::value);
    tensor_ = typed.contiguous();
    if (narrow)
      parameter_.narrow = tensor_.const_data_ptr<T>();
    else
      parameter_.wide = tensor_.const_data_ptr<A>();
  }

  const Parameter<T>& parameter() const { return parameter_; }

 private:
  Tensor tensor_;
  Parameter<T> parameter_;
};

// By the seed, an int64 in a tensor, where p is not 0.
inline DropoutParams dropout_params(double p, const OptionalTensor& seed) {
  return {p, p > 0 ? *seed->const_data_ptr<int64_t>() : 0};
}

}  // namespace transformer_fast
