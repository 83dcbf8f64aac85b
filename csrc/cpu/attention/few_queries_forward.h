// Attention forward of few queries: one pass over the keys with a running maximum per query, split in parts if there
// are few heads (T. Dao et al., "Flash-Decoding for long-context inference", 2023), and a reduction of the parts.
#pragma once

#include "few_queries.h"

namespace transformer_fast {
namespace {

// Contribution of a range of keys to a query: the weighted sum of its values, the maximal score and the sum of weights.
template <typename A>
struct RowPart {
  A* sum;  // (D, padded)
  A *row_max, *row_sum;

  static int64_t size(int64_t width) { return width + kLanes<A>; }
  RowPart(A* storage, int64_t row, int64_t width)
      : sum(storage + row * size(width)), row_max(sum + width), row_sum(row_max + 1) {}
};

template <typename T, typename A>
class RowsForward {
 public:
  static constexpr int64_t kW = kLanes<A>;

  RowsForward(const AttentionForward<T, A>& call, int64_t b, int64_t kv_head)
      : call_(call), params_(call.params), rows_(params_, b, kv_head), b_(b), width_(round_up(params_.D, kW)) {
    Workspace<A>::divide({{&queries_, rows_.count() * width_},
                          {&parts_, rows_.count() * RowPart<A>::size(width_)},
                          {&weights_, kRowKeys}});
  }

  // Forward of `count` keys, from index `offset` among the visible keys. Writes to `parts` if these are not all keys,
  // else the result.
  void run(int64_t offset, int64_t count, A* parts) {
    A* storage = parts ? parts : parts_;
    Range visible;
    for (int64_t row = 0; row < rows_.count(); ++row) {
      copy_operands(params_.q.at(b_, rows_.head(row), rows_.position(row)), params_.D, queries_ + row * width_);
      const RowPart<A> part(storage, row, width_);
      std::fill(part.sum, part.sum + width_, A(0));
      *part.row_max = kBlocked<A>, *part.row_sum = 0;
      visible = visible.hull(rows_.visible(row));
    }
    const int64_t first_key = visible.from_multiple(kRowKeys).begin + offset;
    const int64_t end = std::min(visible.end, first_key + count);
    for (int64_t first = first_key; first < end;) {
      RowsAt<T> k, v;
      const int64_t keys = rows_.find_keys(first, std::min(kRowKeys, end - first), &k, &v);
      // Values are prefetched while the scores are computed, and the next keys while the values are summed.
      RowsAt<T> after = rows_.next_head(), values;
      if (const int64_t next = first + keys; next < end)
        rows_.find_keys(next, std::min(kRowKeys, end - next), &after, &values);
      for (int64_t row = 0; row < rows_.count(); ++row)
        add_keys(row, k, v, first, keys, RowPart<A>(storage, row, width_), row == 0 ? after : RowsAt<T>());
      first += keys;
    }
    if (!parts)
      for (int64_t row = 0; row < rows_.count(); ++row) finish(row, RowPart<A>(storage, row, width_));
  }

  // Joins the parts of all ranges, `stride` apart, for each row of this key head.
  void join(A* parts, int64_t ranges, int64_t stride) {
    for (int64_t row = 0; row < rows_.count(); ++row) {
      const RowPart<A> joined(parts, row, width_);
      for (int64_t range = 1; range < ranges; ++range) {
        const RowPart<A> part(parts + range * stride, row, width_);
        if (*part.row_sum == 0) continue;
        const A maximum = std::max(*joined.row_max, *part.row_max);
        const A before = std::exp(*joined.row_max - maximum), added = std::exp(*part.row_max - maximum);
        *joined.row_sum = *joined.row_sum * before + *part.row_sum * added;
        for (int64_t d = 0; d < width_; d += kW)
          store(joined.sum + d, fma(load(joined.sum + d), before, load(part.sum + d) * added));
        *joined.row_max = maximum;
      }
      finish(row, joined);
    }
  }

 private:
  void add_keys(int64_t row, RowsAt<T> k, RowsAt<T> v, int64_t first, int64_t keys, RowPart<A> part, RowsAt<T> after) {
    rows_.find_scores(row, queries_ + row * width_, k, first, keys, weights_, row == 0 ? v : RowsAt<T>());
    Vector<A> maxima = broadcast(*part.row_max);
    for (int64_t j = 0; j < keys; j += kW) maxima = load(weights_ + j) > maxima ? load(weights_ + j) : maxima;
    A maximum = *part.row_max;
    for (int64_t lane = 0; lane < kW; ++lane) maximum = std::max(maximum, static_cast<A>(maxima[lane]));
    // A NaN score fails every comparison; the sum below propagates it.
    const A origin = maximum == kBlocked<A> ? A(0) : maximum;
    Vector<A> totals{};
    for (int64_t j = 0; j < keys; j += kW) {
      const Vector<A> weight = exponential(load(weights_ + j) - origin);
      totals += weight;
      store(weights_ + j, weight);
    }
    if (maximum != *part.row_max && *part.row_max != kBlocked<A>) {
      const A shrink = std::exp(*part.row_max - maximum);
      *part.row_sum *= shrink;
      for (int64_t d = 0; d < width_; d += kW) store(part.sum + d, load(part.sum + d) * shrink);
    }
    *part.row_max = maximum;
    *part.row_sum += lane_sum<A>(totals);
    drop_weights(row, first, keys);
    if (after.first)
      add_rows<false, true>(weights_, v, keys, params_.D, part.sum, after);
    else
      add_rows(weights_, v, keys, params_.D, part.sum);
  }

  // Drops weights of keys first .. first + keys - 1, first a multiple of kKeysDrawn.
  void drop_weights(int64_t row, int64_t first, int64_t keys) {
    if (params_.dropout.p == 0) return;
    const TileDropout<A> dropout(params_, b_, rows_.head(row));
    uint16_t draws[kKeysDrawn];
    for (int64_t j = 0; j < keys; j += kKeysDrawn) {
      dropout.draw_row(first + j, rows_.position(row), draws);
      for (int64_t n = 0; n < std::min(kKeysDrawn, round_up(keys - j, kW)); n += kW) {
        ShortVector<A> bits;
        std::memcpy(&bits, draws + n, sizeof(bits));
        const auto kept = __builtin_convertvector(bits, IntegerVector<A>) >=
                          static_cast<IntegerLane<A>>(dropout.dropout.rate.threshold);
        store(weights_ + j + n, kept ? load(weights_ + j + n) : Vector<A>{});
      }
    }
  }

  void finish(int64_t row, RowPart<A> part) {
    const int64_t h = rows_.head(row), i = rows_.position(row);
    if (params_.sinks) add_sink(params_.sinks[h], part);
    *call_.logsumexp.at(b_, h, i) = *part.row_sum == 0 ? kBlocked<A> : *part.row_max + std::log(*part.row_sum);
    if (*part.row_sum == 0 && params_.has_uniform_rows()) add_all_values(row, part);
    const A rescale = params_.dropout.p > 0 ? static_cast<A>(DropoutRate(params_.dropout.p).scale) : A(1);
    const A factor = *part.row_sum == 0 ? A(0) : rescale / *part.row_sum;
    T* out = call_.out.at(b_, h, i);
    for (int64_t d = 0; d < params_.D; d += kW)
      store_result(out + d, load(part.sum + d) * factor, std::min(kW, params_.D - d));
  }

  void add_sink(A sink, RowPart<A> part) const {
    if (sink == kBlocked<A>) return;
    const A maximum = std::max(*part.row_max, sink), shrink = std::exp(*part.row_max - maximum);
    *part.row_sum = *part.row_sum * shrink + std::exp(sink - maximum);
    *part.row_max = maximum;
    for (int64_t d = 0; d < params_.D; d += kW) store(part.sum + d, load(part.sum + d) * shrink);
  }

  // No key is allowed: all have equal weight, and NaN or Inf values count as 0, because they are blocked too.
  void add_all_values(int64_t row, RowPart<A> part) {
    for (int64_t first = 0; first < params_.Lk; first += kRowKeys) {
      const int64_t keys = std::min(kRowKeys, params_.Lk - first);
      RowsAt<T> k, v;
      rows_.find_keys(first, keys, &k, &v);
      std::fill(weights_, weights_ + kRowKeys, A(1));
      drop_weights(row, first, keys);
      add_rows<true>(weights_, v, keys, params_.D, part.sum);
    }
    *part.row_sum = static_cast<A>(params_.Lk);
  }

  const AttentionForward<T, A>& call_;
  const AttentionKernelParams<T, A>& params_;
  QueryRows<T, A> rows_;
  int64_t b_, width_;
  A *queries_, *parts_, *weights_;
};

}  // namespace
}  // namespace transformer_fast
