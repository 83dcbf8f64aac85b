// The seed of one dropout mask: int64 (1,), on the device of what is dropped or on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_fast {

// A seed as the launchers of kernels take it: one on the host is a number, which needs no kernel to get to the device.
struct Seed {
  std::optional<at::Tensor> tensor;
  std::optional<int64_t> number;

  Seed(const std::optional<at::Tensor>& seed) {
    if (seed && seed->is_cpu())
      number = *seed->const_data_ptr<int64_t>();
    else
      tensor = seed;
  }
};

// The seed on the device of x, for calls of the dispatcher: a graph has all tensors on one device.
inline std::optional<at::Tensor> seed_beside(const at::Tensor& x, const std::optional<at::Tensor>& seed) {
  return seed && seed->device() != x.device() ? std::optional(seed->to(x.device())) : seed;
}

}  // namespace transformer_fast
