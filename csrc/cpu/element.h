// Element types, shared by the CPU kernels and their callers.
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

// Rows of a matrix with unit column stride, `stride` elements apart; or nothing.
template <typename T>
struct RowView {
  T* data = nullptr;
  int64_t stride = 0;

  explicit operator bool() const { return data != nullptr; }
  T* row(int64_t r) const { return data + r * stride; }
};

// A vector of parameters in the element type or in the arithmetic type, or nothing.
template <typename T>
struct Parameter {
  const T* narrow = nullptr;
  const Accumulate<T>* wide = nullptr;

  explicit operator bool() const { return narrow != nullptr || wide != nullptr; }
};

// The dropout of a call: the mask is a pure function of the seed and of the element's position (philox.h).
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
