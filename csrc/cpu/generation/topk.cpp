// What a search wants to know of logits (rows, vocabulary): the best tokens, the logarithm of the normaliser, or both. And
// which of those tokens are the best continuations of a beam.
#include "generation.h"

#include "../simd/exp.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace transformer_fast {
namespace {

using V = Vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The k greatest of a row, the greatest first, of equal ones the first first. Neither -inf nor NaN is found; what is
// then missing at the end is -inf, of token 0. After some columns hardly any is greater than all that are in the list.
struct Best {
  int64_t k;
  float* values;
  int64_t* tokens;

  void clear() const {
    std::fill_n(values, k, -kInfinity);
    std::fill_n(tokens, k, 0);
  }

  void find(const float* row, int64_t begin, int64_t end) const {
    for_columns<float>(begin, end, [&](int64_t c, auto count, int) {
      if (lanes_added(load(row + c, count, -kInfinity) > values[k - 1]) == 0) return;
      for (int64_t i = c; i < c + count; ++i) {
        if (!(row[i] > values[k - 1])) continue;
        int64_t place = k - 1;
        for (; place > 0 && row[i] > values[place - 1]; --place)
          values[place] = values[place - 1], tokens[place] = tokens[place - 1];
        values[place] = row[i], tokens[place] = i;
      }
    });
  }
};

// The columns of a row without some of them, which rise.
struct Columns {
  int64_t count;
  const int64_t* left_out = nullptr;
  int64_t left_out_count = 0;

  // body(begin, end) for each range between two that are left out.
  template <typename Body>
  void for_ranges(Body body) const {
    int64_t begin = 0;
    for (int64_t i = 0; i < left_out_count; begin = left_out[i++] + 1) body(begin, left_out[i]);
    body(begin, count);
  }
};

// log(sum(exp(row))) over some columns, of which `shift` is the greatest number; NaN where one of them is NaN.
float log_sum(const float* row, const Columns& columns, float shift) {
  if (shift == kInfinity)
    return std::any_of(row, row + columns.count, [](float v) { return std::isnan(v); }) ? NAN : kInfinity;
  if (shift == -kInfinity) shift = 0;
  V sums[4] = {};
  columns.for_ranges([&](int64_t begin, int64_t end) {
    for_columns<float>(begin, end, [&](int64_t c, auto count, int slot) {
      sums[slot] += exponential(load(row + c, count, -kInfinity) - shift);
    });
  });
  return shift + std::log(sum(sums));
}

float log_normalizer_of(const float* row, int64_t columns) {
  V greatest[4];
  std::fill_n(greatest, 4, broadcast(-kInfinity));
  for_columns<float>(0, columns, [&](int64_t c, auto count, int slot) {
    const V v = load(row + c, count, -kInfinity);
    greatest[slot] = v > greatest[slot] ? v : greatest[slot];
  });
  float shift = -kInfinity;
  for (const V& v : greatest)
    for (int64_t lane = 0; lane < kLanes<float>; ++lane) shift = std::max(shift, v[lane]);
  return log_sum(row, {columns}, shift);
}

template <typename Task>
void for_rows(int64_t rows, int64_t columns, Task task) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 32768 / columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) task(row);
  });
}

}  // namespace

void best_tokens(const float* logits, int64_t rows, int64_t columns, int64_t k, float* best, int64_t* token) {
  for_rows(rows, columns, [&](int64_t r) {
    const Best found{k, best + r * k, token + r * k};
    found.clear();
    found.find(logits + r * columns, 0, columns);
  });
}

void choose_tokens(const TokenChoice& p) {
  const Columns allowed{p.columns, p.suppressed, p.suppressed_count};
  for_rows(p.rows, p.columns, [&](int64_t r) {
    const float* const row = p.logits + r * p.columns;
    const Best found{p.k, p.best + r * p.k, p.token + r * p.k};
    found.clear();
    allowed.for_ranges([&](int64_t begin, int64_t end) { found.find(row, begin, end); });
    float greatest = found.values[0], lost = 0;
    for (int64_t i = 0; i < p.suppressed_count; ++i) {
      const float logit = row[p.suppressed[i]];
      if (std::isnan(logit)) lost = NAN;
      if (!p.renormalize) greatest = std::max(greatest, logit);
    }
    p.normalizer[r] = log_sum(row, p.renormalize ? allowed : Columns{p.columns}, greatest) + lost;
  });
}

void choose_continuations(const BeamChoice& p) {
  std::vector<int64_t> row_at(p.units * p.width, -1);
  for (int64_t r = 0; r < p.rows; ++r) row_at[p.unit[r] * p.width + p.slot[r]] = r;
  for (int64_t unit = 0; unit < p.units; ++unit) {
    float* const total = p.total + unit * p.candidates;
    int64_t *const parent = p.parent + unit * p.candidates, *const chosen = p.chosen + unit * p.candidates;
    std::fill_n(total, p.candidates, -kInfinity);
    std::fill_n(parent, p.candidates, 0), std::fill_n(chosen, p.candidates, 0);
    // Of equal ones that of the first slot comes first.
    for (int64_t slot = 0; slot < p.width; ++slot) {
      const int64_t row = row_at[unit * p.width + slot];
      if (row < 0) continue;
      const float before = p.log_prob[row] - p.normalizer[row];
      for (int64_t i = row * p.k; i < (row + 1) * p.k; ++i) {
        const float sum = before + p.best[i];
        int64_t place = p.candidates;
        while (place > 0 && sum > total[place - 1]) --place;
        if (place == p.candidates) continue;  // as is NaN, of a row without a finite logit
        std::copy_backward(total + place, total + p.candidates - 1, total + p.candidates);
        std::copy_backward(parent + place, parent + p.candidates - 1, parent + p.candidates);
        std::copy_backward(chosen + place, chosen + p.candidates - 1, chosen + p.candidates);
        total[place] = sum, parent[place] = row, chosen[place] = p.token[i];
      }
    }
  }
}

void log_normalizer(const float* logits, int64_t rows, int64_t columns, float* out) {
  for_rows(rows, columns, [&](int64_t r) { out[r] = log_normalizer_of(logits + r * columns, columns); });
}

}  // namespace transformer_fast
