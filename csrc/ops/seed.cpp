// The seed of one dropout mask, drawn from PyTorch's generator for the CPU.
#include "op.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/ops/empty_cpu_dispatch.h>

#include <limits>
#include <mutex>

namespace transformer_fast::eager {
namespace {

// int64 (1,) from torch's CPU generator, equal to torch.randint(-2**63, 2**63 - 1, (1,)).
Tensor draw_seed(bool) {
  constexpr int64_t low = std::numeric_limits<int64_t>::min();
  at::uniform_int_from_to_distribution<int64_t> distribution(std::numeric_limits<uint64_t>::max(), low);
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  Tensor seed = at::cpu::empty({1}, at::kLong);
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  *seed.mutable_data_ptr<int64_t>() = distribution(generator);
  return seed;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  define_door<"draw_seed", kNoCheck, draw_seed, DoorOptions{.plain = false}>("()");
}

}  // namespace transformer_fast::eager
