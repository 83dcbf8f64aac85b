// y = [residual +] dropout([relu] (x [+ bias])) and its backward on the CPU, from tensors to what the kernels take.
#include "../cpu/kernels.h"
#include "tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

namespace transformer_fast {
namespace {

Tensor dropout(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual, bool relu, double p,
               const OptionalTensor& seed) {
  const Tensor input = x.contiguous(), added = residual ? residual->contiguous() : Tensor();
  const Tensor out = at::cpu::empty(x.sizes(), x.options());
  if (x.numel() == 0) return out;
  const int64_t d = x.size(-1), rows = x.numel() / d;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "dropout", [&] {
    using T = scalar_t;
    const ParameterTensor<T> biases(bias);
    kernels().of<T>().dropout_forward({input.const_data_ptr<T>(), residual ? added.const_data_ptr<T>() : nullptr,
                                       biases.parameter(), out.mutable_data_ptr<T>(), rows, d, relu,
                                       dropout_params(p, seed)});
  });
  return out;
}

// (gradient of x, gradient of the bias in the type of the arithmetic, or (0,) where there is none)
std::tuple<Tensor, Tensor> dropout_backward(const Tensor& grad_out, const OptionalTensor& y, bool relu, double p,
                                            const OptionalTensor& seed, bool has_bias) {
  const Tensor gradient = grad_out.contiguous(), output = relu ? y->contiguous() : Tensor();
  const Tensor out = at::cpu::empty(grad_out.sizes(), grad_out.options());
  const int64_t d = grad_out.size(-1), rows = d > 0 ? grad_out.numel() / d : 0;
  const auto sum_options = grad_out.options().dtype(arithmetic_type(grad_out));
  if (grad_out.numel() == 0) return {out, at::zeros({has_bias ? d : 0}, sum_options)};
  const Tensor grad_bias = at::cpu::empty({has_bias ? d : 0}, sum_options);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad_out.scalar_type(), "dropout_backward", [&] {
    using T = scalar_t;
    kernels().of<T>().dropout_backward(
        {gradient.const_data_ptr<T>(), relu ? output.const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(),
         has_bias ? grad_bias.mutable_data_ptr<Accumulate<T>>() : nullptr, rows, d, dropout_params(p, seed)});
  });
  return {out, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def("dropout(Tensor x, Tensor? bias, Tensor? residual, bool relu, float p, Tensor? seed) -> Tensor");
  m.def(
      "dropout_backward(Tensor grad_out, Tensor? y, bool relu, float p, Tensor? seed, bool has_bias) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("dropout", dropout);
  m.impl("dropout_backward", dropout_backward);
}

}  // namespace transformer_fast
