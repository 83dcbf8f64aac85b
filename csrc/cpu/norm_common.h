// What the norms' forward and backward on the CPU share: how they see their tensors.
#pragma once

#include "norm.h"

#include "draws.h"
#include "pages.h"
#include "vec.h"

#include <ATen/ATen.h>

#include <optional>

namespace transformer_fast {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// (rows, d) with unit stride along the columns; a view wherever the strides allow one.
inline Tensor as_rows(const Tensor& x) {
  const int64_t d = x.size(-1);
  const Tensor dense = d == 1 || x.stride(-1) == 1 ? x : x.contiguous();
  return dense.dim() == 2 ? dense : dense.reshape({x.numel() / d, d});
}

inline OptionalTensor as_rows(const OptionalTensor& x) { return x ? OptionalTensor(as_rows(*x)) : OptionalTensor(); }

// Weights are read in the type of the activations or in that of the arithmetic; any other, or two types, is converted.
struct Weights {
  Tensor weight, bias;
  at::ScalarType type;

  Weights(const OptionalTensor& weight_, const OptionalTensor& bias_, at::ScalarType activations,
          at::ScalarType arithmetic)
      : type(arithmetic) {
    const OptionalTensor& given = weight_ ? weight_ : bias_;
    if (given && given->scalar_type() == activations && (!bias_ || bias_->scalar_type() == activations))
      type = activations;
    if (weight_) weight = in_type(*weight_, type).contiguous();
    if (bias_) bias = in_type(*bias_, type).contiguous();
  }
};

template <typename T>
struct Matrix {
  T* data = nullptr;
  int64_t stride = 0;

  Matrix() = default;
  explicit Matrix(const Tensor& x)
      : data(static_cast<T*>(const_cast<void*>(x.const_data_ptr()))), stride(x.stride(0)) {}
  explicit Matrix(const OptionalTensor& x) : Matrix(x ? Matrix(*x) : Matrix()) {}

  // A result, which is contiguous, or nothing.
  Matrix(const Tensor& result, int64_t d)
      : data(result.defined() ? static_cast<T*>(result.mutable_data_ptr()) : nullptr), stride(d) {}

  explicit operator bool() const { return data != nullptr; }
  T* row(int64_t r) const { return data + r * stride; }
  Pages pages(int64_t begin, int64_t end) const { return *this ? Pages(row(begin), row(end)) : Pages(); }
};

template <typename A>
const A* pointer(const Tensor& x) {
  return x.defined() ? x.const_data_ptr<A>() : nullptr;
}

}  // namespace
}  // namespace transformer_fast
