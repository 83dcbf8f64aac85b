// The mask of one block of queries: the range of keys that the block needs, and the masking of a tile of scores.
#pragma once

#include "../simd/operands.h"
#include "tile.h"

namespace transformer_fast {
namespace {

template <typename A>
struct BytesOf;
template <>
struct BytesOf<float> {
  typedef uint8_t Type __attribute__((vector_size(kVectorBytes / 4)));
};
template <>
struct BytesOf<double> {
  typedef uint8_t Type __attribute__((vector_size(kVectorBytes / 8)));
};

// Memory for a tile: one number per key; with a softcap one number per (key, query), and in a backward the slope of the
// cap.
template <typename A>
struct MaskBuffers {
  A *key_addend = nullptr, *pair_addend = nullptr, *slopes = nullptr;
};

template <typename T, typename A>
class BlockMask {
 public:
  BlockMask(const AttentionKernelParams<T, A>& params, int64_t b, int64_t h, int64_t first_query, int64_t queries,
            const MaskBuffers<A>& buffers)
      : params_(params), b_(b), h_(h), first_query_(first_query), queries_(queries),
        lanes_(round_up(queries, kLanes<A>)), buffers_(buffers) {
    // Lanes past the last query repeat the last query. The begins rise from query to query; with one length for all
    // queries, the ends rise by one.
    const auto visible_to = [&](int64_t i) { return visible_keys(params, b, first_query + std::min(i, queries - 1)); };
    const Range first = visible_to(0), last = visible_to(queries - 1);
    int64_t shortest = first.end, longest = last.end;
    if (params.lengths.stride[2] == 0 && (shortest > 0 || longest == 0)) {
      for (int64_t i = 0; i < lanes_; ++i) ends_[i] = std::min(shortest + i, longest);
    } else {
      for (int64_t i = 0; i < lanes_; ++i) {
        const int64_t end = visible_to(i).end;
        ends_[i] = end;
        longest = std::max(longest, end), shortest = std::min(shortest, end);
      }
    }
    visible_ = {first.begin, longest}, visible_to_all_ = {last.begin, shortest};
    visible_ = visible_.empty() ? Range{} : visible_.from_multiple(kKeyStep);
    for (int64_t i = 0; visible_to_all_.begin > 0 && i < lanes_; ++i) begins_[i] = visible_to(i).begin;
    if (params.query_ids.data) query_ids_ = Ids(params.query_ids.at(b, 0, first_query), queries);
  }

  // The keys visible to any query of the block by lengths and diagonals, from a multiple of kKeyStep on: the range of
  // its tiles.
  Range keys() const { return visible_; }

  // Prepares the tile of keys [first_key, first_key + keys) and the memory of its scores, (keys, lanes). Returns the
  // number of keys without trailing keys that are blocked for all queries.
  int64_t prepare(int64_t first_key, int64_t keys, A* scores) {
    first_key_ = first_key;
    const auto& [keep, key_keep, bias] = std::tie(params_.keep, params_.key_keep, params_.bias);
    checks_documents_ = false, strange_ = false;
    if (params_.key_ids.data) {
      const Ids key_ids(params_.key_ids.at(b_, 0, first_key), keys);
      strange_ = key_ids.last < query_ids_.first || query_ids_.last < key_ids.first;
      if (strange_) return 0;
      checks_documents_ = key_ids.first != query_ids_.last || query_ids_.first != key_ids.last;
    }
    has_pairs_ = (keep.data && keep.row_stride() != 0) || (bias && bias.row_stride() != 0) || checks_documents_ ||
                 params_.distance_bias.data;
    has_keys_ = key_keep.data || (keep.data && keep.row_stride() == 0) || (bias && bias.row_stride() == 0);
    if (has_keys_) load_keys(keys);
    pairs_ = buffers_.pair_addend && params_.softcap > 0 ? buffers_.pair_addend : scores;
    if (has_pairs_) load_pairs(keys, pairs_);
    while (keys > 0 && blocked_for_all(keys - 1)) --keys;
    return keys;
  }

  // Masks the scores of a prepared tile: scaled products plus bias, -inf where blocked, even if the product is NaN.
  template <typename E>
  void find_scores(int64_t keys, Matrix<E> key_rows, Rows<E> queries, A* scores) const {
    if (strange_) {
      std::fill(scores, scores + keys * lanes_, kBlocked<A>);
      if (params_.softcap > 0 && buffers_.slopes) std::fill(buffers_.slopes, buffers_.slopes + keys * lanes_, A(0));
      return;
    }
    if (has_pairs_ && params_.softcap == 0) {
      multiply(keys, lanes_, params_.D, key_rows, queries, Masked<A>{params_.scale}, scores, lanes_);
    } else {
      multiply(keys, lanes_, params_.D, key_rows, queries, Scaled<A>{params_.scale}, scores, lanes_);
      if (params_.softcap > 0) cap(keys * lanes_, params_.softcap, scores, buffers_.slopes);
      if (has_pairs_) add_pairs(keys * lanes_, scores);
    }
    apply_keys_and_bounds(keys, scores);
  }

  // True if prepare() wrote addends, one per (key, query), to the memory of the scores; else it wrote nothing.
  bool has_pairs() const { return has_pairs_; }

  // Applies the parts of mask and bias that depend on the key alone, and the bounds of each query's keys.
  void apply_keys_and_bounds(int64_t keys, A* scores) const {
    const int64_t first_row = has_keys_ ? 0 : std::max<int64_t>(0, visible_to_all_.end - first_key_);
    const int64_t begun =
        std::min(keys, visible_to_all_.begin - first_key_);  // from this row on, the range of each query has begun
    if (first_row >= keys && begun <= 0) return;
    for (int64_t lane = 0; lane < lanes_; lane += kLanes<A>) {
      IntegerVector<A> begins, ends;
      std::memcpy(&begins, begins_ + lane, sizeof(begins));
      std::memcpy(&ends, ends_ + lane, sizeof(ends));
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

 private:
  // The smallest and the largest id.
  struct Ids {
    int32_t first = 0, last = 0;

    Ids() = default;
    Ids(const int32_t* ids, int64_t count) {
      const auto [smallest, largest] = std::minmax_element(ids, ids + count);
      first = *smallest, last = *largest;
    }
  };

  void load_keys(int64_t keys) {
    const auto& [keep, key_keep, bias] = std::tie(params_.keep, params_.key_keep, params_.bias);
    A* const addend = buffers_.key_addend;
    std::fill(addend, addend + keys, A(0));
    if (bias && bias.row_stride() == 0) {
      const auto row = bias.from(b_, h_, 0, first_key_);
      for (int64_t j = 0; j < keys; ++j) addend[j] = row.at(0, j);
    }
    for (const auto* mask : {&keep, &key_keep}) {
      if (!mask->data || mask->row_stride() != 0) continue;
      const bool* row = row_of(*mask, 0);
      for (int64_t j = 0; j < keys; ++j)
        if (!row[j * mask->column_stride()]) addend[j] = kBlocked<A>;
    }
  }

  // Loads the addends of parts with a value per (key, query).
  void load_pairs(int64_t keys, A* scores) const {
    const auto& keep = params_.keep;
    const auto bias = params_.bias ? params_.bias.from(b_, h_, first_query_, first_key_) : params_.bias;
    const bool* kept = keep.data && keep.row_stride() != 0 ? row_of(keep, first_query_) : nullptr;
    const bool added = bias && bias.row_stride() != 0;
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (!kept && !checks_documents_ && !params_.distance_bias.data && bias.own.data && bias.own.column_stride() == 1)
        return load_two_keys_a_lane(bias.own, keys, scores);
    const int32_t* const key_ids = checks_documents_ ? params_.key_ids.at(b_, 0, first_key_) : nullptr;
    const A* const distances = distance_row(params_, b_, h_, first_query_);
    transpose_rows<A>(
        queries_, keys,
        [&](int64_t i, int64_t j, int64_t count) {
          Vector<A> row{};
          if (added) row = load_bias(bias, i, j, count);
          if (distances) row += load_some(distances + first_key_ + j - i, count);
          if (key_ids) row = load_ids(key_ids + j, count) == own_id(i) ? row : broadcast(kBlocked<A>);
          if (!kept) return row;
          const bool* p = kept + i * keep.row_stride() + j * keep.column_stride();
          return load_kept(p, keep.column_stride(), count) ? row : broadcast(kBlocked<A>);
        },
        [&](int64_t j, int64_t i, Vector<A> row) { store(scores + j * lanes_ + i, row); });
  }

  // Variant for a bfloat16 bias, with half the transpositions.
  void load_two_keys_a_lane(View<const T> bias, int64_t keys, A* scores) const {
    fetch_rows(bias.data, bias.row_stride(), queries_, keys);
    transpose_rows<A>(
        queries_, (keys + 1) / 2,
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
    for (int64_t n = 0; n < count; n += kLanes<A>) {
      const Vector<A> addend = load(pairs_ + n);
      store(scores + n, addend == kBlocked<A> ? addend : load(scores + n) + addend);
    }
  }

  IntegerLane<A> own_id(int64_t i) const { return *params_.query_ids.at(b_, 0, first_query_ + i); }

  static IntegerVector<A> load_ids(const int32_t* ids, int64_t count) {
    IntegerVector<A> vector{};
    for (int64_t n = 0; n < count; ++n) vector[n] = ids[n];
    return vector;
  }

  static auto load_kept(const bool* p, int64_t stride, int64_t count) {
    typename BytesOf<A>::Type bytes{};
    if (stride == 1)
      std::memcpy(&bytes, p, count);
    else
      for (int64_t i = 0; i < count; ++i) bytes[i] = p[i * stride];
    return __builtin_convertvector(bytes, IntegerVector<A>) != 0;
  }

  bool blocked_for_all(int64_t row) const {
    if (has_keys_ && buffers_.key_addend[row] == kBlocked<A>) return true;
    if (!has_pairs_) return false;
    const A* pairs = pairs_ + row * lanes_;
    return std::all_of(pairs, pairs + queries_, [](A a) { return a == kBlocked<A>; });
  }

  template <typename U>
  const U* row_of(const View<const U>& view, int64_t row) const {
    return view.at(b_, h_, row) + first_key_ * view.column_stride();
  }

  const AttentionKernelParams<T, A>& params_;
  int64_t b_, h_, first_query_, queries_, lanes_;
  MaskBuffers<A> buffers_;
  A* pairs_ = nullptr;  // of the current tile: its scores, or a buffer if the scores are capped first
  int64_t first_key_ = 0;
  Range visible_, visible_to_all_;
  Ids query_ids_;
  // Flags of the current tile: addends per key, addends per pair, several documents, no document of the queries.
  bool has_keys_ = false, has_pairs_ = false, checks_documents_ = false, strange_ = false;
  IntegerLane<A> begins_[kQueryTile], ends_[kQueryTile];
};

}  // namespace
}  // namespace transformer_fast
