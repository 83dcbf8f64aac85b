// Shared parts of eager calls: what makes a call plain, and how C++ functions of the Python module that are no ops read
// their arguments. The doors of ops are made by op.h.
#pragma once

#include "../python_module.h"

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <tuple>

namespace transformer_fast::eager {

namespace py = pybind11;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The class of the modes of transformer_fast.functional(). Such a mode passes the ops on, so it observes nothing.
inline PyTypeObject* functional_mode = nullptr;

// True if a torch function mode of another class is active in this thread.
inline bool has_other_function_mode() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return false;
  for (int64_t place = 0; place < Modes::stack_len(); ++place)
    if (Py_TYPE(Modes::get_stack_at(place)->ptr(getPyInterpreter())) != functional_mode) return true;
  return false;
}

// True if a mode, a transform or a tracer of this thread observes dispatched calls, or if autograd is excluded.
inline bool has_active_modes() {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet usual = c10::default_included_set | c10::autocast_dispatch_keyset;
  const c10::DispatchKeySet without_autograd = local.excluded_ & c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return !usual.has_all(local.included_) || (!c10::InferenceMode::is_enabled() && !without_autograd.empty()) ||
         has_other_function_mode();
}

// True for a plain CPU tensor (or with `any_device` a GPU tensor): no subclass, no wrapper, no lazy negation, not
// sparse.
inline bool is_plain(const Tensor& tensor, bool any_device = false) {
  static const c10::DispatchKeySet on_cpu = [] {
    const c10::InferenceMode outside(false);  // tensors made in inference mode have fewer keys
    return at::detail::empty_cpu({0}, at::kFloat).key_set();
  }();
  constexpr auto cuda = c10::BackendComponent::CUDABit;
  static const c10::DispatchKeySet on_cuda = c10::DispatchKeySet(c10::DispatchKey::CUDA) |
                                             c10::getAutogradRelatedKeySetFromBackend(cuda) |
                                             c10::getAutocastRelatedKeySetFromBackend(cuda);
  return on_cpu.has_all(tensor.key_set()) || (any_device && on_cuda.has_all(tensor.key_set()));
}

// True if all defined tensors are plain and nothing observes calls on them.
template <typename Tensors>
bool is_plain_eager(const Tensors& tensors, bool any_device = false) {
  const auto plain = [&](const Tensor& tensor) { return !tensor.defined() || is_plain(tensor, any_device); };
  return !has_active_modes() && std::all_of(tensors.begin(), tensors.end(), plain);
}

// True if the tensor has a forward-mode tangent.
inline bool has_tangent(const Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

// Reads the arguments of a call one by one. After the last argument, ok() returns true if all arguments were valid.
class Arguments {
 public:
  Arguments() : ok_(!has_active_modes()) {}

  bool ok() const { return ok_; }
  void require(bool condition) { ok_ = ok_ && condition; }

  Tensor tensor(py::handle argument) {
    if (!ok_ || !THPVariable_CheckExact(argument.ptr())) return refused();
    const Tensor& tensor = THPVariable_Unpack(argument.ptr());
    return is_plain(tensor) && !has_tangent(tensor) ? tensor : refused();
  }

  // float64, float32, float16 or bfloat16.
  Tensor floating(py::handle argument) {
    Tensor result = tensor(argument);
    if (ok_) require(at::isFloatingType(result.scalar_type()) && at::elementSize(result.scalar_type()) >= 2);
    return result;
  }

  OptionalTensor optional_tensor(py::handle argument) {
    return argument.is_none() ? std::nullopt : OptionalTensor(tensor(argument));
  }

  OptionalTensor optional_floating(py::handle argument) {
    return argument.is_none() ? std::nullopt : OptionalTensor(floating(argument));
  }

  int64_t integer(py::handle argument) {
    if (!PyLong_CheckExact(argument.ptr())) return refused<int64_t>();
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(argument.ptr(), &overflow);
    require(overflow == 0);
    return value;
  }

  std::optional<int64_t> optional_integer(py::handle argument) {
    return argument.is_none() ? std::nullopt : std::optional<int64_t>(integer(argument));
  }

  bool boolean(py::handle argument) {
    require(PyBool_Check(argument.ptr()));
    return argument.ptr() == Py_True;
  }

 private:
  template <typename T = Tensor>
  T refused() {
    ok_ = false;
    return T();
  }

  bool ok_;
};

inline bool requires_grad(const Tensor& tensor) { return tensor.requires_grad(); }
inline bool requires_grad(const OptionalTensor& tensor) { return tensor && tensor->requires_grad(); }

template <typename... Tensors>
bool needs_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// Conversion between optional arguments and saved tensors, which may be undefined.
inline Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : Tensor(); }
inline OptionalTensor or_none(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

inline py::object wrap(const Tensor& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

// Returns the tensor of compute(). The GIL is released meanwhile, and C++ errors become Python errors.
template <typename Compute>
py::object computed(const Compute& compute) {
  HANDLE_TH_ERRORS
  Tensor result;
  {
    const py::gil_scoped_release no_gil;
    result = compute();
  }
  return wrap(result);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace transformer_fast::eager
