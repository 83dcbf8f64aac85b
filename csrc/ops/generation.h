// What a step of decoding needs besides the ops.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_fast {

// x (..., in), fp32 -> (..., outputs); packed: from pack_step_weight, (panels, in, outputs of a panel).
at::Tensor step_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                       int64_t outputs, bool relu);

// The same with int8 weights from pack_quantized_weight.
at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            int64_t outputs, bool relu);

}  // namespace transformer_fast
