// Linear layers with weights in a layout of their own, which the dtype of the packed weight names: float
// (cpu/linear/step_linear.cpp), int8 (quantized_linear.cpp), and for weights in bfloat16 int32 (narrow_linear.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace transformer_fast {

// True if there is a kernel for weights in bfloat16.
bool has_narrow_linear();

// Packs weights (out, in) of linear layers with the same input: in float32, quantised to int8 on request, or bfloat16.
at::Tensor pack_weight(at::TensorList weights, bool int8);

// Linear layer on x (..., in), of the dtype that was packed -> (..., outputs). activation: "none", "relu", and for int8
// weights "gelu" or "gelu_tanh".
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         int64_t outputs, std::string_view activation);

}  // namespace transformer_fast
