// Parameters of the dropout kernels on the CPU (dropout.cpp). T is the type of the elements; everything is contiguous.
#pragma once

#include "element.h"

namespace transformer_fast {

template <typename T>
struct DropoutForwardParams {
  const T *x, *residual;  // residual may be null
  Parameter<T> bias;      // may be absent
  T* out;
  int64_t rows, d;
  bool relu;
  DropoutParams dropout;
};

template <typename T>
struct DropoutBackwardParams {
  const T* grad_out;
  const T* positive;  // with ReLU the output of the forward, else null
  T* grad_x;
  Accumulate<T>* grad_bias;  // (d), or null
  int64_t rows, d;
  DropoutParams dropout;
};

}  // namespace transformer_fast
