// Packed weights that are read later, fetched while others are multiplied.
#pragma once

#include "../simd/operands.h"

#include <cstdint>

namespace transformer_fast {
namespace {

// `step` numbers, at most a row of a panel, for each row of a panel that is multiplied; with 0 there is nothing to fetch.
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
