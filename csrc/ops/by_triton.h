// Whose kernels compute a call: on a CPU those of csrc, on other devices those in Triton.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <optional>
#include <utility>

namespace transformer_fast {

// True while a call on the CPU takes the chosen backend: as in Triton's interpreter.
inline std::atomic<bool> launches_on_cpu{false};
// True while the process has chosen the backend "triton"; transformer_fast/backends.py sets it.
inline std::atomic<bool> triton_is_chosen{false};
// Kernels of a call, true for those in Triton, while its door or its backward runs in this thread.
inline thread_local std::optional<bool> kernels_of_forward;

// True if the Triton kernels compute a call whose first tensor is x.
inline bool runs_on_triton(const at::Tensor& x) {
  if (!x.is_cpu()) return !x.is_meta();
  return launches_on_cpu && kernels_of_forward.value_or(triton_is_chosen);
}

// The scope of a door, which was told the kernels, or of a backward, which takes those of its forward.
class KernelsOfForward {
 public:
  explicit KernelsOfForward(bool by_triton) : before_(std::exchange(kernels_of_forward, by_triton)) {}
  ~KernelsOfForward() { kernels_of_forward = before_; }
  KernelsOfForward(const KernelsOfForward&) = delete;
  KernelsOfForward& operator=(const KernelsOfForward&) = delete;

 private:
  std::optional<bool> before_;
};

}  // namespace transformer_fast
