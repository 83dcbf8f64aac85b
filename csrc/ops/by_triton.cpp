#include "by_triton.h"

#include "../triton/python_function.h"

namespace transformer_fast {

bool triton_is_chosen() {
  static const PythonFunction current("transformer_fast.backends", "current");
  const pybind11::gil_scoped_acquire gil;
  return eager::is_text(current.call({}), "triton");
}

PYTHON_MODULE_FRAGMENT(m) {
  m.def(
      "launch_on_cpu", [](bool asks) { return launches_on_cpu.exchange(asks); },
      "Whether a call of an op on CPU tensors runs on the Triton kernels under the backend \"triton\", from now on. "
      "Returns the choice before.");
}

}  // namespace transformer_fast
