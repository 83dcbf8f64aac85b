// Conversion of tensors to parameters of the CPU kernels.
#pragma once

#include "../cpu/element.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>

#include <optional>

namespace transformer_fast {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalSymInt = std::optional<c10::SymInt>;

// Converts a size, symbolic while a graph is made, to the int of a kernel.
inline std::optional<int64_t> known(const OptionalSymInt& number) {
  return number ? std::optional(number->guard_int(__FILE__, __LINE__)) : std::nullopt;
}

// The type of the arithmetic on x, and of sums and statistics: float64 for float64, else float32.
inline at::ScalarType arithmetic_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// x in another type. ATen's own call takes a tenth of a microsecond even if there is nothing to do.
inline at::Tensor in_type(const at::Tensor& x, at::ScalarType type) { return x.scalar_type() == type ? x : x.to(type); }

// Memory for a result of the sizes and strides of x, on the CPU. ATen's own call passes the dispatcher twice.
inline at::Tensor empty_like_on_cpu(const at::Tensor& x) {
  return x.is_contiguous() ? at::cpu::empty(x.sizes(), x.options()) : at::empty_like(x);
}

// Parameters (d) of any type for a kernel with elements of type T; this object owns a converted copy.
template <typename T>
class ParameterTensor {
  using A = Accumulate<T>;

 public:
  explicit ParameterTensor(const OptionalTensor& source) {
    if (!source) return;
    const bool narrow = source->scalar_type() == c10::CppTypeToScalarType<T>::value && !std::is_same_v<T, A>;
    const Tensor typed = narrow ? *source : in_type(*source, c10::CppTypeToScalarType<A>::value);
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

// Dropout with probability p; if p is not 0, by the seed, an int64 tensor (1,).
inline DropoutParams dropout_params(double p, const OptionalTensor& seed) {
  return {p, p > 0 ? *seed->const_data_ptr<int64_t>() : 0};
}

}  // namespace transformer_fast
