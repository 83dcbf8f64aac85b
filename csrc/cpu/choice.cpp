// What a search wants to know of logits (rows, vocabulary): the best tokens, and the logarithm of the normaliser.
#include "exponential.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <tuple>

namespace transformer_fast {
namespace {

using at::Tensor;
using V = Vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The k greatest of a row, the greatest first, of equal ones the first first. Neither -inf nor NaN is found; what is
// then missing at the end is -inf, of token 0. After some columns hardly any is greater than all that were kept.
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
void for_rows(const Tensor& logits, Task task) {
  at::parallel_for(0, logits.size(0), std::max<int64_t>(1, 32768 / logits.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) task(row);
  });
}

std::tuple<Tensor, Tensor> best_tokens(const Tensor& logits, int64_t k) {
  const Tensor given = logits.contiguous();
  const int64_t rows = given.size(0), columns = given.size(1);
  const Tensor best = at::empty({rows, k}, given.options());
  const Tensor token = at::empty({rows, k}, given.options().dtype(at::kLong));
  const float* from = given.const_data_ptr<float>();
  float* to = best.mutable_data_ptr<float>();
  int64_t* to_token = token.mutable_data_ptr<int64_t>();
  for_rows(given, [&](int64_t r) { find_best(from + r * columns, columns, k, to + r * k, to_token + r * k); });
  return {best, token};
}

Tensor log_normalizer(const Tensor& logits) {
  const Tensor given = logits.contiguous(), out = at::empty({given.size(0)}, given.options());
  const float* from = given.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_rows(given, [&](int64_t r) { to[r] = find_log_normalizer(from + r * given.size(1), given.size(1)); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def("best_tokens(Tensor logits, int k) -> (Tensor best, Tensor token)");
  m.def("log_normalizer(Tensor logits) -> Tensor");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("best_tokens", best_tokens);
  m.impl("log_normalizer", log_normalizer);
}

}  // namespace transformer_fast
