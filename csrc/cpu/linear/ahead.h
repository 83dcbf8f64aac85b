// Products of rows with a panel of packed weights: as many rows at a time as registers hold sums for, and the prefetch
// of weights while others are multiplied.
#pragma once

#include "linear_kernels.h"

#include "../simd/operands.h"

#include <cstdint>
#include <type_traits>

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

// 12 x 2 or 6 x 2 sums, 2 vectors of weights, and a broadcast.
constexpr int kMostRows = kVectorRegisters == 32 ? 12 : 6;
constexpr int64_t kGroupsAhead = 16;  // between the fetch of weights and their use

// Calls body(number of rows), with the number as a constant of at most kMostRows.
template <int kRows = kMostRows, typename Body>
void with_rows(int64_t rows, const Body& body) {
  if constexpr (kRows > 1)
    if (rows < kRows) return with_rows<kRows - 1>(rows, body);
  body(std::integral_constant<int, kRows>());
}

// Calls body(first row, number of rows, ahead) for passes over the rows [begin, end), each with a panel of `groups`
// rows of words. A single pass is limited by reading its weights. With several passes, each fetches a part of the next panel.
template <typename Body>
void for_passes(int64_t begin, int64_t end, const int32_t* weights, int64_t groups, const Body& body) {
  const int64_t rows = end - begin, passes = (rows + kMostRows - 1) / kMostRows;
  const int64_t share = (kStepPanel + passes - 1) / passes, words = groups * kStepPanel;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t from = begin + pass * rows / passes, to = begin + (pass + 1) * rows / passes;
    const int64_t fetched = pass * groups * share;
    const Ahead<int32_t> ahead = passes == 1       ? Ahead<int32_t>{weights + kGroupsAhead * kStepPanel, kStepPanel}
                                 : fetched < words ? Ahead<int32_t>{weights + words + fetched, share}
                                                   : Ahead<int32_t>{weights, 0};
    with_rows(to - from, [&](auto count) { body(from, count, ahead); });
  }
}

}  // namespace
}  // namespace transformer_fast
