// What only Python computes: the launches of the Triton kernels (triton/), gradients of the reference, and the class of a
// mode. The Python module fills in the functions when it is imported. Where there is none, transformer_fast/backends.py
// sends such calls to the reference.
#pragma once

#include "../triton/launch_attention.h"
#include "../triton/launch_rows.h"

#include <c10/util/Exception.h>

#include <utility>

namespace transformer_fast {

template <typename Signature>
class Hook;

template <typename Result, typename... Args>
class Hook<Result(Args...)> {
 public:
  Hook& operator=(Result (*function)(Args...)) {
    function_ = function;
    return *this;
  }

  explicit operator bool() const { return function_ != nullptr; }

  Result operator()(Args... args) const {
    TORCH_CHECK(function_ != nullptr,
                "transformer_fast: this call needs the Python module transformer_fast._C, which is "
                "not loaded: `transformer-fast info` says why");
    return function_(std::forward<Args>(args)...);
  }

 private:
  Result (*function_)(Args...) = nullptr;
};

struct PythonHooks {
  Hook<bool()> has_other_function_mode;
  Hook<decltype(transformer_fast::launch_attention)> launch_attention;
  Hook<decltype(transformer_fast::launch_attention_backward)> launch_attention_backward;
  Hook<decltype(transformer_fast::dropout_words)> dropout_words;
  Hook<decltype(transformer_fast::launch_decode)> launch_decode;
  Hook<decltype(transformer_fast::weights_by_torch)> weights_by_torch;
  Hook<decltype(transformer_fast::weights_gradients)> weights_gradients;
  Hook<decltype(transformer_fast::launch_norm)> launch_norm;
  Hook<decltype(transformer_fast::launch_norm_backward)> launch_norm_backward;
  Hook<decltype(transformer_fast::launch_dropout)> launch_dropout;
  Hook<decltype(transformer_fast::launch_dropout_backward)> launch_dropout_backward;
  Hook<decltype(transformer_fast::launch_cross_entropy)> launch_cross_entropy;
};

// The hooks of the library of the ops.
PythonHooks& python_hooks();

}  // namespace transformer_fast
