#include "launch_rows.h"

#include "../python/python_function.h"
#include "launch_cache.h"

#include <pybind11/stl.h>

#include <initializer_list>

namespace transformer_fast {

namespace py = pybind11;

namespace {

py::object object_of(const Seed& seed) {
  return seed.number ? py::object(py::int_(*seed.number)) : PythonFunction::object(seed.tensor);
}

// The call of a launcher with these scalars and inputs.
template <typename... Scalars>
LaunchCall call_of(std::initializer_list<OptionalTensor> inputs, const Seed& seed, const Scalars&... scalars) {
  LaunchCall call;
  (call.scalar(scalars), ...);
  for (const OptionalTensor& input : inputs) call.input(input);
  seed.number ? call.input(*seed.number) : call.input(seed.tensor);
  return call;
}

}  // namespace

std::array<Tensor, 4> launch_norm(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps, const std::string& kind, double dropout_p,
                                  const Seed& seed) {
  static const PythonFunction launcher("transformer_fast.triton.norm", "norm_forward");
  const py::gil_scoped_acquire gil;
  auto call = call_of({x, residual, weight, bias}, seed, "norm forward", eps, kind.c_str(), dropout_p);
  return replayed_or<4>(std::move(call), [&](const py::object& call) {
    return launcher.tensors<4>(x, residual, weight, bias, eps, kind, dropout_p, object_of(seed), call);
  });
}

std::array<Tensor, 4> launch_norm_backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                                           const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                                           const std::string& kind, double dropout_p, const Seed& seed, bool has_bias,
                                           at::ScalarType type_of_x) {
  static const PythonFunction launcher("transformer_fast.triton.norm_backward", "norm_backward");
  const py::gil_scoped_acquire gil;
  auto call = call_of({grad_out, grad_summed, x, weight, mean, rstd}, seed, "norm backward", kind.c_str(), dropout_p,
                      has_bias, static_cast<int64_t>(type_of_x));
  return replayed_or<4>(std::move(call), [&](const py::object& call) {
    return launcher.tensors<4>(grad_out, grad_summed, x, weight, mean, rstd, kind, dropout_p, object_of(seed), has_bias,
                               type_of_x, call);
  });
}

Tensor launch_dropout(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual, bool relu, double p,
                      const Seed& seed) {
  static const PythonFunction launcher("transformer_fast.triton.dropout", "dropout_forward");
  const py::gil_scoped_acquire gil;
  auto call = call_of({x, bias, residual}, seed, "dropout forward", relu, p);
  return replayed_or<1>(std::move(call), [&](const py::object& call) {
    return std::array{launcher.tensor(x, bias, residual, relu, p, object_of(seed), call)};
  })[0];
}

std::array<Tensor, 2> launch_dropout_backward(const Tensor& grad_out, const OptionalTensor& y, bool relu, double p,
                                              const Seed& seed, bool has_bias) {
  static const PythonFunction launcher("transformer_fast.triton.dropout", "dropout_backward");
  const py::gil_scoped_acquire gil;
  const OptionalTensor signs = relu ? y : std::nullopt;
  auto call = call_of({grad_out, signs}, seed, "dropout backward", p, has_bias);
  return replayed_or<2>(std::move(call), [&](const py::object& call) {
    return launcher.tensors<2>(grad_out, signs, relu, p, object_of(seed), has_bias, call);
  });
}

std::array<Tensor, 5> launch_cross_entropy(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                           const Tensor& target, double smoothing, int64_t ignore_index, bool mean,
                                           const std::array<bool, 3>& gradients, int64_t chunk_elements) {
  static const PythonFunction launcher("transformer_fast.triton.cross_entropy", "linear_cross_entropy");
  return launcher.tensors<5>(x, weight, bias, target, smoothing, ignore_index, mean, gradients, chunk_elements);
}

}  // namespace transformer_fast
