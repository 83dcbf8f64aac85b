// Parameters of the norm kernels on the CPU (forward.cpp, backward.cpp). T is the type of the elements.
#pragma once

#include "../element.h"

namespace transformer_fast {

enum class NormKind { kLayer, kStd, kRms };

template <typename T>
struct NormForwardParams {
  using A = Accumulate<T>;
  RowView<const T> x, residual;  // residual may be absent
  RowView<T> summed, out;        // contiguous; summed is residual + dropout(x), and absent without a residual
  Parameter<T> weight, bias;     // may be absent; kRms has no bias
  A *mean, *rstd;                // one number per row, if not null; kRms has no mean
  int64_t rows, d;
  A eps;
  NormKind kind;
  DropoutParams dropout;
};

template <typename T>
struct NormBackwardParams {
  using A = Accumulate<T>;
  RowView<const T> dy, x, grad_summed;  // grad_summed may be absent
  Parameter<T> weight;                  // may be absent
  const A *mean, *rstd;                 // kRms has no mean
  // Contiguous; absent if not requested. grad_residual differs from grad_x only with dropout, and is absent without.
  RowView<T> grad_x, grad_residual;
  // (d), in the element type if `narrow_weights`, else in the arithmetic type; null if not requested. kRms has no bias
  // gradient.
  void *grad_weight, *grad_bias;
  bool narrow_weights;
  int64_t rows, d;
  NormKind kind;
  DropoutParams dropout;
};

}  // namespace transformer_fast
