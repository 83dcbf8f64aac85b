// A Python function that C++ calls: a launcher of Triton kernels, or a gradient of the reference.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>

namespace transformer_fast {

inline pybind11::object wrap(const at::Tensor& tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
}

class __attribute__((visibility("hidden"))) PythonFunction {  // as its field is
 public:
  // The module is imported at the first call.
  PythonFunction(const char* module, const char* name) : module_(module), name_(name) {}

  // Calls the function and returns its tensor. Takes the GIL.
  template <typename... Args>
  at::Tensor tensor(const Args&... args) const {
    const pybind11::gil_scoped_acquire gil;
    return THPVariable_Unpack(call(pybind11::dict(), args...).ptr());
  }

  // Calls the function and returns the tensors of its tuple. Takes the GIL.
  template <size_t count, typename... Args>
  std::array<at::Tensor, count> tensors(const Args&... args) const {
    const pybind11::gil_scoped_acquire gil;
    return unpacked<count>(call(pybind11::dict(), args...));
  }

  // Calls the function and returns its result. The GIL must be held.
  template <typename... Args>
  pybind11::object call(const pybind11::dict& keywords, const Args&... args) const {
    if (imported_ == nullptr) imported_ = pybind11::module_::import(module_).release().ptr();
    const pybind11::object function = pybind11::handle(imported_).attr(name_);
    const pybind11::tuple positional = pybind11::make_tuple(object(args)...);
    PyObject* const result = PyObject_Call(function.ptr(), positional.ptr(), keywords.ptr());
    if (result != nullptr) return pybind11::reinterpret_steal<pybind11::object>(result);
    // Python exceptions become PyTorch's own class, which autograd threads pass on.
    python_error error;
    error.persist();
    throw error;
  }

  // The tensors of a tuple, undefined for None.
  template <size_t count>
  static std::array<at::Tensor, count> unpacked(const pybind11::object& tuple) {
    std::array<at::Tensor, count> tensors;
    for (size_t i = 0; i < count; ++i)
      if (PyObject* const item = PyTuple_GET_ITEM(tuple.ptr(), i); item != Py_None)
        tensors[i] = THPVariable_Unpack(item);
    return tensors;
  }

  template <typename T>
  static pybind11::object object(const T& value) {
    return pybind11::cast(value);
  }
  static pybind11::object object(const pybind11::object& value) { return value; }
  static pybind11::object object(const at::Tensor& tensor) {
    return tensor.defined() ? wrap(tensor) : pybind11::none();
  }
  static pybind11::object object(const std::optional<at::Tensor>& tensor) {
    return tensor ? wrap(*tensor) : pybind11::none();
  }

 private:
  const char *module_, *name_;
  mutable PyObject* imported_ = nullptr;  // lives as long as the process: nothing is left to free when it ends
};

}  // namespace transformer_fast
