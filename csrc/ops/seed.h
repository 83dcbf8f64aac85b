// The seed of one dropout mask, in calls that need no dispatcher.
#pragma once

#include "eager_call.h"

#include <ATen/ops/full.h>

#include <optional>

namespace transformer_fast {

// int64 (1,) on the device, or a number, which needs no kernel to get there; or none.
struct Seed {
  std::optional<at::Tensor> tensor;
  std::optional<int64_t> number;

  explicit operator bool() const { return tensor || number; }

  // As a tensor on the device of x.
  std::optional<at::Tensor> on_device_of(const at::Tensor& x) const {
    return number ? at::full({1}, *number, x.options().dtype(at::kLong)) : tensor;
  }
};

namespace eager {

// A number is taken by the Triton kernels only.
inline Seed read_seed(Arguments& arguments, bool by_triton, py::handle seed) {
  if (PyLong_CheckExact(seed.ptr()) && by_triton) return {{}, arguments.integer(seed)};
  return {arguments.optional_tensor(seed), {}};
}

}  // namespace eager
}  // namespace transformer_fast
