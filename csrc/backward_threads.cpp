// The backend that a thread has chosen, for the threads that compute its gradients: PyTorch hands them what
// ThreadLocalPythonObjects holds. transformer_fast/backends.py says why they need it.
#include "python_module.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/PyInterpreter.h>

#include <memory>
#include <string>

namespace transformer_fast {
namespace {

namespace py = pybind11;
using at::impl::ThreadLocalPythonObjects;

const std::string kKey = "transformer_fast.backend";

void keep_for_backward(py::object backend) {
  ThreadLocalPythonObjects::set(kKey, std::make_shared<c10::SafePyObject>(backend.release().ptr(), getPyInterpreter()));
}

py::object kept_for_backward() {
  if (!ThreadLocalPythonObjects::contains(kKey)) return py::none();
  return py::reinterpret_borrow<py::object>(ThreadLocalPythonObjects::get(kKey)->ptr(getPyInterpreter()));
}

PYTHON_MODULE_FRAGMENT(m) {
  m.def("keep_for_backward", &keep_for_backward,
        "Keeps a backend's name, or None, for backward passes that begin in this thread.");
  m.def("kept_for_backward", &kept_for_backward,
        "The backend kept by this thread, or by the thread whose backward pass this one computes; else None.");
}

}  // namespace
}  // namespace transformer_fast
