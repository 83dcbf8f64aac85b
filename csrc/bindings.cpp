// The Python module transformer_fast._C. Loading it registers every op's kernels in torch.ops.transformer_fast.
//
// Each op declares its schemas and its call of the CPU's kernels in ops/<op>.cpp (TORCH_LIBRARY_FRAGMENT and
// TORCH_LIBRARY_IMPL); the kernels are in cpu/ and cuda/. They carry no autograd and trust what they are given:
// transformer_fast/ops checks it. The kernels of cpu/ are libraries of their own, one for each instruction set, of which
// load_kernels() takes one.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "build_config.h"
#include "direct/functions.h"
#include "instruction_set.h"

namespace py = pybind11;

namespace {

// transformer_fast/kernels/extension.py looks for this text in the file *before* loading it: a module built for another
// torch can crash while it loads, and then nothing could say why.
constexpr char kBuild[] = "transformer_fast build: " TRANSFORMER_FAST_BUILD "\n";
constexpr size_t kPrefix = sizeof("transformer_fast build: ") - 1;

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Registers the native kernels of transformer_fast in torch.ops.transformer_fast.";
  m.def(
      "build_info",
      [] {
        py::str text(kBuild + kPrefix, sizeof(kBuild) - 1 - kPrefix);
        return py::module_::import("json").attr("loads")(text);
      },
      "What this module was built with: torch, cuda, arch_list, compiler (dict).");
  m.def("supported_instruction_sets", &transformer_fast::supported_instruction_sets,
        "The instruction sets with kernels that this processor runs, the best first.");
  m.def("load_kernels", &transformer_fast::load_kernels, "Loads the library of kernels at a path.");

  namespace direct = transformer_fast::direct;
  m.def("attention", &direct::attention);
  m.def("attention_launched", &direct::attention_launched);
  m.def("multihead_attention", &direct::multihead_attention);
  m.def("attention_packed", &direct::attention_packed);
  m.def("set_launch_cache", &direct::set_launch_cache);
  m.def("attention_decode", &direct::attention_decode);
  m.def("layouts", &direct::layouts);
  m.def("start", &direct::start);
  m.def("empties_like", &direct::empties_like);
  m.def("empty_outputs", &direct::empty_outputs);
  m.def("dropout", &direct::dropout);
  m.def("layer_norm", &direct::layer_norm);
  m.def("linear_cross_entropy", &direct::linear_cross_entropy);
  m.def("embed", &direct::embed);
  m.def("add_positional", &direct::add_positional);
  m.def("draw_seed", &direct::draw_seed);
  m.def("draw_number", &direct::draw_number);
}
