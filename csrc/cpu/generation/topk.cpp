// Best tokens of logits (rows, vocabulary) and the logarithm of the normaliser; and the best continuations of a beam,
// chosen from such tokens.
#include "generation_kernels.h"

#include "../parallel.h"
#include "../simd/exp.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace transformer_fast {
namespace {

using V = Vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The k largest values of a row, largest first; ties: lowest index first. -inf and NaN are never found; missing values
// at the end are -inf, with token 0. After some columns hardly any value enters the list, so vectors are compared
// first.
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

// The columns of a row, except some (ascending).
struct Columns {
  int64_t count;
  const int64_t* left_out = nullptr;
  int64_t left_out_count = 0;

  // Calls body(begin, end) for each range between excluded columns.
  template <typename Body>
  void for_ranges(Body body) const {
    int64_t begin = 0;
    for (int64_t i = 0; i < left_out_count; begin = left_out[i++] + 1) body(begin, left_out[i]);
    body(begin, count);
  }
};

// log(sum(exp(row))) over some columns, whose maximum is `shift`; NaN if one of them is NaN or +inf.
float log_sum(const float* row, const Columns& columns, float shift) {
  if (shift == kInfinity) return NAN;
  if (shift == -kInfinity) shift = 0;
  V sums[4] = {};
  columns.for_ranges([&](int64_t begin, int64_t end) {
    for_columns<float>(begin, end, [&](int64_t c, auto count, int slot) {
      sums[slot] += exponential(load(row + c, count, -kInfinity) - shift);
    });
  });
  return shift + std::log(sum(sums));
}

template <typename Task>
void for_rows(int64_t rows, int64_t columns, Task task) {
  parallel_for(0, rows, std::max<int64_t>(1, 32768 / columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) task(row);
  });
}

}  // namespace

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
  std::vector<int64_t> row_at(p.units * p.width, -1), found;  // found: indices in (rows, k), best first
  for (int64_t r = 0; r < p.rows; ++r) row_at[p.unit[r] * p.width + p.slot[r]] = r;
  const auto better = [&](int64_t a, int64_t b) { return p.total[a] > p.total[b]; };
  for (int64_t unit = 0; unit < p.units; ++unit) {
    found.clear();
    for (int64_t slot = 0; slot < p.width; ++slot) {
      const int64_t row = row_at[unit * p.width + slot];
      if (row < 0) continue;
      for (int64_t at = row * p.k; at < (row + 1) * p.k; ++at) {
        if (!(p.total[at] > -kInfinity)) continue;  // -inf, or NaN of a row without a finite logit
        // Ties: first slot first.
        found.insert(std::upper_bound(found.begin(), found.end(), at, better), at);
        if (static_cast<int64_t>(found.size()) > p.candidates) found.pop_back();
      }
    }
    for (int64_t i = 0; i < p.candidates; ++i) {
      const bool is_there = i < static_cast<int64_t>(found.size());
      const int64_t to = unit * p.candidates + i;
      p.best[to] = is_there ? p.total[found[i]] : -kInfinity;
      p.parent[to] = is_there ? found[i] / p.k : 0;
      p.chosen[to] = is_there ? p.token[found[i]] : 0;
    }
  }
}

}  // namespace transformer_fast
