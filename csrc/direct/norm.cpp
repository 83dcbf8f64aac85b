// The short way of transformer_fast.ops.layer_norm.
#include "functions.h"

#include "../ops/norm.h"
#include "call.h"
#include "node.h"

#include <ATen/ops/empty_cpu_dispatch.h>

#include <utility>

namespace transformer_fast::direct {
namespace {

// The two rows of (2, rows) statistics.
std::pair<void*, void*> mean_and_rstd(const Tensor& statistics) {
  auto* first = static_cast<char*>(statistics.mutable_data_ptr());
  return {first, first + statistics.nbytes() / 2};
}

struct LayerNorm {
  static constexpr const char* kName = "layer_norm";
  static constexpr size_t kSaved = 4;

  struct Options {
    bool std;
    double dropout_p;
    std::optional<at::ScalarType> bias;
  };

  static variable_list forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& seed, double eps, bool std,
                               double dropout_p) {
    variable_list outputs;
    Tensor statistics;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      statistics = at::cpu::empty({2, x.numel() / x.size(-1)}, x.options().dtype(arithmetic_type(x)));
      const auto [mean, rstd] = mean_and_rstd(statistics);
      auto [out, summed] = norm_forward(x, residual, weight, bias, eps, std, dropout_p, seed, mean, rstd);
      outputs = residual ? variable_list{out, summed} : variable_list{out};
    }
    record<LayerNorm>(outputs, {residual ? outputs[1] : x, or_undefined(weight), statistics, or_undefined(seed)},
                      {std, dropout_p, bias ? std::optional(bias->scalar_type()) : std::nullopt}, x, residual, weight,
                      bias);
    return outputs;
  }

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor &x = saved[0], &weight = saved[1];
    const OptionalTensor grad_summed = grads.size() > 1 ? or_none(grads[1]) : std::nullopt;
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(x);  // only the sum was used
    const auto [mean, rstd] = mean_and_rstd(saved[2]);
    auto gradients = norm_backward(grad_out, grad_summed, x, or_none(weight), mean, rstd, options.std,
                                   options.dropout_p, or_none(saved[3]), {needs[0] || needs[1], needs[2], needs[3]});
    if (options.dropout_p == 0) gradients.residual = gradients.x;
    if (gradients.bias.defined()) gradients.bias = in_type(gradients.bias, *options.bias);
    return {gradients.x, gradients.residual, gradients.weight, gradients.bias};
  }
};

}  // namespace

py::object layer_norm(py::handle x_, py::handle weight_, py::handle bias_, py::handle eps_, py::handle kind,
                      py::handle residual_, py::handle dropout_p_, py::handle seed_) {
  Arguments arguments;
  const Tensor x = arguments.floating(x_);
  const OptionalTensor weight = arguments.optional_floating(weight_), bias = arguments.optional_floating(bias_);
  const OptionalTensor residual = arguments.optional_floating(residual_), seed = arguments.optional_tensor(seed_);
  const double eps = arguments.number(eps_), dropout_p = arguments.probability(dropout_p_);
  const bool std = is_text(kind, "std");
  if (!arguments.ok() || x.dim() == 0) return py::none();
  const int64_t d = x.size(-1);
  arguments.require(std ? d > 1 : d > 0 && is_text(kind, "layer"));
  for (const OptionalTensor* t : {&weight, &bias})
    if (*t) arguments.require((*t)->dim() == 1 && (*t)->size(0) == d);
  if (residual) arguments.require(residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type());
  arguments.require(dropout_p == 0 || (residual && seed));
  if (!arguments.ok()) return py::none();

  variable_list results;
  {
    const py::gil_scoped_release no_gil;
    if (needs_gradient(x, residual, weight, bias)) {
      results = LayerNorm::forward(x, residual, weight, bias, seed, eps, std, dropout_p);
    } else {
      const at::AutoDispatchBelowADInplaceOrView below;
      const NormResult result = norm_forward(x, residual, weight, bias, eps, std, dropout_p, seed, nullptr, nullptr);
      results = {result.out, result.summed};
    }
  }
  return residual ? py::make_tuple(wrap(results[0]), wrap(results[1])) : wrap(results[0]);
}

}  // namespace transformer_fast::direct
