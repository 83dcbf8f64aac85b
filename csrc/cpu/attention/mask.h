// The three kinds of mask that a kernel knows: intervals (lowered.h), bits and bias. The masking of a tile of scores.
#pragma once

#include "../simd/operands.h"
#include "lowered.h"
#include "tile.h"

namespace transformer_fast {
namespace {

typedef int8_t BytesOfDoubles __attribute__((vector_size(kLanes<double>)));
template <typename A>
using BytesOf = std::conditional_t<std::is_same_v<A, double>, BytesOfDoubles, ByteVector>;  // one per lane of A

// Memory for a tile: one number per key; with a softcap one number per (key, query), and in a backward the slope of the
// cap.
template <typename A>
struct MaskBuffers {
  A *key_addend = nullptr, *pair_addend = nullptr, *slopes = nullptr;
};

// Bits and bias of the queries of a block: what is added to scores, -inf where a key is blocked. kDiffer chooses the
// parts that differ between queries, or those that are the same for all.
template <typename T, typename A, bool kDiffer>
struct Addends {
  Bias<T, A> bias;
  View<const bool> keep, key_keep;
  const A* distances = nullptr;  // by distance, of the first query, indexed by the key
  const int32_t *query_ids = nullptr, *key_ids = nullptr;

  Addends(const AttentionKernelParams<T, A>& p, int64_t b, int64_t h, int64_t i, bool compares_ids) {
    if (p.bias && (p.bias.row_stride() != 0) == kDiffer) bias = p.bias.from(b, h, i, 0);
    if (p.keep.data && (p.keep.row_stride() != 0) == kDiffer) keep = p.keep, keep.data = p.keep.at(b, h, i);
    if (!kDiffer && p.key_keep.data) key_keep = p.key_keep, key_keep.data = p.key_keep.at(b, h, 0);
    if (kDiffer && p.distance_bias.data) distances = p.distance_bias.at(b, h, 0) - own_key(p, b, i);
    if (kDiffer && compares_ids) query_ids = p.query_ids.at(b, 0, i), key_ids = p.key_ids.at(b, 0, 0);
  }

  explicit operator bool() const { return bias || keep.data || key_keep.data || distances || key_ids; }

  // Addends of keys j .. j + count - 1 for the i-th of the queries.
  [[gnu::always_inline]] Vector<A> at(int64_t i, int64_t j, int64_t count) const {
    Vector<A> row{};
    if (bias) row = load_bias(bias, i, j, count);
    if (kDiffer && distances) row += load_some(distances + j - i, count);
    if (kDiffer && key_ids)
      row = load_ids(key_ids + j, count) == IntegerLane<A>{query_ids[i]} ? row : broadcast(kBlocked<A>);
    if (keep.data) row = load_kept(keep.at(0, 0, i), keep.column_stride(), j, count) ? row : broadcast(kBlocked<A>);
    if (!kDiffer && key_keep.data)
      row = load_kept(key_keep.data, key_keep.column_stride(), j, count) ? row : broadcast(kBlocked<A>);
    return row;
  }

  static IntegerVector<A> load_ids(const int32_t* ids, int64_t count) {
    IntegerVector<A> vector{};
    for (int64_t n = 0; n < count; ++n) vector[n] = ids[n];
    return vector;
  }

  [[gnu::always_inline]] static auto load_kept(const bool* row, int64_t stride, int64_t j, int64_t count) {
    BytesOf<A> bytes{};
    if (stride == 1)
      std::memcpy(&bytes, row + j, count);
    else
      for (int64_t n = 0; n < count; ++n) bytes[n] = row[(j + n) * stride];
    return __builtin_convertvector(bytes, IntegerVector<A>) != 0;
  }
};

template <typename A>
inline Vector<A> added(Vector<A> scores, Vector<A> addend) {
  return addend == kBlocked<A> ? addend : scores + addend;
}

template <typename T, typename A>
class BlockMask {
 public:
  BlockMask(const AttentionKernelParams<T, A>& params, int64_t b, int64_t h, int64_t first_query,
            const MaskBuffers<A>& buffers)
      : params_(params), lowered_(params, b, first_query), lanes_(lowered_.lanes), buffers_(buffers),
        of_keys_(params, b, h, first_query, false), of_pairs_(params, b, h, first_query, lowered_.compares_ids),
        has_keys_(of_keys_), has_pairs_(of_pairs_) {}

  // The keys of the block's queries, from a multiple of kKeyStep on: the range of its tiles.
  Range keys() const { return lowered_.hull.empty() ? Range{} : lowered_.hull.from_multiple(kKeyStep); }

  // Prepares the tile of keys [first_key, first_key + keys) and the memory of its scores, (keys, lanes). Returns the
  // number of keys without trailing keys that are blocked for all queries.
  int64_t prepare(int64_t first_key, int64_t keys, A* scores) {
    first_key_ = first_key;
    for (int64_t j = 0; has_keys_ && j < keys; j += kLanes<A>)
      store(buffers_.key_addend + j, of_keys_.at(0, first_key + j, std::min(kLanes<A>, keys - j)));
    pairs_ = buffers_.pair_addend && params_.softcap > 0 ? buffers_.pair_addend : scores;
    if (has_pairs_) load_pairs(keys, pairs_);
    while (keys > 0 && blocked_for_all(keys - 1)) --keys;
    return keys;
  }

  // Masks the scores of a prepared tile: scaled products plus bias, -inf where blocked, even if the product is NaN.
  template <typename E>
  void find_scores(int64_t keys, Matrix<E> key_rows, Rows<E> queries, A* scores) const {
    if (has_pairs_ && params_.softcap == 0) {
      multiply(keys, lanes_, params_.D, key_rows, queries, Masked<A>{params_.scale}, scores, lanes_);
    } else {
      multiply(keys, lanes_, params_.D, key_rows, queries, Scaled<A>{params_.scale}, scores, lanes_);
      if (params_.softcap > 0) cap(keys * lanes_, params_.softcap, scores, buffers_.slopes);
      if (has_pairs_) add_pairs(keys * lanes_, scores);
    }
    apply_keys_and_bounds(keys, scores);
  }

 private:
  // Applies the parts of mask and bias that depend on the key alone, and the bounds of each query's keys.
  void apply_keys_and_bounds(int64_t keys, A* scores) const {
    const int64_t first_row = has_keys_ ? 0 : std::max<int64_t>(0, lowered_.shared.end - first_key_);
    const int64_t begun =
        std::min(keys, lowered_.shared.begin - first_key_);  // from this row on, the range of each query has begun
    if (first_row >= keys && begun <= 0) return;
    for (int64_t lane = 0; lane < lanes_; lane += kLanes<A>) {
      IntegerVector<A> begins, ends;
      std::memcpy(&begins, lowered_.begins + lane, sizeof(begins));
      std::memcpy(&ends, lowered_.ends + lane, sizeof(ends));
      for (int64_t row = first_row; row < keys; ++row) {
        const Vector<A> addend = broadcast(has_keys_ ? buffers_.key_addend[row] : A(0));
        const auto blocked = (addend == kBlocked<A>) | (ends <= static_cast<IntegerLane<A>>(first_key_ + row));
        A* score = scores + row * lanes_ + lane;
        store(score, blocked ? broadcast(kBlocked<A>) : load(score) + addend);
      }
      for (int64_t row = 0; row < begun; ++row) {
        A* score = scores + row * lanes_ + lane;
        const auto blocked = begins > static_cast<IntegerLane<A>>(first_key_ + row);
        store(score, blocked ? broadcast(kBlocked<A>) : load(score));
      }
    }
  }

  void load_pairs(int64_t keys, A* scores) const {
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (const auto& [own, pairs] = std::tie(of_pairs_.bias.own, of_pairs_);
          own.column_stride() == 1 && !pairs.keep.data && !pairs.distances && !pairs.key_ids)
        return load_two_keys_a_lane(own.moved(first_key_), keys, scores);
    const auto addends = of_pairs_;
    transpose_rows<A>(
        lowered_.queries, keys,
        [&, first = first_key_](int64_t i, int64_t j, int64_t count) { return addends.at(i, first + j, count); },
        [&](int64_t j, int64_t i, Vector<A> row) { store(scores + j * lanes_ + i, row); });
  }

  // Variant for a bfloat16 bias, with half the transpositions.
  void load_two_keys_a_lane(View<const T> bias, int64_t keys, A* scores) const {
    fetch_rows(bias.data, bias.row_stride(), lowered_.queries, keys);
    transpose_rows<A>(
        lowered_.queries, (keys + 1) / 2,
        [&](int64_t i, int64_t pair, int64_t count) {
          return load_bits(bias.data + i * bias.row_stride() + 2 * pair, std::min(2 * count, keys - 2 * pair));
        },
        [&](int64_t pair, int64_t i, Vector<A> bits) {
          const auto words = reinterpret_cast<IntegerVector<A>>(bits);
          A* row = scores + 2 * pair * lanes_ + i;
          store(row, reinterpret_cast<Vector<A>>(words << 16));
          if (2 * pair + 1 < keys) store(row + lanes_, reinterpret_cast<Vector<A>>(words & ~0xffff));
        });
  }

  void add_pairs(int64_t count, A* scores) const {
    for (int64_t n = 0; n < count; n += kLanes<A>) store(scores + n, added<A>(load(scores + n), load(pairs_ + n)));
  }

  bool blocked_for_all(int64_t row) const {
    if (has_keys_ && buffers_.key_addend[row] == kBlocked<A>) return true;
    if (!has_pairs_) return false;
    const A* pairs = pairs_ + row * lanes_;
    return std::all_of(pairs, pairs + lowered_.queries, [](A a) { return a == kBlocked<A>; });
  }

  const AttentionKernelParams<T, A>& params_;
  Lowered<A> lowered_;
  int64_t lanes_, first_key_ = 0;
  MaskBuffers<A> buffers_;
  A* pairs_ = nullptr;  // of the current tile: its scores, or a buffer if the scores are capped first
  Addends<T, A, false> of_keys_;
  Addends<T, A, true> of_pairs_;
  bool has_keys_, has_pairs_;
};

}  // namespace
}  // namespace transformer_fast
