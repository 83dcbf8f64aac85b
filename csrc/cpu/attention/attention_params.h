// Parameters of the masked attention kernels on the CPU. T is the element type of the tensors, A the type of the
// arithmetic.
#pragma once

#include "../element.h"

#include <algorithm>
#include <limits>

namespace transformer_fast {

constexpr int64_t kQueryTile = 64;
constexpr int64_t kKeyTile = 128;
constexpr int64_t kKeyStep = 32;  // tiles of keys start at multiples of this number: the keys of four Philox calls
constexpr int64_t kNoDiagonal = int64_t{1} << 48;  // index that is outside of every mask
constexpr int64_t kMaxSavedScores = 1 << 26;       // limit of scores kept in memory
constexpr int64_t kFewQueries = 2;                 // up to this many, row by row (few_queries.h), without tiles

// A 4-D tensor (batch, head, row, column); a size of 1 has stride 0.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};

  T* at(int64_t b, int64_t h, int64_t row) const { return data + b * stride[0] + h * stride[1] + row * stride[2]; }
  int64_t row_stride() const { return stride[2]; }
  int64_t column_stride() const { return stride[3]; }
  // The view from the next column on.
  View moved(int64_t column) const {
    View view = *this;
    view.data += column;
    return view;
  }
};

// An additive bias, in the dtype of the arithmetic or of the tensors; the latter is converted on reading.
template <typename T, typename A>
struct Bias {
  View<const A> wide;
  View<const T> own;

  explicit operator bool() const { return wide.data != nullptr || own.data != nullptr; }
  int64_t row_stride() const { return own.data ? own.row_stride() : wide.row_stride(); }

  // The view from element (b, h, i, j) on.
  Bias from(int64_t b, int64_t h, int64_t i, int64_t j) const {
    Bias moved = *this;
    if (own.data) moved.own.data = own.at(b, h, i) + j * own.column_stride();
    if (wide.data) moved.wide.data = wide.at(b, h, i) + j * wide.column_stride();
    return moved;
  }

  A at(int64_t i, int64_t j) const {
    return own.data ? static_cast<A>(own.data[i * own.row_stride() + j * own.column_stride()])
                    : wide.data[i * wide.row_stride() + j * wide.column_stride()];
  }
};

// Indices begin .. end - 1.
struct Range {
  int64_t begin = 0, end = 0;

  bool empty() const { return begin >= end; }
  Range intersection(Range other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
  // The smallest range that holds both.
  Range hull(Range other) const {
    if (empty() || other.empty()) return empty() ? other : *this;
    return {std::min(begin, other.begin), std::max(end, other.end)};
  }
  // The range extended to begin at a multiple of `step`.
  Range from_multiple(int64_t step) const { return {begin / step * step, end}; }
};

// A call. T is the dtype of the tensors, A the dtype of the arithmetic.
template <typename T, typename A>
struct AttentionKernelParams {
  int64_t B = 0, H = 0, Hkv = 0, Lq = 0, Lk = 0, D = 0;
  View<const T> q, k, v;
  View<const bool> keep, key_keep;
  Bias<T, A> bias;
  View<const A> distance_bias;                        // (B|1, H|1, 1, distances), its data at distance 0
  View<const int32_t> query_ids, key_ids;             // (B|1, 1, L, 1); both or neither
  const A* sinks = nullptr;                           // (H,): per head, the score of one additional key without a value
  View<const int32_t> lengths;                        // (B, 1, Lq|1, 1)
  int64_t lower = -kNoDiagonal, upper = kNoDiagonal;  // query i sees keys from i + lower to i + upper
  bool bottom_right = false;                          // bottom-right alignment: the last query is at the last key
  A scale = 1, softcap = 0;                           // 0: none
  DropoutParams dropout = {0, 0};
  bool zero_empty_rows = false;
  int64_t first_batch = 0;  // first batch index, for dropout
  // A paged cache: key j of batch entry b is row j % page_size of page pages[b * pages_stride + j / page_size], and the
  // first stride of k and v is that of a page. Forward of few queries only.
  const int32_t* pages = nullptr;
  int64_t pages_stride = 0, page_size = 0;
  // Or (B, 1, 1, Lk): row offset of key j and value j of batch entry b, from the first row of entry 0. Same
  // restriction.
  View<const int32_t> cells;

  // Whether a query without a visible key has equal weights. With a sink such a query gives 0, even if the sink is -inf.
  bool has_uniform_rows() const { return !zero_empty_rows && !sinks; }
};

// Number of distances between queries and keys, ordered from (last query, first key) on.
template <typename T, typename A>
int64_t distances(const AttentionKernelParams<T, A>& params) {
  return std::max<int64_t>(0, params.Lq + params.Lk - 1);
}

// The score of the sink of a head; -inf for none.
template <typename T, typename A>
A sink_of(const AttentionKernelParams<T, A>& params, int64_t h) {
  return params.sinks ? params.sinks[h] : -std::numeric_limits<A>::infinity();
}

// Weights that a forward keeps for its backward, by tiles: per block of queries and per key, the lanes of the block. A
// weight is multiplied by a factor per tile and query. Or nothing.
template <typename T, typename A>
struct SavedProbs {
  T* weights = nullptr;  // (B, H, lanes, Lk), `lanes` being Lq in whole vectors
  A* factors = nullptr;  // (B, H, key tiles, lanes)
  int64_t H = 0, lanes = 0, Lk = 0;

  explicit operator bool() const { return weights != nullptr; }

  // The lanes of `key` (`block_lanes` of them), followed by the lanes of the next key.
  T* at(int64_t b, int64_t h, int64_t first_query, int64_t block_lanes, int64_t key) const {
    return weights + ((b * H + h) * lanes + first_query) * Lk + key * block_lanes;
  }

  A* factors_at(int64_t b, int64_t h, int64_t first_query, int64_t key) const {
    return factors + ((b * H + h) * tiles(Lk) + key / kKeyTile) * lanes + first_query;
  }

  static int64_t tiles(int64_t Lk) { return (Lk + kKeyTile - 1) / kKeyTile; }
};

// One struct per padded batch, or per sequence of a packed batch. Statistics are (batch, head, query).
template <typename T, typename A>
struct AttentionForward {
  AttentionKernelParams<T, A> params;
  View<T> out;
  View<A> logsumexp;
  SavedProbs<T, A> saved_probs = {};  // with a bias, no dropout and no other parts; not for few queries
};

template <typename T, typename A>
struct AttentionBackward {
  AttentionKernelParams<T, A> params;
  View<const T> grad_out, out;
  View<const A> logsumexp, grad_logsumexp;
  View<T> grad_q, grad_k, grad_v;
  View<T> grad_scores = {};  // (B, H, Lq, Lk), or nothing; not with a softcap
  SavedProbs<T, A> saved_probs = {};
  View<A> grad_distance_bias = {};  // like the distance bias, data at distance 0; gradients are added to it
};

// The gradient of an additive bias: of the same sizes, (B | 1, H | 1, Lq | 1, Lk | 1), contiguous.
template <typename A>
struct BiasGradientResult {
  A* data;
  int64_t sizes[4];
};

}  // namespace transformer_fast
