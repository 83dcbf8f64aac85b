// The short way of transformer_fast.ops.dropout.
#include "functions.h"

#include "call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/ops/empty_cpu_dispatch.h>

#include <limits>
#include <mutex>

namespace transformer_fast::direct {
namespace {

using Forward = Tensor(const Tensor&, const OptionalTensor&, bool, double, const OptionalTensor&);

const Native<Forward>& kernel() {
  static const Native<Forward> native("dropout");
  return native;
}

struct Dropout : torch::autograd::Function<Dropout> {
  static constexpr const char* kName = "dropout";

  struct Options {
    double p;
    bool relu;
    bool grad_residual;
  };

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual, const Tensor& seed,
                        bool relu, double p) {
    Tensor out = kernel()(x, residual, relu, p, seed);
    // With ReLU the output alone tells which elements pass a gradient: those that are positive.
    ctx->save_for_backward({relu ? out : Tensor(), seed});
    keep(ctx, Options{p, relu, requires_grad(residual)});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list gradients(5);
    if (ctx->needs_input_grad(0)) gradients[0] = run_backward<Dropout>(ctx, grads)[0];
    if (kept<Options>(ctx).grad_residual) gradients[1] = grads[0];
    return gradients;
  }

  static variable_list backward_kernel(const variable_list& grads, const variable_list& saved, const Options& options) {
    static const Native<Tensor(const Tensor&, const OptionalTensor&, bool, double, const OptionalTensor&)> native(
        "dropout_backward");
    return {native(grads[0], or_none(saved[0]), options.relu, options.p, saved[1])};
  }
};

}  // namespace

py::object dropout(py::handle x_, py::handle p_, py::handle residual_, py::handle relu_, py::handle seed_) {
  Arguments arguments;
  const Tensor x = arguments.floating(x_);
  const OptionalTensor residual = arguments.optional_floating(residual_), seed = arguments.optional_tensor(seed_);
  const double p = arguments.probability(p_);
  const bool relu = arguments.boolean(relu_);
  if (!arguments.ok() || x.dim() == 0 || (p > 0 && !seed)) return py::none();
  if (residual && (residual->sizes() != x.sizes() || residual->scalar_type() != x.scalar_type())) return py::none();
  if (p == 0 && !relu && !residual) return py::reinterpret_borrow<py::object>(x_);

  Tensor out;
  {
    const py::gil_scoped_release no_gil;
    if (p == 0) {  // without a mask to draw, plain PyTorch is one or two passes already
      out = relu ? x.relu() : x;
      if (residual) out = residual->add(out);
    } else {
      // The backward reads the sign of the ReLU off the op's own output, which a residual would hide.
      const OptionalTensor inside = relu ? std::nullopt : residual;
      out = needs_gradient(x, inside) ? Dropout::apply(x, inside, *seed, relu, p) : kernel()(x, inside, relu, p, seed);
      if (relu && residual) out = residual->add(out);
    }
  }
  return wrap(out);
}

int64_t draw_number() {
  constexpr int64_t low = std::numeric_limits<int64_t>::min();
  at::uniform_int_from_to_distribution<int64_t> distribution(std::numeric_limits<uint64_t>::max(), low);
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return distribution(generator);
}

py::object draw_seed() {
  Tensor seed = at::cpu::empty({1}, at::kLong);
  *seed.mutable_data_ptr<int64_t>() = draw_number();
  return wrap(seed);
}

}  // namespace transformer_fast::direct
