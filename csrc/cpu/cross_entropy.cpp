// Label-smoothed cross entropy of rows of logits, and the gradient of its sum written over them.
//
//   loss = (1 - smoothing) (lse - x[target]) + smoothing (lse - mean(x)),    lse = log sum exp x
//   gradient = exp(x - lse) - (1 - smoothing) [c == target] - smoothing / vocabulary
//
// A row is read from the first-level cache three times and from memory once. An ignored row has loss and gradient 0.

#include "exponential.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace transformer_fast {
namespace {

using at::Tensor;

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
      store(x + c, exponential(load(x + c, count) - peak) * scale - even, count);
    });
    // Once more from its own terms: the difference of two 16-bit numbers would be rounded twice.
    x[target] = static_cast<T>(std::exp(at_target - peak) * scale - even - (1 - smoothing));
  }
  const A smooth = smoothing > 0 ? smoothing * (lse - sum(sums) / vocabulary) : A(0);
  return (1 - smoothing) * (lse - at_target) + smooth;
}

// logits (rows, vocabulary) and target (rows,), contiguous; targets lie in the vocabulary or are ignored. Losses (rows,) in the arithmetic's type.
Tensor cross_entropy_rows(const Tensor& logits, const Tensor& target, double smoothing, int64_t ignore_index,
                          bool gradient) {
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const Tensor losses =
      at::empty({rows}, logits.options().dtype(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  const int64_t* targets = target.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, logits.scalar_type(), "cross_entropy_rows", [&] {
    using A = Accumulate<scalar_t>;
    auto* x = logits.mutable_data_ptr<scalar_t>();
    A* out = losses.mutable_data_ptr<A>();
    at::parallel_for(0, rows, std::max<int64_t>(1, 8192 / vocabulary), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        scalar_t* row = x + r * vocabulary;
        if (targets[r] == ignore_index) {
          out[r] = 0;
          if (gradient) std::fill_n(row, vocabulary, scalar_t(0));
        } else {
          out[r] = row_loss<scalar_t>(row, vocabulary, targets[r], static_cast<A>(smoothing), gradient);
        }
      }
    });
  });
  return losses;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "cross_entropy_rows(Tensor(a!) logits, Tensor target, float smoothing, int ignore_index, bool gradient) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) { m.impl("cross_entropy_rows", cross_entropy_rows); }

}  // namespace transformer_fast
