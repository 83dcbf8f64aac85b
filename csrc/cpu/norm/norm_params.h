// LayerNorm and Norm on the CPU (norm.cpp, norm_backward.cpp): what their kernels take. T is the type of the elements.
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
  A *mean, *rstd;                // receive a number for each row, where they are not null; kRms has no mean
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
  // Contiguous; absent if not asked for. grad_residual differs from grad_x with dropout only, and is absent without.
  RowView<T> grad_x, grad_residual;
  // (d), each in the type of the elements if `narrow_weights`, else in that of the arithmetic; null if not asked for, as
  // that of a bias always is of kRms.
  void *grad_weight, *grad_bias;
  bool narrow_weights;
  int64_t rows, d;
  NormKind kind;
  DropoutParams dropout;
};

}  // namespace transformer_fast
