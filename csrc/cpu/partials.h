// Sums over the rows of a matrix, per column. Rows are summed in chunks that depend on the shape only, so the result
// has the same bits on any number of threads.
#pragma once

#include "parallel.h"
#include "simd/vec.h"

#include <algorithm>

namespace transformer_fast {
namespace {

constexpr int64_t kMostChunks = 64;
constexpr int64_t kChunkElements = 8192;

inline int64_t chunk_rows(int64_t rows, int64_t d) {
  return std::max({(rows + kMostChunks - 1) / kMostChunks, kChunkElements / d, int64_t{1}});
}

// to (d) = the partial sums, d of every chunk, added in the order of the chunks.
template <typename W, typename A>
void sum_partials(const A* partials, int64_t chunks, int64_t d, W* to) {
  const int64_t grain = std::max<int64_t>(16384 / std::max<int64_t>(chunks, 1), 64);
  parallel_for(0, d, grain, [&](int64_t begin, int64_t end) {
    for_columns<A>(begin, end, [&](int64_t c, auto count, int) {
      Vector<A> total{};
      for (int64_t k = 0; k < chunks; ++k) total += load(partials + k * d + c, count);
      store(to + c, total, count);
    });
  });
}

}  // namespace
}  // namespace transformer_fast
