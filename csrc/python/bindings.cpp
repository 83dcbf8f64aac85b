// The Python module transformer_fast._C: the doors of the ops (ops/op.h), the launches of Triton kernels (triton/), and
// layers with kept weights. All else is in the library of the ops (ops/library.h), which needs no Python.
#include "../cpu/attention/attention_params.h"
#include "../ops/eager_call.h"
#include "../ops/library.h"
#include "../triton/launch_attention.h"
#include "../triton/launch_rows.h"
#include "build_config.h"
#include "python_module.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include <dlfcn.h>

namespace py = pybind11;

namespace transformer_fast {

// transformer_fast/extension.py looks for this text in the file before loading it, as in ops/library.cpp.
__attribute__((used)) const char kBuild[] = "transformer_fast build: " TRANSFORMER_FAST_BUILD "\n";

namespace {

const Library* connected = nullptr;

// Takes the doors of the library of the ops at a path, which is loaded, and gives it what only Python computes. The library
// is of the same sources: extension.py compared the build records.
void connect(py::module_ m, const std::string& path) {
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(file != nullptr, dlerror());
  const auto get = reinterpret_cast<const Library* (*)()>(dlsym(file, "transformer_fast_library"));
  TORCH_CHECK(get != nullptr, path, " has no ops of transformer_fast");
  const Library& library = *get();
  connected = &library;
  eager::add_doors(m, library.doors);
  PythonHooks& hooks = library.hooks;
  hooks.has_other_function_mode = &eager::has_other_function_mode;
  hooks.launch_attention = &launch_attention;
  hooks.launch_attention_backward = &launch_attention_backward;
  hooks.dropout_words = &dropout_words;
  hooks.launch_decode = &launch_decode;
  hooks.weights_by_torch = &weights_by_torch;
  hooks.weights_gradients = &weights_gradients;
  hooks.launch_norm = &launch_norm;
  hooks.launch_norm_backward = &launch_norm_backward;
  hooks.launch_dropout = &launch_dropout;
  hooks.launch_dropout_backward = &launch_dropout_backward;
  hooks.launch_cross_entropy = &launch_cross_entropy;
}

}  // namespace

const Library& library() { return *connected; }

}  // namespace transformer_fast

PYBIND11_MODULE(_C, m) {
  using namespace transformer_fast;
  m.doc() = "Eager calls of the ops of transformer_fast without the dispatcher.";
  m.attr("attention_tile") = py::make_tuple(kQueryTile, kKeyTile);
  m.def("connect", [m](const std::string& path) { connect(m, path); }, "Takes the ops of the library at a path.");
  m.def(
      "set_functional_mode",
      [](const py::type& kind) { eager::functional_mode = reinterpret_cast<PyTypeObject*>(kind.inc_ref().ptr()); },
      "Sets the class of the modes in which the eager fast path stays (function_mode.py).");
  m.def(
      "launch_on_cpu", [](bool launches) { return library().launches_on_cpu.exchange(launches); },
      "Whether a call of an op on CPU tensors runs on the Triton kernels under the backend \"triton\", from now on. "
      "Returns the choice before.");
  m.def(
      "choose_triton", [](bool chosen) { library().triton_is_chosen = chosen; },
      "Whether \"triton\" is the backend of the process, from now on.");
  m.def(
      "weight_stamp",
      [](const at::Tensor& weight) {
        const WeightStamp stamp = library().stamp_of(weight);
        py::tuple numbers(stamp.size());
        for (size_t i = 0; i < stamp.size(); ++i) numbers[i] = stamp[i];
        return numbers;
      },
      "Stamp of a weight (out, in) on the CPU, as tensor_cache.py defines it.");
  for (const Fragment add : fragments()) add(m);
}
