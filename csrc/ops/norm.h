// LayerNorm, Norm and RMSNorm of tensors on the CPU, as transformer_fast/ops/norm.py documents them.
#pragma once

#include "../cpu/norm/norm_params.h"
#include "tensors.h"

#include <string_view>

namespace transformer_fast {

// `summed` is undefined without a residual.
struct NormResult {
  Tensor out, summed;
};

// The kind of this name in Python.
NormKind norm_kind(std::string_view name);

// mean and rstd receive one number per row, in arithmetic_type(x), if they are not null. kRms has no mean and no bias.
NormResult norm_forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, NormKind kind, double dropout_p,
                        const OptionalTensor& seed, void* mean, void* rstd);

}  // namespace transformer_fast
