// The label-smoothed cross entropy of rows of logits and its gradient.
//
//   loss = (1 - smoothing) (lse - x[target]) + smoothing (lse - mean(x)),    lse = log sum exp x
//   gradient = exp(x - lse) - (1 - smoothing) [c == target] - smoothing / vocabulary
//
// A row is read from the first-level cache three times and from memory once.
#include "cross_entropy.h"

#include "simd/exp.h"

#include <ATen/Parallel.h>

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
  Vector<A> peaks = broadcast<A>(kLowest), sums[4] = {}, totals[4] = {};
  for_columns<A>(0, vocabulary, [&](int64_t c, auto count, int slot) {
    const auto v = load(x + c, count, kLowest);
    peaks = v > peaks ? v : peaks;
    if (smoothing > 0) sums[slot] += load(x + c, count);
  });
  const A peak = largest<A>(peaks), at_target = static_cast<A>(x[target]);
  for_columns<A>(0, vocabulary, [&](int64_t c, auto count, int slot) {
    totals[slot] += exponential(load(x + c, count, kLowest) - peak);
  });
  const A total = sum(totals), lse = peak + std::log(total);
  if (gradient) {
    const A even = smoothing / vocabulary, scale = 1 / total;
    for_columns<A>(0, vocabulary, [&](int64_t c, auto count, int) {
      store(x + c, fma(exponential(load(x + c, count) - peak), scale, -even), count);
    });
    // Once more from its own terms: the difference of two 16-bit numbers would be rounded twice.
    x[target] = static_cast<T>(std::exp(at_target - peak) * scale - even - (1 - smoothing));
  }
  const A smooth = smoothing > 0 ? smoothing * (lse - sum(sums) / vocabulary) : A(0);
  return (1 - smoothing) * (lse - at_target) + smooth;
}

}  // namespace

template <typename T>
void cross_entropy_rows(const CrossEntropyParams<T>& p) {
  at::parallel_for(0, p.rows, std::max<int64_t>(1, 8192 / p.vocabulary), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      p.losses[r] = row_loss<T>(p.logits + r * p.vocabulary, p.vocabulary, p.targets[r], p.smoothing, p.gradient);
  });
}

template void cross_entropy_rows(const CrossEntropyParams<float>&);
template void cross_entropy_rows(const CrossEntropyParams<double>&);
template void cross_entropy_rows(const CrossEntropyParams<c10::Half>&);
template void cross_entropy_rows(const CrossEntropyParams<c10::BFloat16>&);

}  // namespace transformer_fast
