// The label-smoothed cross entropy of rows of logits and its gradient.
//
//   loss = (1 - smoothing) (lse - x[target]) + smoothing (lse - mean(x)),    lse = log sum exp x
//   gradient = exp(x - lse) - (1 - smoothing) [c == target] - smoothing / vocabulary
//
// Where a row is sure of its target, both are small differences of large numbers. So all numbers are differences from
// the largest logit, and the target stands apart from the others, which its 1 would round away:
//
//   others = sum over c != target of exp(x - max),    lse - max = log(others + exp(x[target] - max))
//   gradient at the target without smoothing = -others / (others + exp(x[target] - max))
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
constexpr A kLowest = -std::numeric_limits<A>::infinity();

template <typename A>
A largest(const Vector<A>& v) {
  A result = v[0];
  for (int64_t i = 1; i < kLanes<A>; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

template <typename T, typename A = Accumulate<T>>
A row_loss(T* x, int64_t vocabulary, int64_t target, A smoothing, bool gradient) {
  Vector<A> lane_max = broadcast<A>(kLowest<A>), depths[4] = {}, exp_sums[4] = {};
  for_columns<A>(0, vocabulary, [&](int64_t c, auto count, int) {
    const auto v = load(x + c, count, kLowest<A>);
    lane_max = v > lane_max ? v : lane_max;
  });
  const A row_max = largest<A>(lane_max), depth = row_max - static_cast<A>(x[target]);
  const auto add = [&](int64_t c, auto count, int slot) {
    const Vector<A> below = load(x + c, count, kLowest<A>) - row_max;
    exp_sums[slot] += exponential(below);
    if (smoothing > 0) depths[slot] -= filled<A>(below, count, 0);
  };
  for_columns<A>(0, target, add);
  for_columns<A>(target + 1, vocabulary, add);
  const A exp_target = exponential(broadcast(-depth))[0], others = sum(exp_sums), exp_sum = others + exp_target;
  // With a target at the maximum the sum is 1 and little more.
  const A log_sum = depth == 0 ? std::log1p(others) : std::log(exp_sum);
  const A smooth = smoothing > 0 ? smoothing * (log_sum + (sum(depths) + depth) / vocabulary) : A(0);
  if (gradient) {
    const A even = smoothing / vocabulary, scale = 1 / exp_sum;
    for_columns<A>(0, vocabulary, [&](int64_t c, auto count, int) {
      store(x + c, fma(exponential(load(x + c, count) - row_max), scale, -even), count);
    });
    // The target's gradient is computed from its terms, because a difference of 16-bit numbers would round twice.
    const A smoothed = exp_target * scale - even - (1 - smoothing);
    x[target] = static_cast<T>(smoothing > 0 ? smoothed : -(others * scale));
  }
  return (1 - smoothing) * (depth + log_sum) + smooth;
}

}  // namespace

template <typename T>
void cross_entropy_rows(const CrossEntropyParams<T>& p) {
  using A = Accumulate<T>;
  parallel_for(0, p.rows, std::max<int64_t>(1, 8192 / p.vocabulary), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      p.losses[r] =
          row_loss<T>(p.logits + r * p.vocabulary, p.vocabulary, p.targets[r], static_cast<A>(p.smoothing), p.gradient);
  });
}

TRANSFORMER_FAST_FOR_EACH_TYPE(void, cross_entropy_rows, CrossEntropyParams)

}  // namespace transformer_fast
