// The short way of transformer_fast.ops.dropout.
#include "functions.h"

#include "call.h"
#include "node.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/ops/empty_cpu_dispatch.h>

#include <limits>
#include <mutex>

namespace transformer_fast::direct {
namespace {

using Forward = Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, bool, double,
                       const OptionalTensor&);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, bool, double, const OptionalTensor&,
                                            bool);

const Native<Forward>& kernel() {
  static const Native<Forward> native("dropout");
  return native;
}

struct Dropout {
  static constexpr const char* kName = "dropout";
  static constexpr size_t kSaved = 2;

  struct Options {
    double p;
    bool relu;
    std::optional<at::ScalarType> bias;
  };

  static Tensor forward(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual,
                        const OptionalTensor& seed, bool relu, double p) {
    const Tensor out = kernel()(x, bias, residual, relu, p, seed);
    // With ReLU the output alone tells which elements pass a gradient: those that are positive.
    record<Dropout>({out}, {relu ? out : Tensor(), or_undefined(seed)},
                    {p, relu, bias ? std::optional(bias->scalar_type()) : std::nullopt}, x, bias, residual);
    return out;
  }

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    static const Native<Backward> native("dropout_backward");
    Tensor grad_x, grad_bias;
    if (needs[0] || needs[1])
      std::tie(grad_x, grad_bias) =
          native(grads[0], or_none(saved[0]), options.relu, options.p, or_none(saved[1]), needs[1]);
    return {grad_x, needs[1] ? grad_bias.to(*options.bias) : Tensor(), grads[0]};
  }
};

}  // namespace

py::object dropout(py::handle x_, py::handle p_, py::handle bias_, py::handle residual_, py::handle relu_,
                   py::handle seed_) {
  Arguments arguments;
  const Tensor x = arguments.floating(x_);
  const OptionalTensor bias = arguments.optional_floating(bias_), residual = arguments.optional_floating(residual_);
  const OptionalTensor seed = arguments.optional_tensor(seed_);
  const double p = arguments.probability(p_);
  const bool relu = arguments.boolean(relu_);
  if (!arguments.ok() || x.dim() == 0 || (p > 0 && !seed)) return py::none();
  if (residual && (residual->sizes() != x.sizes() || residual->scalar_type() != x.scalar_type())) return py::none();
  if (bias && (bias->dim() != 1 || bias->size(0) != x.size(-1))) return py::none();
  if (p == 0 && !bias && !relu && !residual) return py::reinterpret_borrow<py::object>(x_);

  Tensor out;
  {
    const py::gil_scoped_release no_gil;
    if (p == 0 && !bias) {  // without a mask to draw, plain PyTorch is one or two passes already
      out = relu ? x.relu() : x;
      if (residual) out = residual->add(out);
    } else {
      // The backward reads the sign of the ReLU off the op's own output, which a residual would hide.
      const OptionalTensor inside = relu ? std::nullopt : residual;
      out = needs_gradient(x, bias, inside) ? Dropout::forward(x, bias, inside, seed, relu, p)
                                            : kernel()(x, bias, inside, relu, p, seed);
      if (relu && residual) out = residual->add(out);
    }
  }
  return wrap(out);
}

int64_t draw_number() {
  constexpr int64_t low = std::numeric_limits<int64_t>::min();
  at::uniform_int_from_to_distribution<int64_t> distribution(std::numeric_limits<uint64_t>::max(), low);
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return distribution(generator);
}

py::object draw_seed() {
  Tensor seed = at::cpu::empty({1}, at::kLong);
  *seed.mutable_data_ptr<int64_t>() = draw_number();
  return wrap(seed);
}

}  // namespace transformer_fast::direct
