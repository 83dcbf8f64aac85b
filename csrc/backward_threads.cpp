#include "backward_threads.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/PyInterpreter.h>

#include <memory>
#include <string>
#include <utility>

namespace transformer_fast {

namespace py = pybind11;
using at::impl::ThreadLocalPythonObjects;

namespace {
const std::string kKey = "transformer_fast.backend";
}

void keep_for_backward(py::object backend) {
  ThreadLocalPythonObjects::set(kKey, std::make_shared<c10::SafePyObject>(backend.release().ptr(), getPyInterpreter()));
}

py::object kept_for_backward() {
  if (!ThreadLocalPythonObjects::contains(kKey)) return py::none();
  return py::reinterpret_borrow<py::object>(ThreadLocalPythonObjects::get(kKey)->ptr(getPyInterpreter()));
}

}  // namespace transformer_fast
