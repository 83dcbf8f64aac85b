// A linear layer and the label-smoothed cross entropy of its logits, with their gradients, as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

namespace transformer_fast {

// The loss, and the gradients of x, weight and bias: undefined where none was asked for. That of bias, and that of
// weight where it was summed over chunks, are in the type of the arithmetic. All are still to be multiplied by `scale`,
// a tensor of one number, undefined where no gradient was asked for.
struct CrossEntropyResult {
  at::Tensor loss;
  std::array<at::Tensor, 3> gradients;
  at::Tensor scale;
};

// x (rows, d), weight (vocabulary, d), bias (vocabulary,), target (rows,) int64. The loss is the sum over the rows
// whose target is not ignore_index, or their mean. At a time there are `chunk_elements` logits, or those of 64 rows.
CrossEntropyResult linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight,
                                        const std::optional<at::Tensor>& bias, const at::Tensor& target,
                                        double smoothing, int64_t ignore_index, bool mean,
                                        const std::array<bool, 3>& gradients, int64_t chunk_elements);

}  // namespace transformer_fast
