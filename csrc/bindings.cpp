// The Python module transformer_fast._C. Loading it registers all ops in torch.ops.transformer_fast. The module's
// Python functions are the eager fast paths of the ops (ops/eager.h) and decoding (ops/decoder_session.h).
//
// Each op is in ops/<op>.cpp; its kernels are in cpu/, in cuda/, and, in Triton, in transformer_fast/triton. The
// kernels of cpu/ are separate libraries, one per instruction set; load_kernels() loads one of them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backward_threads.h"
#include "build_config.h"
#include "cpu/attention/attention_params.h"
#include "instruction_set.h"
#include "ops/by_triton.h"
#include "ops/decoder_session.h"
#include "ops/eager.h"
#include "ops/kept_weight.h"
#include "ops/linear.h"
#include "triton/launch_cache.h"

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
  m.def("keep_for_backward", &transformer_fast::keep_for_backward,
        "Keeps a backend's name, or None, for backward passes that begin in this thread.");
  m.def("kept_for_backward", &transformer_fast::kept_for_backward,
        "The backend kept by this thread, or by the thread whose backward pass this one computes; else None.");

  namespace eager = transformer_fast::eager;
  m.def("attention", &eager::attention);
  m.def("multihead_attention", &eager::multihead_attention);
  m.def("attention_packed", &eager::attention_packed);
  m.def("attention_decode", &eager::attention_decode);
  m.def("dropout", &eager::dropout);
  m.def("layer_norm", &eager::layer_norm);
  m.def("linear", &eager::linear);
  m.def("projections", &eager::projections);
  m.def("onednn_is_faster", py::overload_cast<int64_t, int64_t, int64_t>(&transformer_fast::onednn_is_faster),
        "Returns True if float32 matrices (rows, in) and (in, out) go to oneDNN, False for PyTorch's own product.");
  m.def("send_products_to_onednn", &transformer_fast::send_products_to_onednn,
        "Whether large products of float32 matrices go to oneDNN from now on; None: where it is faster. Returns the "
        "choice before.");
  m.def(
      "launch_on_cpu", [](bool asks) { return transformer_fast::launches_on_cpu.exchange(asks); },
      "Whether a call of an op on CPU tensors runs on the Triton kernels under the backend \"triton\", from now on. "
      "Returns the choice before.");
  m.def("linear_cross_entropy", &eager::linear_cross_entropy);
  m.def("embed", &eager::embed);
  m.def("add_positional", &eager::add_positional);
  m.def("draw_seed", &eager::draw_seed);
  m.def("draw_number", &eager::draw_number);
  transformer_fast::bind_decoder_session(m);
  transformer_fast::bind_kept_weight(m);
  transformer_fast::bind_launch_cache(m);
}
