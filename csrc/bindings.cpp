// The Python module transformer_fast._C. Loading it registers all ops in torch.ops.transformer_fast. The module's
// Python functions are the doors of the ops (ops/op.h) and decoding (inference/decoder_session.cpp).
//
// Each op is in ops/<op>.cpp; its kernels are in cpu/, in cuda/, and, in Triton, in transformer_fast/triton. The
// kernels of cpu/ are separate libraries, one per instruction set; load_kernels() loads one of them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "build_config.h"
#include "cpu/attention/attention_params.h"
#include "instruction_set.h"
#include "ops/eager_call.h"
#include "python_module.h"

namespace py = pybind11;

namespace {

// transformer_fast/extension.py looks for this text in the file *before* loading it: a module built for another torch
// can crash on loading, and then the package could not report the reason.
constexpr char kBuild[] = "transformer_fast build: " TRANSFORMER_FAST_BUILD "\n";
constexpr size_t kPrefix = sizeof("transformer_fast build: ") - 1;

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Registers the ops of transformer_fast, and gives their eager fast path.";
  m.def(
      "build_info",
      [] {
        py::str text(kBuild + kPrefix, sizeof(kBuild) - 1 - kPrefix);
        return py::module_::import("json").attr("loads")(text);
      },
      "What this module was built with: torch, cuda, arch_list, compiler (dict).");
  m.def("supported_instruction_sets", &transformer_fast::supported_instruction_sets,
        "The instruction sets with kernels that this processor runs, the best first.");
  m.attr("attention_tile") = py::make_tuple(transformer_fast::kQueryTile, transformer_fast::kKeyTile);
  m.def("load_kernels", &transformer_fast::load_kernels, "Loads the library of kernels at a path.");
  m.def(
      "set_functional_mode",
      [](const py::type& kind) {
        transformer_fast::eager::functional_mode = reinterpret_cast<PyTypeObject*>(kind.inc_ref().ptr());
      },
      "Sets the class of the modes in which the eager fast path stays (function_mode.py).");
  for (const transformer_fast::Fragment add : transformer_fast::fragments()) add(m);
}
