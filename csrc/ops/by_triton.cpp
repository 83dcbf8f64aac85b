#include "by_triton.h"

#include "../triton/python_function.h"

namespace transformer_fast {

bool triton_is_chosen() {
  static const PythonFunction current("transformer_fast.backends", "current");
  const pybind11::gil_scoped_acquire gil;
  return eager::is_text(current.call({}), "triton");
}

}  // namespace transformer_fast
