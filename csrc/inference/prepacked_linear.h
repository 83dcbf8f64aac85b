// Linear layers with weights in a layout of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace transformer_fast {

// Linear layer on x (..., in), fp32 -> (..., outputs). packed: weight from pack_step_weight, (panels, in, panel width).
at::Tensor step_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                       int64_t outputs, bool relu);

// Copies weights (out, in) of linear layers with the same input, fp32, to the layout of step_linear.
at::Tensor pack_step_weight(at::TensorList weights);

// True if there is a kernel for weights in bfloat16.
bool has_narrow_linear();

// Copies a weight (out, in) in bfloat16 to the layout of narrow_linear, int32 (panels, groups, panel width).
at::Tensor pack_narrow_weight(const at::Tensor& weight);

// Linear layer on x (..., in), bfloat16 -> (..., outputs), with sums in float.
at::Tensor narrow_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         int64_t outputs);

// Linear layer with int8 weights from pack_quantized_weight. activation: "none", "relu", "gelu" or "gelu_tanh".
at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            int64_t outputs, std::string_view activation);

}  // namespace transformer_fast
