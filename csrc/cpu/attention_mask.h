// The mask of one block of queries: which keys it can need at all, and what to do to a tile of its scores.
#pragma once

#include "attention.h"

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

template <typename T, typename A>
class BlockMask {
 public:
  // Buffers for one tile: a number for each key, and one for each pair.
  static constexpr int64_t kKeyRoom = kKeyTile;
  static constexpr int64_t kPairRoom = kKeyTile * kQueryTile;

  BlockMask(const AttentionProblem<T, A>& problem, int64_t b, int64_t h, int64_t first_query, int64_t queries,
            A* key_addend, A* pair_addend)
      : problem_(problem), b_(b), h_(h), first_query_(first_query), queries_(queries),
        lanes_(round_up(queries, kLanes<A>)), key_addend_(key_addend), pair_addend_(pair_addend) {
    smallest_limit_ = problem.Lk;
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t limit = key_limit(problem, b, first_query + i);
      limits_[i] = limit;
      smallest_limit_ = std::min(smallest_limit_, limit);
      keys_ = std::max(keys_, limit);
    }
    for (int64_t i = queries; i < lanes_; ++i) limits_[i] = keys_;
  }

  // Keys at or past this are blocked for every query of the block.
  int64_t keys() const { return keys_; }

  // Prepares the tile of keys [first_key, first_key + keys); returns how many of them are left when those blocked for
  // every query are cut off the end.
  int64_t load(int64_t first_key, int64_t keys) {
    first_key_ = first_key;
    const auto& [keep, key_keep, bias] = std::tie(problem_.keep, problem_.key_keep, problem_.bias);
    has_pairs_ = (keep.data && keep.row_stride() != 0) || (bias && bias.row_stride() != 0);
    has_keys_ = key_keep.data || (keep.data && keep.row_stride() == 0) || (bias && bias.row_stride() == 0);
    if (has_keys_) load_keys(keys);
    if (has_pairs_) load_pairs(keys);
    while (keys > 0 && blocked_for_all(keys - 1)) --keys;
    return keys;
  }

  // Adds the bias to the scores of the tile and sets blocked ones to -inf, whatever they were.
  void apply(int64_t keys, A* scores) const {
    if (has_pairs_ && !has_keys_ && smallest_limit_ >= first_key_ + keys) return add_pairs(keys, scores);
    const int64_t first_row = has_keys_ || has_pairs_ ? 0 : std::max<int64_t>(0, smallest_limit_ - first_key_);
    for (int64_t lane = 0; lane < lanes_; lane += kLanes<A>) {
      IntegerVector<A> limits;
      std::memcpy(&limits, limits_ + lane, sizeof(limits));
      for (int64_t row = first_row; row < keys; ++row) {
        Vector<A> addend = broadcast(has_keys_ ? key_addend_[row] : A(0));
        if (has_pairs_) addend += widen(pair_addend_ + row * lanes_ + lane);
        const auto blocked = (addend == kBlocked<A>) | (limits <= static_cast<IntegerLane<A>>(first_key_ + row));
        A* score = scores + row * lanes_ + lane;
        narrow(score, blocked ? broadcast(kBlocked<A>) : widen(score) + addend);
      }
    }
  }

 private:
  // apply() where the pairs are all there is: a dense mask or bias alone.
  void add_pairs(int64_t keys, A* scores) const {
    for (int64_t n = 0; n < keys * lanes_; n += kLanes<A>) {
      const Vector<A> addend = widen(pair_addend_ + n);
      narrow(scores + n, addend == kBlocked<A> ? addend : widen(scores + n) + addend);
    }
  }

  void load_keys(int64_t keys) {
    const auto& [keep, key_keep, bias] = std::tie(problem_.keep, problem_.key_keep, problem_.bias);
    std::fill(key_addend_, key_addend_ + keys, A(0));
    if (bias && bias.row_stride() == 0) {
      const auto row = bias.from(b_, h_, 0, first_key_);
      for (int64_t j = 0; j < keys; ++j) key_addend_[j] = row.at(0, j);
    }
    for (const auto* mask : {&keep, &key_keep}) {
      if (!mask->data || mask->row_stride() != 0) continue;
      const bool* row = row_of(*mask, 0);
      for (int64_t j = 0; j < keys; ++j)
        if (!row[j * mask->column_stride()]) key_addend_[j] = kBlocked<A>;
    }
  }

  void load_pairs(int64_t keys) {
    const auto& keep = problem_.keep;
    const auto bias = problem_.bias ? problem_.bias.from(b_, h_, first_query_, first_key_) : problem_.bias;
    const bool* kept = keep.data && keep.row_stride() != 0 ? row_of(keep, first_query_) : nullptr;
    const bool added = bias && bias.row_stride() != 0;
    transpose_rows<A>(
        queries_, keys,
        [&](int64_t i, int64_t j, int64_t count) {
          Vector<A> row{};
          if (added) row = bias.load(i, j, count);
          if (!kept) return row;
          const bool* p = kept + i * keep.row_stride() + j * keep.column_stride();
          return load_kept(p, keep.column_stride(), count) ? row : broadcast(kBlocked<A>);
        },
        pair_addend_, lanes_);
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
    if (has_keys_ && key_addend_[row] == kBlocked<A>) return true;
    if (!has_pairs_) return false;
    const A* pairs = pair_addend_ + row * lanes_;
    return std::all_of(pairs, pairs + queries_, [](A a) { return a == kBlocked<A>; });
  }

  template <typename U>
  const U* row_of(const View<const U>& view, int64_t row) const {
    return view.at(b_, h_, row) + first_key_ * view.column_stride();
  }

  const AttentionProblem<T, A>& problem_;
  int64_t b_, h_, first_query_, queries_, lanes_;
  A* key_addend_;
  A* pair_addend_;
  int64_t first_key_ = 0, smallest_limit_, keys_ = 0;
  bool has_keys_ = false, has_pairs_ = false;
  IntegerLane<A> limits_[kQueryTile];
};

}  // namespace
}  // namespace transformer_fast
