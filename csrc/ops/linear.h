// x weight^T + bias by the faster of PyTorch's two libraries.
#pragma once

#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace transformer_fast {

// (..., columns) as a matrix.
inline Tensor matrix_of(const Tensor& tensor) { return tensor.reshape_symint({-1, tensor.sym_size(-1)}); }

// An op of PyTorch on oneDNN; none in a build without oneDNN.
template <typename Signature>
std::optional<c10::TypedOperatorHandle<Signature>> onednn_op(const char* name) {
  const auto schema = c10::Dispatcher::singleton().findSchema({name, ""});
  return schema ? std::optional(schema->typed<Signature>()) : std::nullopt;
}

// Product by oneDNN, for a weight (out, in) with any strides or in oneDNN's own layout; not recorded for autograd.
Tensor onednn_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool relu = false);

// Sends large float32 products to oneDNN (true) or not (false), in the whole process; none: whichever is faster.
// Returns the previous choice.
std::optional<bool> send_products_to_onednn(std::optional<bool> choice);

// True if float32 matrices of these sizes, (rows, in) and (in, out), go to oneDNN: where it is faster than at::linear,
// unless send_products_to_onednn chose.
bool onednn_is_faster(int64_t rows, int64_t in, int64_t out);

// Overload for x (..., in) and a weight (out, in) of one type; false for all types but float32.
bool onednn_is_faster(const Tensor& x, const Tensor& weight);

// Linear layer on x (..., in) and weight (out, in), plain CPU tensors; not recorded for autograd.
Tensor linear_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

// Gradient of the weight, grad^T x (out, in), from grad (rows, out) and x (rows, in); not recorded for autograd.
Tensor linear_grad_weight(const Tensor& grad, const Tensor& x);

}  // namespace transformer_fast
