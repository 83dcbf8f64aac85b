// Linear layers of one input under autocast, in training: x weight^T + bias of each. transformer_fast/ops/linear.py
// documents the arguments.
//
// Autocast casts the input, each weight and each bias by a kernel of its own, once more for each layer of an input, and
// their gradients back in the backward: more launches than products. Here the input is cast once, all weights and
// biases by one kernel into one matrix and one vector, and one product computes all layers. The gradients of the
// parameters are not rounded to 16 bits on their way.
#include "eager_call.h"
#include "linear.h"
#include "node.h"
#include "operator.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace transformer_fast {
namespace {

using eager::needs_gradient, eager::Needs;
using torch::autograd::variable_list;

// Consecutive parts of a tensor along a dimension.
std::vector<Tensor> parts_of(const Tensor& whole, const std::vector<int64_t>& sizes, int64_t dim) {
  if (sizes.size() == 1) return {whole};
  std::vector<Tensor> parts;
  int64_t start = 0;
  for (const int64_t size : sizes) parts.push_back(whole.narrow(dim, start, size)), start += size;
  return parts;
}

// Product with a float32 result. On a CPU the product itself rounds to the type of its factors.
Tensor exact_mm(const Tensor& a, const Tensor& b) {
  return a.is_cuda() ? at::mm(a, b, at::kFloat) : a.mm(b).to(at::kFloat);
}

struct Projections {
  static constexpr const char* kName = "projections";
  enum : size_t { kX, kWeight, kSaved };  // what is saved: x itself if it has autocast's type, else cast rows
  static constexpr size_t kValues = kSaved;
  static constexpr bool kSavesCopies = true;

  struct Options {
    std::vector<int64_t> sizes;  // of x
    at::ScalarType x;
    std::vector<int64_t> outs;  // rows of each weight
    bool has_bias;
  };

  // Gradients of the inputs: x, the weights, and the biases.
  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    const at::AutoDispatchBelowADInplaceOrView below;  // parts of a gradient count their writes separately
    const Tensor &weight = saved[kWeight], x = matrix_of(saved[kX]);
    const size_t layers = options.outs.size();
    std::vector<Tensor> of_layers;
    for (size_t i = 0; i < layers; ++i)
      of_layers.push_back(grads[i].defined() ? grads[i].reshape({-1, options.outs[i]})
                                             : at::zeros({x.size(0), options.outs[i]}, x.options()));
    const Tensor grad = layers == 1 ? of_layers[0] : at::cat(of_layers, 1);
    variable_list gradients(1 + layers * (options.has_bias ? 2 : 1));
    if (needs[0]) gradients[0] = in_type(grad.mm(weight), options.x).view(options.sizes);
    // A layer whose output was not used has no gradient.
    const auto set_parts = [&](size_t first, const auto& compute) {
      const auto is_wanted = [&](size_t i) { return needs[first + i] && grads[i].defined(); };
      bool any = false;
      for (size_t i = 0; i < layers; ++i) any = any || is_wanted(i);
      if (!any) return;
      const std::vector<Tensor> parts = parts_of(compute(), options.outs, 0);
      for (size_t i = 0; i < layers; ++i)
        if (is_wanted(i)) gradients[first + i] = parts[i];
    };
    set_parts(1, [&] { return exact_mm(grad.t(), x); });
    if (options.has_bias) set_parts(1 + layers, [&] { return at::sum(grad, {0}, /*keepdim=*/false, at::kFloat); });
    return gradients;
  }
};

// All weights and biases in one matrix and one vector of the type; the vector is undefined without biases.
std::pair<Tensor, Tensor> cast_parameters(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                                          const std::vector<int64_t>& outs, at::ScalarType dtype) {
  const int64_t rows = std::accumulate(outs.begin(), outs.end(), int64_t{0});
  const auto options = weights[0].options().dtype(dtype);
  const Tensor weight = at::empty({rows, weights[0].size(1)}, options);
  const Tensor bias = biases.empty() ? Tensor() : at::empty({rows}, options);
  std::vector<Tensor> to = parts_of(weight, outs, 0), from = weights;
  if (!biases.empty()) {
    for (Tensor& part : parts_of(bias, outs, 0)) to.push_back(std::move(part));
    from.insert(from.end(), biases.begin(), biases.end());
  }
  at::_foreach_copy_(to, from);
  return {weight, bias};
}

std::vector<Tensor> project(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                            at::ScalarType dtype) {
  std::vector<int64_t> outs;
  for (const Tensor& weight : weights) outs.push_back(weight.size(0));
  variable_list outputs;
  Tensor rows, weight;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor bias;
    std::tie(weight, bias) = cast_parameters(weights, biases, outs, dtype);
    rows = in_type(matrix_of(x), dtype);
    const Tensor out = at::linear(rows, weight, bias.defined() ? std::optional(bias) : std::nullopt);
    std::vector<int64_t> sizes = x.sizes().vec();
    for (const Tensor& part : parts_of(out, outs, 1)) {
      sizes.back() = part.size(1);
      outputs.push_back(part.view(sizes));
    }
  }
  variable_list inputs{x};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  inputs.insert(inputs.end(), biases.begin(), biases.end());
  eager::record<Projections>(outputs, {x.scalar_type() == dtype ? x : rows, weight},
                             {x.sizes().vec(), x.scalar_type(), outs, !biases.empty()}, inputs);
  return outputs;
}

}  // namespace

// Linear layers of one input in training under autocast, on any device: weights, and no biases or as many -> a tuple.
namespace eager {
namespace {

py::object projections(py::handle x_, const py::tuple& weights_, const py::tuple& biases_) {
  Arguments arguments(/*any_device=*/true);
  const Tensor x = arguments.floating(x_);
  std::vector<Tensor> weights, biases;
  for (const py::handle weight : weights_) weights.push_back(arguments.floating(weight));
  for (const py::handle bias : biases_) biases.push_back(arguments.floating(bias));
  if (!arguments.ok() || weights.empty() || x.dim() < 2 || x.numel() == 0) return py::none();
  if (!biases.empty() && biases.size() != weights.size()) return py::none();
  const c10::DeviceType device = x.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return py::none();
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const auto like_first = [&](const Tensor& t) {
    return t.device() == x.device() && t.scalar_type() == weights[0].scalar_type() && t.is_contiguous();
  };
  arguments.require(weights[0].scalar_type() == at::kFloat && (dtype == at::kHalf || dtype == at::kBFloat16));
  arguments.require(x.scalar_type() == at::kFloat || x.scalar_type() == dtype);
  bool trained = at::GradMode::is_enabled();
  for (size_t i = 0; i < weights.size() && arguments.ok(); ++i) {
    const Tensor& weight = weights[i];
    arguments.require(like_first(weight) && weight.dim() == 2 && weight.size(1) == x.size(-1) && weight.numel() > 0);
    trained = trained && weight.requires_grad();
    if (arguments.ok() && !biases.empty())
      arguments.require(like_first(biases[i]) && biases[i].sizes() == weight.sizes().slice(0, 1));
  }
  if (!arguments.ok() || !trained) return py::none();

  std::vector<Tensor> outputs;
  {
    const py::gil_scoped_release no_gil;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    outputs = project(x, weights, biases, dtype);
  }
  py::tuple results(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) results[i] = wrap(outputs[i]);
  return results;
}

PYTHON_MODULE_FRAGMENT(m) { m.def("projections", &projections); }

}  // namespace
}  // namespace eager
}  // namespace transformer_fast
