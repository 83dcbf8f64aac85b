// What a search wants to know of logits (rows, vocabulary): the best tokens, and the logarithm of the normaliser.
#include "generation.h"

#include "../simd/exp.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace transformer_fast {
namespace {

using V = Vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The k greatest of a row, the greatest first, of equal ones the first first. Neither -inf nor NaN is found; what is
// then missing at the end is -inf, of token 0. After some columns hardly any is greater than all that are in the list.
void find_best(const float* row, int64_t columns, int64_t k, float* best, int64_t* token) {
  std::fill_n(best, k, -kInfinity);
  std::fill_n(token, k, 0);
  for_columns<float>(0, columns, [&](int64_t c, auto count, int) {
    if (lanes_added(load(row + c, count, -kInfinity) > best[k - 1]) == 0) return;
    for (int64_t i = c; i < c + count; ++i) {
      if (!(row[i] > best[k - 1])) continue;
      int64_t place = k - 1;
      for (; place > 0 && row[i] > best[place - 1]; --place)
        best[place] = best[place - 1], token[place] = token[place - 1];
      best[place] = row[i], token[place] = i;
    }
  });
}

// log(sum(exp(row))); NaN where the row has one.
float find_log_normalizer(const float* row, int64_t columns) {
  V greatest[4];
  std::fill_n(greatest, 4, broadcast(-kInfinity));
  for_columns<float>(0, columns, [&](int64_t c, auto count, int slot) {
    const V v = load(row + c, count, -kInfinity);
    greatest[slot] = v > greatest[slot] ? v : greatest[slot];
  });
  float shift = -kInfinity;
  for (const V& v : greatest)
    for (int64_t lane = 0; lane < kLanes<float>; ++lane) shift = std::max(shift, v[lane]);
  if (shift == kInfinity)
    return std::any_of(row, row + columns, [](float v) { return std::isnan(v); }) ? NAN : kInfinity;
  if (shift == -kInfinity) shift = 0;
  V sums[4] = {};
  for_columns<float>(0, columns, [&](int64_t c, auto count, int slot) {
    sums[slot] += exponential(load(row + c, count, -kInfinity) - shift);
  });
  return shift + std::log(sum(sums));
}

template <typename Task>
void for_rows(int64_t rows, int64_t columns, Task task) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 32768 / columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) task(row);
  });
}

}  // namespace

void best_tokens(const float* logits, int64_t rows, int64_t columns, int64_t k, float* best, int64_t* token) {
  for_rows(rows, columns, [&](int64_t r) { find_best(logits + r * columns, columns, k, best + r * k, token + r * k); });
}

void log_normalizer(const float* logits, int64_t rows, int64_t columns, float* out) {
  for_rows(rows, columns, [&](int64_t r) { out[r] = find_log_normalizer(logits + r * columns, columns); });
}

}  // namespace transformer_fast
