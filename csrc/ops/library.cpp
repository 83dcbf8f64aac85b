#include "library.h"

#include "../instruction_set.h"
#include "build_config.h"
#include "by_triton.h"
#include "eager_call.h"
#include "linear.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/Exception.h>

#include <string>

namespace transformer_fast {

PythonHooks& python_hooks() {
  static PythonHooks hooks;
  return hooks;
}

bool eager::has_other_function_mode() {
  if (!at::impl::torch_function_mode_enabled()) return false;
  const auto& hook = python_hooks().has_other_function_mode;
  return !hook || hook();
}

namespace {

// The message of what a function raises, or null; it lives until the next call.
template <typename Function>
const char* error_of(const Function& function) {
  static std::string message;
  try {
    function();
    return nullptr;
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
    return message.c_str();
  }
}

}  // namespace
}  // namespace transformer_fast

#define EXPORTED extern "C" __attribute__((visibility("default")))

// transformer_fast/extension.py looks for this text in the file *before* loading it: a library built for another torch
// can crash on loading, and then the package could not report the reason.
EXPORTED const char transformer_fast_build[];
const char transformer_fast_build[] = "transformer_fast build: " TRANSFORMER_FAST_BUILD "\n";

EXPORTED const transformer_fast::Library* transformer_fast_library() {
  using namespace transformer_fast;
  static const Library library{eager::doors(),        python_hooks(), launches_on_cpu, triton_is_chosen,
                               &KeptWeight::copy_for, &kept_product,  &stamp_of};
  return &library;
}

// The instruction sets with kernels that this processor runs, the best first, with commas between them.
EXPORTED const char* transformer_fast_instruction_sets() {
  static const std::string names = [] {
    std::string joined;
    for (const std::string& name : transformer_fast::supported_instruction_sets())
      joined += (joined.empty() ? "" : ",") + name;
    return joined;
  }();
  return names.c_str();
}

// Loads the library of kernels at a path. Returns what went wrong, or null.
EXPORTED const char* transformer_fast_load_kernels(const char* path) {
  return transformer_fast::error_of([&] { transformer_fast::load_kernels(path); });
}

// True if float32 matrices (rows, in) and (in, out) go to oneDNN, false for PyTorch's own product.
EXPORTED bool transformer_fast_onednn_is_faster(int64_t rows, int64_t in, int64_t out) {
  return transformer_fast::onednn_is_faster(rows, in, out);
}

// Whether large products of float32 matrices go to oneDNN from now on: 1, 0, or -1 for where it is faster. Returns the
// choice before, or -2 if PyTorch has no oneDNN.
EXPORTED int transformer_fast_send_products_to_onednn(int choice) {
  std::optional<bool> before;
  const auto send = [&] {
    before = transformer_fast::send_products_to_onednn(choice < 0 ? std::nullopt : std::optional(choice == 1));
  };
  if (transformer_fast::error_of(send) != nullptr) return -2;
  return before ? *before : -1;
}
