// Types of elements, as the kernels of the CPU and the code that calls them see them.
#pragma once

#include "simd/intrinsics.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace transformer_fast {

// The type of the arithmetic on T, of sums and of statistics: double for double, else float.
template <typename T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Rows of a matrix, `stride` elements apart, whose columns are neighbours; or nothing.
template <typename T>
struct RowView {
  T* data = nullptr;
  int64_t stride = 0;

  explicit operator bool() const { return data != nullptr; }
  T* row(int64_t r) const { return data + r * stride; }
};

// A vector of parameters in the type of the elements or in that of the arithmetic, or nothing.
template <typename T>
struct Parameter {
  const T* narrow = nullptr;
  const Accumulate<T>* wide = nullptr;

  explicit operator bool() const { return narrow != nullptr || wide != nullptr; }
};

// The dropout of a call: what is kept is a pure function of the seed and of where an element stands (philox.h).
struct DropoutParams {
  double p = 0;
  int64_t seed = 0;
};

// Compiles a kernel for each type of elements.
#define TRANSFORMER_FAST_FOR_EACH_TYPE(Result, kernel, Params) \
  template Result kernel(const Params<float>&);                \
  template Result kernel(const Params<double>&);               \
  template Result kernel(const Params<c10::Half>&);            \
  template Result kernel(const Params<c10::BFloat16>&);

}  // namespace transformer_fast
