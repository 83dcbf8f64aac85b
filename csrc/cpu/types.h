// Types of tensors that the kernels on the CPU make and read.
#pragma once

#include <ATen/core/Tensor.h>

namespace transformer_fast {

// The type of the arithmetic on x, and of sums and statistics: float64 for float64, else float32.
inline at::ScalarType arithmetic_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// x in another type. ATen's own call costs a tenth of a microsecond to find out that there is nothing to do.
inline at::Tensor in_type(const at::Tensor& x, at::ScalarType type) {
  return x.scalar_type() == type ? x : x.to(type);
}

}  // namespace transformer_fast
