// LayerNorm and Norm on the CPU, from tensors to what the kernels take, and the ops.
#include "norm.h"

#include "../cpu/kernels.h"
#include "tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

namespace transformer_fast {
namespace {

// (rows, d) with unit stride along the columns; a view wherever the strides allow one.
Tensor as_rows(const Tensor& x) {
  const int64_t d = x.size(-1);
  const Tensor dense = d == 1 || x.stride(-1) == 1 ? x : x.contiguous();
  return dense.dim() == 2 ? dense : dense.reshape({x.numel() / d, d});
}

OptionalTensor as_rows(const OptionalTensor& x) { return x ? OptionalTensor(as_rows(*x)) : OptionalTensor(); }

template <typename T>
RowMatrix<const T> rows_of(const Tensor& x) {
  return {x.const_data_ptr<T>(), x.stride(0)};
}

template <typename T>
RowMatrix<const T> rows_of(const OptionalTensor& x) {
  return x ? rows_of<T>(*x) : RowMatrix<const T>{};
}

// Of a result, which is contiguous, or nothing.
template <typename T>
RowMatrix<T> result_rows(const Tensor& result, int64_t d) {
  return {result.defined() ? result.mutable_data_ptr<T>() : nullptr, d};
}

}  // namespace

NormResult norm_forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool std, double dropout_p, const OptionalTensor& seed,
                        void* mean, void* rstd) {
  const Tensor x_rows = as_rows(x);
  const OptionalTensor residual_rows = as_rows(residual);
  const int64_t rows = x_rows.size(0), d = x_rows.size(1);
  NormResult result{at::cpu::empty(x.sizes(), x.options()), {}};
  if (residual) result.summed = at::cpu::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "layer_norm", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    const ParameterTensor<T> weights(weight), biases(bias);
    kernels().of<T>().norm_forward({rows_of<T>(x_rows), rows_of<T>(residual_rows), result_rows<T>(result.summed, d),
                                    result_rows<T>(result.out, d), weights.parameter(), biases.parameter(),
                                    static_cast<A*>(mean), static_cast<A*>(rstd), rows, d, static_cast<A>(eps), std,
                                    dropout_params(dropout_p, seed)});
  });
  return result;
}

NormGradients norm_backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                            const OptionalTensor& weight, const void* mean, const void* rstd, bool std,
                            double dropout_p, const OptionalTensor& seed, NormNeeds needs) {
  const Tensor dy_rows = as_rows(grad_out), x_rows = as_rows(x);
  const OptionalTensor grad_summed_rows = as_rows(grad_summed);
  const int64_t rows = x_rows.size(0), d = x_rows.size(1);
  const bool narrow_weights = weight && weight->scalar_type() == x.scalar_type();
  const auto weight_options = x.options().dtype(narrow_weights ? x.scalar_type() : arithmetic_type(x));
  NormGradients gradients;
  if (needs.rows) gradients.x = at::cpu::empty(x.sizes(), x.options());
  if (needs.rows && dropout_p > 0) gradients.residual = at::cpu::empty(x.sizes(), x.options());
  if (needs.weight) gradients.weight = at::cpu::empty({d}, weight_options);
  if (needs.bias) gradients.bias = at::cpu::empty({d}, weight_options);
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "layer_norm_backward", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    const ParameterTensor<T> weights(weight);
    kernels().of<T>().norm_backward({rows_of<T>(dy_rows), rows_of<T>(x_rows), rows_of<T>(grad_summed_rows),
                                     weights.parameter(), static_cast<const A*>(mean), static_cast<const A*>(rstd),
                                     result_rows<T>(gradients.x, d), result_rows<T>(gradients.residual, d),
                                     pointer(gradients.weight), pointer(gradients.bias), narrow_weights, rows, d, std,
                                     dropout_params(dropout_p, seed)});
  });
  if (needs.weight) gradients.weight = in_type(gradients.weight, weight->scalar_type());
  return gradients;
}

namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// An op returns tensors: where there is nothing, an empty one.
Tensor or_empty(const Tensor& tensor, const at::TensorOptions& options) {
  return tensor.defined() ? tensor : at::empty({0}, options);
}

FourTensors layer_norm(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps, bool std, double dropout_p, const OptionalTensor& seed) {
  const auto options = x.options().dtype(arithmetic_type(x));
  const int64_t rows = x.numel() / x.size(-1);
  const Tensor mean = at::empty({rows}, options), rstd = at::empty({rows}, options);
  const auto [out, summed] = norm_forward(x, residual, weight, bias, eps, std, dropout_p, seed, mean.mutable_data_ptr(),
                                          rstd.mutable_data_ptr());
  return {out, or_empty(summed, x.options()), mean, rstd};
}

FourTensors layer_norm_backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                                const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd, double /* eps */,
                                bool std, double dropout_p, const OptionalTensor& seed, bool /* has_residual */,
                                bool has_bias) {
  const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  const auto gradients = norm_backward(grad_out, grad_summed, x, weight, means.const_data_ptr(), rstds.const_data_ptr(),
                                       std, dropout_p, seed, {true, weight.has_value(), has_bias});
  const auto weight_options = x.options().dtype(weight ? weight->scalar_type() : x.scalar_type());
  return {gradients.x, or_empty(gradients.residual, x.options()), or_empty(gradients.weight, weight_options),
          or_empty(gradients.bias, weight_options).to(weight_options)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool std, float dropout_p, "
      "Tensor? seed) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor grad_out, Tensor? grad_summed, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
      "float eps, bool std, float dropout_p, Tensor? seed, bool has_residual, bool has_bias) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("layer_norm", layer_norm);
  m.impl("layer_norm_backward", layer_norm_backward);
}

}  // namespace transformer_fast
