// LayerNorm and Norm on the CPU (norm.cpp), as transformer_fast/ops/norm.py documents them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_fast {

// Undefined where there is nothing: `summed` without a residual, the statistics where they are not wanted.
struct NormResult {
  at::Tensor out, summed, mean, rstd;
};

NormResult norm_forward(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                        const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
                        bool std, double dropout_p, const std::optional<at::Tensor>& seed, bool statistics);

// Undefined where there is nothing: `residual` without dropout, where it equals `x`; the weights that are absent.
struct NormGradients {
  at::Tensor x, residual, weight, bias;
};

NormGradients norm_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_summed,
                            const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& mean,
                            const at::Tensor& rstd, bool std, double dropout_p, const std::optional<at::Tensor>& seed,
                            bool has_bias);

}  // namespace transformer_fast
