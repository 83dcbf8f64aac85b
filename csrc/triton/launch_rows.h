// Norms, dropout and the loss by the Triton kernels of transformer_fast/triton: by the launches of an earlier equal call,
// or by the launchers in Python. Results that a launcher leaves out are undefined or empty. All functions are the Python
// module's, and take the GIL; the ops call them by python_hooks.h.
#pragma once

#include "../ops/seed.h"
#include "../ops/tensors.h"

#include <array>
#include <optional>
#include <string>

namespace transformer_fast {

// (out, summed, mean, rstd) of triton/norm.py.
std::array<Tensor, 4> launch_norm(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps, const std::string& kind, double dropout_p,
                                  const Seed& seed);
// The gradients of x, in its type, the residual, the weight and the bias; that of the residual only with dropout.
std::array<Tensor, 4> launch_norm_backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                                           const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                                           const std::string& kind, double dropout_p, const Seed& seed, bool has_bias,
                                           at::ScalarType type_of_x);

Tensor launch_dropout(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual, bool relu, double p,
                      const Seed& seed);
// The gradients of x and of the bias.
std::array<Tensor, 2> launch_dropout_backward(const Tensor& grad_out, const OptionalTensor& y, bool relu, double p,
                                              const Seed& seed, bool has_bias);

// The loss, the gradients of x, weight and bias, and their scale, of x (rows, d) and target (rows,).
std::array<Tensor, 5> launch_cross_entropy(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                           const Tensor& target, double smoothing, int64_t ignore_index, bool mean,
                                           const std::array<bool, 3>& gradients, int64_t chunk_elements);

}  // namespace transformer_fast
