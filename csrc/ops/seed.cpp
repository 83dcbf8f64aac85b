// The seed of one dropout mask, drawn from PyTorch's generator for the CPU.
#include "eager_call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/ops/empty_cpu_dispatch.h>

#include <limits>
#include <mutex>

namespace transformer_fast::eager {

// One int64 from torch's CPU generator, equal to torch.randint(-2**63, 2**63 - 1, (1,)).
int64_t draw_number() {
  constexpr int64_t low = std::numeric_limits<int64_t>::min();
  at::uniform_int_from_to_distribution<int64_t> distribution(std::numeric_limits<uint64_t>::max(), low);
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return distribution(generator);
}

// The same as a tensor.
py::object draw_seed() {
  Tensor seed = at::cpu::empty({1}, at::kLong);
  *seed.mutable_data_ptr<int64_t>() = draw_number();
  return wrap(seed);
}

PYTHON_MODULE_FRAGMENT(m) {
  m.def("draw_seed", &draw_seed);
  m.def("draw_number", &draw_number);
}

}  // namespace transformer_fast::eager
