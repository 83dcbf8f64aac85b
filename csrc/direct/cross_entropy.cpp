// The short way of transformer_fast.ops.linear_cross_entropy.
#include "functions.h"

#include "../ops/cross_entropy.h"
#include "../ops/tensors.h"
#include "call.h"
#include "node.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>

namespace transformer_fast::direct {
namespace {

struct LinearCrossEntropy {
  static constexpr const char* kName = "linear_cross_entropy";
  static constexpr size_t kSaved = 7;  // the inputs, their gradients, and the scale of those

  struct Options {};

  static Tensor forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                        double smoothing, int64_t ignore_index, bool mean, int64_t chunk_elements) {
    const bool records = needs_gradient(x, weight, bias);
    const std::array<bool, 3> needs = {records && requires_grad(x), records && requires_grad(weight),
                                       records && requires_grad(bias)};
    CrossEntropyResult result;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      const Tensor rows = x.dim() == 2 ? x : x.reshape({target.numel(), x.size(-1)});
      const Tensor targets = target.dim() == 1 ? target : target.reshape(-1);
      result = transformer_fast::linear_cross_entropy(rows, weight, bias, targets, smoothing, ignore_index, mean, needs,
                                                      chunk_elements);
      if (needs[0]) result.gradients[0] = result.gradients[0].view(x.sizes());
    }
    const auto& [grad_x, grad_weight, grad_bias] = result.gradients;
    if (records)
      record<LinearCrossEntropy>({result.loss},
                                 {x, weight, or_undefined(bias), grad_x, grad_weight, grad_bias, result.scale}, {}, x,
                                 weight, bias);
    return result.loss;
  }

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options&,
                                const Needs& needs) {
    const Tensor scale = grads[0] * saved[6];
    // What was kept for a graph that ends here is scaled where it lies, and handed over.
    const bool ends = !torch::autograd::get_current_graph_task_keep_graph() && is_plain(grads[0]) && !watched();
    const bool scaled = ends && scale.item<double>() == 1;
    variable_list gradients(3);
    for (size_t i = 0; i < 3; ++i) {
      const Tensor& gradient = saved[3 + i];
      if (!needs[i] || !gradient.defined()) continue;
      const Tensor result = scaled ? gradient : ends ? gradient.mul_(scale) : gradient * scale;
      gradients[i] = in_type(result, saved[i].scalar_type());
    }
    return gradients;
  }
};

}  // namespace

py::object linear_cross_entropy(py::handle x_, py::handle weight_, py::handle bias_, py::handle target_,
                                py::handle smoothing_, py::handle ignore_index_, py::handle reduction,
                                py::handle chunk_elements_) {
  Arguments arguments;
  const Tensor x = arguments.floating(x_), weight = arguments.floating(weight_), target = arguments.tensor(target_);
  const OptionalTensor bias = arguments.optional_floating(bias_);
  const double smoothing = arguments.probability(smoothing_);
  const int64_t ignore_index = arguments.integer(ignore_index_), chunk_elements = arguments.integer(chunk_elements_);
  const bool mean = is_text(reduction, "mean");
  arguments.require(mean || is_text(reduction, "sum"));
  if (!arguments.ok() || at::autocast::is_autocast_enabled(at::kCPU) || x.dim() < 2 || weight.dim() != 2)
    return py::none();
  arguments.require(x.size(-1) == weight.size(1) && x.scalar_type() == weight.scalar_type());
  arguments.require(target.scalar_type() == at::kLong && target.sizes() == x.sizes().slice(0, x.dim() - 1));
  if (bias) arguments.require(bias->sizes() == weight.sizes().slice(0, 1) && bias->scalar_type() == x.scalar_type());
  if (!arguments.ok()) return py::none();

  HANDLE_TH_ERRORS
  Tensor loss;
  {
    const py::gil_scoped_release no_gil;
    loss = LinearCrossEntropy::forward(x, weight, bias, target, smoothing, ignore_index, mean, chunk_elements);
  }
  return wrap(loss);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace transformer_fast::direct
