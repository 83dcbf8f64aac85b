#include "by_triton.h"

#include "../python_module.h"

namespace transformer_fast {

PYTHON_MODULE_FRAGMENT(m) {
  m.def(
      "launch_on_cpu", [](bool launches) { return launches_on_cpu.exchange(launches); },
      "Whether a call of an op on CPU tensors runs on the Triton kernels under the backend \"triton\", from now on. "
      "Returns the choice before.");
  m.def(
      "choose_triton", [](bool chosen) { triton_is_chosen = chosen; },
      "Whether \"triton\" is the backend of the process, from now on.");
}

}  // namespace transformer_fast
