// Prefetch of packed weights while others are multiplied.
#pragma once

#include "../simd/operands.h"

#include <cstdint>

namespace transformer_fast {
namespace {

// Fetches `step` numbers, at most a row of a panel, per row of a panel that is multiplied; nothing if `step` is 0.
template <typename T>
struct Ahead {
  const T* data;
  int64_t step;

  void fetch(int64_t row) const {
    constexpr int64_t line = 64 / sizeof(T);
    __builtin_prefetch(data + row * step);
    if constexpr (kStepPanel > line) __builtin_prefetch(data + row * step + line);
  }
};

}  // namespace
}  // namespace transformer_fast
