// y = [residual +] dropout([relu] (x [+ bias])): the op of torch.ops.transformer_fast, from schema to kernel.
// transformer_fast/ops/dropout.py documents the arguments.
#include "../cpu/kernels.h"
#include "op.h"
#include "python_hooks.h"
#include "tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string>
#include <tuple>

namespace transformer_fast {
namespace dropout_op {
namespace {

using eager::needs_gradient, eager::Needs, eager::or_none, eager::or_undefined;
using torch::autograd::variable_list;

constexpr Checks kChecks{"dropout"}, kBackwardChecks{"dropout_backward"};

void check_forward(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual, bool, double p,
                   const OptionalTensor& seed) {
  kChecks("x", x).floating().rank_at_least(1, "(..., d)");
  kChecks("bias", bias).floating().on_device_of(x).sizes({x.sym_size(-1)});
  kChecks("residual", residual).floating().on_device_of(x).sizes(x.sym_sizes());
  kChecks.dropout(x, p, seed, "p", /*on_host=*/true);
}

void check_backward(const Tensor& grad_out, const OptionalTensor& y, bool relu, double p, const OptionalTensor& seed,
                    bool) {
  kBackwardChecks("grad_out", grad_out).floating().rank_at_least(1, "(..., d)");
  kBackwardChecks("y", y).like(grad_out);
  if (relu) kBackwardChecks("y", y).required("with relu");
  kBackwardChecks.dropout(grad_out, p, seed, "p", /*on_host=*/true);
}

// x in the type of the residual, which that of the result is.
Tensor as_residual(const Tensor& x, const OptionalTensor& residual) {
  return residual ? in_type(x, residual->scalar_type()) : x;
}

Tensor forward(const Tensor& values, const OptionalTensor& bias, const OptionalTensor& residual, bool relu, double p,
               const OptionalTensor& seed) {
  // The backward takes the sign of ReLU's input from the op's output; a residual would hide the sign.
  if (relu && residual) return residual->add(forward(as_residual(values, residual), bias, std::nullopt, true, p, seed));
  const Tensor x = as_residual(values, residual);
  if (runs_on_triton(x)) return python_hooks().launch_dropout(x, bias, residual, relu, p, seed);
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

std::tuple<Tensor, Tensor> backward(const Tensor& grad_out, const OptionalTensor& y, bool relu, double p,
                                    const OptionalTensor& seed, bool has_bias) {
  if (runs_on_triton(grad_out)) {
    const auto [grad_x, grad_bias] = python_hooks().launch_dropout_backward(grad_out, y, relu, p, seed, has_bias);
    return {grad_x, grad_bias.defined() ? grad_bias : at::empty({0}, grad_x.options().dtype(at::kFloat))};
  }
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

Tensor forward_meta(const Tensor& x, const OptionalTensor&, const OptionalTensor& residual, bool, double,
                    const OptionalTensor&) {
  return meta_tensor(residual ? *residual : x, x.sym_sizes());
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor& grad_out, const OptionalTensor&, bool, double,
                                         const OptionalTensor&, bool has_bias) {
  return {meta_tensor(grad_out, grad_out.sym_sizes()),
          meta_tensor(grad_out, {has_bias ? grad_out.sym_size(-1) : c10::SymInt(0)}, arithmetic_type(grad_out))};
}

struct Dropout {
  static constexpr const char* kName = "dropout";
  enum : size_t { kY, kSeed, kSaved };  // what is saved

  struct Options {
    bool relu;
    double p;
    bool by_triton;
  };

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    if (!needs[0] && !needs[1]) return {Tensor(), Tensor(), grads[0]};
    const bool by_triton = options.by_triton;
    const bool direct = eager::is_plain_eager(grads, by_triton) && eager::is_plain_eager(saved, by_triton);
    const KernelsOfForward same(by_triton);
    const OptionalTensor y = or_none(saved[kY]);
    const OptionalTensor seed = or_none(saved[kSeed]);
    Tensor grad_x, grad_bias;
    if (direct && by_triton) {
      const at::AutoDispatchBelowADInplaceOrView below;
      std::tie(grad_x, grad_bias) =
          std::tuple_cat(python_hooks().launch_dropout_backward(grads[0], y, options.relu, options.p, seed, needs[1]));
    } else {
      std::tie(grad_x, grad_bias) = below_autograd<"dropout_backward", dropout_op::backward>(
          direct, grads[0], y, options.relu, options.p, direct ? seed : seed_beside(grads[0], seed), needs[1]);
    }
    return {grad_x, needs[1] ? grad_bias : Tensor(), grads[0]};  // autograd casts them as the inputs
  }
};

// `direct`: true if the kernel may be called without the dispatcher.
Tensor recorded(bool direct, const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual, bool relu,
                double p, const OptionalTensor& seed) {
  if (direct && p == 0 && !bias) {  // without a mask to make, plain PyTorch is one or two passes already
    const Tensor values = as_residual(x, residual), out = relu ? values.relu() : values;
    return residual ? residual->add(out) : out;
  }
  if (relu && residual) {
    if (!direct) check_forward(x, bias, residual, relu, p, seed);  // the op will not see the residual
    return residual->add(recorded(direct, as_residual(x, residual), bias, std::nullopt, true, p, seed));
  }
  const Tensor out = below_autograd<"dropout", forward>(direct, x, bias, residual, relu, p, seed);
  // With ReLU, the elements with a positive output pass a gradient, so only the output is saved.
  if (needs_gradient(x, bias, residual))
    eager::record<Dropout>({out}, {relu ? out : Tensor(), or_undefined(seed)}, {relu, p, runs_on_triton(x)}, x, bias,
                           residual);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  define_op<"dropout", check_forward, forward, forward_meta, recorded>(
      m, "(Tensor x, Tensor? bias, Tensor? residual, bool relu, float p, Tensor? seed) -> Tensor");
  // The gradient of the bias is in the type of the arithmetic; (0,) without a bias.
  define_backward<"dropout_backward", check_backward, backward, backward_meta>(
      m,
      "(Tensor grad_out, Tensor? y, bool relu, float p, Tensor? seed, bool has_bias) "
      "-> (Tensor grad_x, Tensor grad_bias)");
}

}  // namespace dropout_op
}  // namespace transformer_fast
