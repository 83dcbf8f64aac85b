// The label-smoothed cross entropy of rows of logits and its gradient.
//
//   loss = (1 - smoothing) (lse - x[target]) + smoothing (lse - mean(x)),    lse = log sum exp x
//   gradient = exp(x - lse) - (1 - smoothing) [c == target] - smoothing / vocabulary
//
// A row is read from the first-level cache three times and from memory once.
#include "cross_entropy.h"

#include "parallel.h"
#include "simd/exp.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace transformer_fast {
namespace {

template <typename A>
A largest(const Vector<A>& v) {
  A result = v[0];
  for (int64_t i = 1; i < kLanes<A>; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

template <typename T, typename A = Accumulate<T>>
A row_loss(T* x, int64_t vocabulary, int64_t target, A smoothing, bool gradient) {
  constexpr A kLowest = -std::numeric_limits<A>::infinity();
  Vector<A> lane_max = broadcast<A>(kLowest), sums[4] = {}, exp_sums[4] = {};
  for_columns<A>(0, vocabulary, [&](int64_t c, auto count, int slot) {
    const auto v = load(x + c, count, kLowest);
    lane_max = v > lane_max ? v : lane_max;
    if (smoothing > 0) sums[slot] += load(x + c, count);
  });
  const A row_max = largest<A>(lane_max), at_target = static_cast<A>(x[target]);
  for_columns<A>(0, vocabulary, [&](int64_t c, auto count, int slot) {
    exp_sums[slot] += exponential(load(x + c, count, kLowest) - row_max);
  });
  const A exp_sum = sum(exp_sums), lse = row_max + std::log(exp_sum);
  if (gradient) {
    const A even = smoothing / vocabulary, scale = 1 / exp_sum;
    for_columns<A>(0, vocabulary, [&](int64_t c, auto count, int) {
      store(x + c, fma(exponential(load(x + c, count) - row_max), scale, -even), count);
    });
    // The target's gradient is computed again from its terms, because a difference of 16-bit numbers would round twice.
    x[target] = static_cast<T>(std::exp(at_target - row_max) * scale - even - (1 - smoothing));
  }
  const A smooth = smoothing > 0 ? smoothing * (lse - sum(sums) / vocabulary) : A(0);
  return (1 - smoothing) * (lse - at_target) + smooth;
}

}  // namespace

template <typename T>
void cross_entropy_rows(const CrossEntropyParams<T>& p) {
  parallel_for(0, p.rows, std::max<int64_t>(1, 8192 / p.vocabulary), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      p.losses[r] = row_loss<T>(p.logits + r * p.vocabulary, p.vocabulary, p.targets[r], p.smoothing, p.gradient);
  });
}

TRANSFORMER_FAST_FOR_EACH_TYPE(void, cross_entropy_rows, CrossEntropyParams)

}  // namespace transformer_fast
