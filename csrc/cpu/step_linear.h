// Linear layers for the few rows of a decoding step (step_linear.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_fast {

// x (..., in), fp32 -> (..., outputs); packed: from pack_step_weight, (outputs / 32 rounded up, in, 32).
at::Tensor step_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                       int64_t outputs, bool relu);

}  // namespace transformer_fast
