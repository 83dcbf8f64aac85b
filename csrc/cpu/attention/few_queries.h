// Few queries against many keys, as in decoding. A tile of queries would leave most lanes idle, so each query is
// computed by itself, with vectors along the keys in the softmax and along D in the products. Only this path supports
// paged caches.
#pragma once

#include "../simd/operands.h"
#include "mask.h"

namespace transformer_fast {
namespace {

constexpr int64_t kRowKeys = 64;  // keys per chunk, which stay in the CPU cache for all queries of a group

template <typename T, typename A>
bool has_few_queries(const AttentionKernelParams<T, A>& params) {
  return params.Lq <= kFewQueries || params.pages != nullptr || params.cells.data != nullptr;
}

// Calls body(true_type) where rows of D elements are whole vectors of operands, else body(false_type).
template <typename T, typename Body>
inline void with_whole_vectors(int64_t D, Body body) {
  if (D % (kLanes<Accumulate<T>> * kSteps<Operand<T>>) == 0)
    body(std::true_type{});
  else
    body(std::false_type{});
}

// A vector of a row's operands, the first one `unit` operands into the row; zeros past the end of the row.
template <bool kWhole, typename T>
inline Vector<Accumulate<T>> load_operands(const T* row, int64_t unit, int64_t D) {
  if constexpr (kPaired<T>)
    return kWhole ? load(reinterpret_cast<const float*>(row) + unit) : load_bits(row + 2 * unit, D - 2 * unit);
  else
    return kWhole ? load(row + unit) : load_some(row + unit, std::min(kLanes<Accumulate<T>>, D - unit));
}

template <typename T>
inline void copy_operands(const T* row, int64_t D, Accumulate<T>* out) {
  for (int64_t unit = 0; unit * kSteps<Operand<T>> < D; unit += kLanes<Accumulate<T>>)
    store(out + unit, load_operands<false>(row, unit, D));
}

// Rows of keys or values, at a fixed stride, or at the indices `cells` in units of the stride.
template <typename T>
struct RowsAt {
  const T* first = nullptr;
  int64_t stride = 0;
  const int32_t* cells = nullptr;

  const T* at(int64_t j) const { return first + (cells ? cells[j] : j) * stride; }
  // A generation cache is read from memory: each line of the current rows prefetches a line of the next rows.
  void fetch(int64_t j, int64_t column) const { __builtin_prefetch(at(j) + column, 0, 2); }
};

// out[j] = factor * (row j) . vector for j < count; `out` has room for whole vectors, `vector` holds operands.
template <bool kFetch = false, typename T, typename A>
void multiply_rows(RowsAt<T> rows, int64_t count, int64_t D, const A* vector, A factor, A* out, RowsAt<T> ahead = {}) {
  constexpr int64_t kW = kLanes<A>, kRows = std::min<int64_t>(4, kW);
  with_whole_vectors<T>(D, [&](auto whole) {
    for (int64_t first = 0; first < count; first += kW) {
      Vector<A> products[kW] = {};
      for (int64_t j = 0; j < std::min(kW, count - first); j += kRows) {
        const T* row[kRows];
        Vector<A> sums[kRows] = {};
        for (int64_t i = 0; i < kRows; ++i) row[i] = rows.at(std::min(first + j + i, count - 1));
        for (int64_t unit = 0; unit * kSteps<Operand<T>> < D; unit += kW) {
          const Vector<A> operands = load(vector + unit);
          for (int64_t i = 0; i < kRows; ++i) {
            if constexpr (kFetch) ahead.fetch(std::min(first + j + i, count - 1), unit * kSteps<Operand<T>>);
            sums[i] =
                add_products<Operand<T>>(sums[i], load_operands<decltype(whole)::value>(row[i], unit, D), operands);
          }
        }
        for (int64_t i = 0; i < kRows; ++i) products[j + i] = sums[i];
      }
      store(out + first, lanes_of_each_added<A>(products) * factor);
    }
  });
}

// sum += weights[j] * (row j) over j < count, for kVectors vectors of columns, the last perhaps partial. Rows are
// summed pairwise, which rounds less than one long sum.
template <int kVectors, bool kWhole, bool kFinite, bool kFetch, typename T, typename A>
void add_columns(const A* weights, RowsAt<T> rows, int64_t count, int64_t columns, A* sum, RowsAt<T> ahead) {
  constexpr int64_t kW = kLanes<A>;
  Vector<A> sums[2][kVectors] = {};
  for (int64_t j = 0; j < count; ++j) {
    if constexpr (kFetch)
      for (int n = 0; n < kVectors; ++n) ahead.fetch(j, n * kW);
    if (weights[j] == 0) continue;
    const T* const row = rows.at(j);
    const Vector<A> weight = broadcast(weights[j]);
    const auto add = [&](Vector<A>(&to)[kVectors]) {
      for (int n = 0; n < kVectors; ++n) {
        Vector<A> value = kWhole ? load(row + n * kW) : load_some(row + n * kW, std::min(kW, columns - n * kW));
        if constexpr (kFinite) value = value - value == 0 ? value : Vector<A>{};
        to[n] = fma(value, weight, to[n]);
      }
    };
    j % 2 ? add(sums[1]) : add(sums[0]);
  }
  for (int n = 0; n < kVectors; ++n) store(sum + n * kW, load(sum + n * kW) + (sums[0][n] + sums[1][n]));
}

// sum += weights[j] * (row j) over j < count; `sum` is padded to whole vectors. A weight of 0 does not touch its row,
// which may hold NaN or Inf; with kFinite, non-finite values count as 0 everywhere.
template <bool kFinite = false, bool kFetch = false, typename T, typename A>
void add_rows(const A* weights, RowsAt<T> rows, int64_t count, int64_t D, A* sum, RowsAt<T> ahead = {}) {
  constexpr int64_t kW = kLanes<A>;
  constexpr int kVectors = 4;
  int64_t d = 0;
  const auto add = [&](auto vectors, auto whole) {
    add_columns<decltype(vectors)::value, decltype(whole)::value, kFinite, kFetch>(weights, rows, count, D - d, sum + d,
                                                                                   ahead);
    d += vectors * kW, rows.first += vectors * kW, ahead.first += vectors * kW;
  };
  while (D - d >= kVectors * kW) add(std::integral_constant<int, kVectors>(), std::true_type());
  while (d < D) add(std::integral_constant<int, 1>(), std::false_type());
}

// The queries of one key head: all heads of the group and all positions. Row r is position r % Lq of a head.
template <typename T, typename A>
class QueryRows {
 public:
  static constexpr int64_t kW = kLanes<A>;

  QueryRows(const AttentionKernelParams<T, A>& params, int64_t b, int64_t kv_head)
      : params_(params), b_(b), kv_head_(kv_head), group_(params.H / params.Hkv) {}

  int64_t count() const { return group_ * params_.Lq; }
  int64_t head(int64_t row) const { return kv_head_ * group_ + row / params_.Lq; }
  int64_t position(int64_t row) const { return row % params_.Lq; }
  // The keys of the row, but for those that bits block.
  Range visible(int64_t row) { return lowered(row).keys_of(position(row) % kQueryTile); }

  // Addresses of key `first` and its value, and how many of the `count` keys follow at the same stride.
  int64_t find_keys(int64_t first, int64_t count, RowsAt<T>* k, RowsAt<T>* v) const {
    const auto& p = params_;
    const int64_t k_stride = p.k.row_stride(), v_stride = p.v.row_stride();
    if (p.cells.data) {
      const int32_t* const cells = p.cells.at(b_, 0, 0) + first;
      *k = {p.k.at(0, kv_head_, 0), k_stride, cells}, *v = {p.v.at(0, kv_head_, 0), v_stride, cells};
      return count;
    }
    if (p.pages == nullptr) {
      *k = {p.k.at(b_, kv_head_, first), k_stride}, *v = {p.v.at(b_, kv_head_, first), v_stride};
      return count;
    }
    const int64_t page = p.pages[b_ * p.pages_stride + first / p.page_size], slot = first % p.page_size;
    *k = {p.k.at(page, kv_head_, slot), k_stride}, *v = {p.v.at(page, kv_head_, slot), v_stride};
    return std::min(count, p.page_size - slot);
  }

  // The first keys of the head after this one, or none.
  RowsAt<T> next_head() const {
    const auto& p = params_;
    if (p.pages != nullptr || (kv_head_ + 1 == p.Hkv && b_ + 1 == p.B)) return {};
    const bool last = kv_head_ + 1 == p.Hkv;
    const int64_t b = last ? b_ + 1 : b_, head = last ? 0 : kv_head_ + 1;
    if (p.cells.data) return {p.k.at(0, head, 0), p.k.row_stride(), p.cells.at(b, 0, 0)};
    return {p.k.at(b, head, 0), p.k.row_stride()};
  }

  // The masked scores of keys first .. first + count - 1, and -inf up to whole vectors. `ahead`: values to prefetch, or
  // none.
  void find_scores(int64_t row, const A* query, RowsAt<T> k, int64_t first, int64_t count, A* scores,
                   RowsAt<T> ahead = {}) {
    const auto& p = params_;
    if (ahead.first)
      multiply_rows<true>(k, count, p.D, query, p.scale, scores, ahead);
    else
      multiply_rows(k, count, p.D, query, p.scale, scores);
    if (p.softcap > 0) cap(count, p.softcap, scores);
    const int64_t h = head(row), i = position(row);
    const Lowered<A>& mask = lowered(row);
    const auto add = [&](const auto& addends) {
      for (int64_t j = 0; addends && j < count; j += kW) {
        const Vector<A> addend = j + kW <= count ? addends.at(0, first + j, kW) : addends.at(0, first + j, count - j);
        store(scores + j, added<A>(load(scores + j), addend));
      }
    };
    if (p.bias || p.keep.data || p.key_keep.data) add(Addends<T, A, false>(p, b_, h, i, false));
    if (p.bias || p.keep.data || p.distance_bias.data || mask.compares_ids)
      add(Addends<T, A, true>(p, b_, h, i, mask.compares_ids));
    const Range keys = mask.keys_of(i - mask.first_query);
    const int64_t begin = std::clamp<int64_t>(keys.begin - first, 0, count);
    const int64_t end = std::clamp<int64_t>(keys.end - first, 0, count);
    std::fill(scores, scores + begin, kBlocked<A>);
    std::fill(scores + end, scores + round_up(count, kW), kBlocked<A>);
  }

 private:
  // The mask of the block that the row's position is in, kept for the rows that follow.
  const Lowered<A>& lowered(int64_t row) {
    const int64_t first = position(row) / kQueryTile * kQueryTile;
    if (!lowered_ || lowered_->first_query != first) lowered_.emplace(params_, b_, first);
    return *lowered_;
  }

  const AttentionKernelParams<T, A>& params_;
  int64_t b_, kv_head_, group_;
  std::optional<Lowered<A>> lowered_;
};

}  // namespace
}  // namespace transformer_fast
