// LayerNorm and Norm of tensors on the CPU, as transformer_fast/ops/norm.py documents them.
#pragma once

#include "tensors.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_fast {

// `summed` is undefined without a residual.
struct NormResult {
  at::Tensor out, summed;
};

// mean and rstd receive a number for each row, in arithmetic_type(x), where they are not null.
NormResult norm_forward(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                        const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
                        bool std, double dropout_p, const std::optional<at::Tensor>& seed, void* mean, void* rstd);

// Which gradients are asked for: of x and the residual, of the weight (there is one then), of the bias.
struct NormNeeds {
  bool rows, weight, bias;
};

// Undefined where there is nothing: what is not asked for; `residual` without dropout, where it equals `x`.
struct NormGradients {
  at::Tensor x, residual, weight, bias;
};

NormGradients norm_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_summed,
                            const at::Tensor& x, const std::optional<at::Tensor>& weight, const void* mean,
                            const void* rstd, bool std, double dropout_p, const std::optional<at::Tensor>& seed,
                            NormNeeds needs);

}  // namespace transformer_fast
