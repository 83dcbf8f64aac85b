// LayerNorm and Norm on the CPU (norm.cpp, norm_backward.cpp): what their kernels take. T is the type of the elements.
#pragma once

#include "../element.h"

namespace transformer_fast {

template <typename T>
struct NormForwardParams {
  using A = Accumulate<T>;
  RowView<const T> x, residual;  // residual may be absent
  RowView<T> summed, out;        // contiguous; summed is residual + dropout(x), and absent without a residual
  Parameter<T> weight, bias;     // may be absent
  A *mean, *rstd;                // receive a number for each row, where they are not null
  int64_t rows, d;
  A eps;
  bool std;
  DropoutParams dropout;
};

template <typename T>
struct NormBackwardParams {
  using A = Accumulate<T>;
  RowView<const T> dy, x, grad_summed;  // grad_summed may be absent
  Parameter<T> weight;                  // may be absent
  const A *mean, *rstd;
  // Contiguous; absent if not asked for. grad_residual differs from grad_x with dropout only, and is absent without.
  RowView<T> grad_x, grad_residual;
  // (d), each in the type of the elements if `narrow_weights`, else in that of the arithmetic; null if not asked for.
  void *grad_weight, *grad_bias;
  bool narrow_weights;
  int64_t rows, d;
  bool std;
  DropoutParams dropout;
};

}  // namespace transformer_fast
