// Attention of one or two queries over many keys, as decoding asks for it. A tile of queries would leave most lanes
// idle, so each query is taken by itself, with vectors along the keys in the softmax and along D in the products.
#pragma once

#include "attention.h"

namespace transformer_fast {
namespace {

template <typename T, typename A>
bool is_decoding(const AttentionProblem<T, A>& problem) {
  constexpr int64_t kFewQueries = 2;
  return problem.Lq <= kFewQueries && problem.dropout_p == 0;
}

template <typename T, typename A>
class DecodedQuery {
 public:
  static constexpr int64_t kW = kLanes<A>;

  DecodedQuery(const AttentionProblem<T, A>& problem, int64_t b, int64_t h, int64_t i)
      : problem_(problem), b_(b), h_(h), i_(i), keys_(problem.Lk) {
    if (problem.lengths.data) keys_ = std::min<int64_t>(keys_, *problem.lengths.at(b, 0, i));
    if (problem.causal) keys_ = std::min(keys_, std::max<int64_t>(0, i + 1 + problem.causal_offset));
    const int64_t sizes[] = {round_up(problem.Lk, kW), round_up(problem.D, kW)};
    A* buffers[2];
    Workspace<A>::of_this_thread().divide(sizes, buffers);
    weights_ = buffers[0], query_ = buffers[1];
  }

  // Writes the output row; returns the logsumexp.
  A run(T* out) {
    const int64_t kv_head = h_ / (problem_.H / problem_.Hkv);
    find_scores(problem_.k.at(b_, kv_head, 0));
    apply_mask();
    Vector<A> maxima = broadcast(kBlocked<A>);
    for (int64_t j = 0; j < keys_; j += kW) maxima = widen(weights_ + j) > maxima ? widen(weights_ + j) : maxima;
    A maximum = kBlocked<A>;
    for (int64_t lane = 0; lane < kW; ++lane) maximum = std::max(maximum, static_cast<A>(maxima[lane]));
    const A origin = maximum == kBlocked<A> ? A(0) : maximum;
    Vector<A> totals{};
    for (int64_t j = 0; j < keys_; j += kW) {
      const Vector<A> weight = exponential(widen(weights_ + j) - origin);
      totals += weight;
      narrow(weights_ + j, weight);
    }
    const A total = lane_sum<A>(totals);
    const T* v = problem_.v.at(b_, kv_head, 0);
    if (total != 0)
      write_sum(v, 1 / total, out);
    else if (problem_.zero_empty_rows || problem_.Lk == 0)
      std::fill(out, out + problem_.D, T(0));
    else
      write_mean(v, out);
    return total == 0 ? kBlocked<A> : maximum + std::log(total);
  }

 private:
  // Scores of the keys, and -inf up to whole vectors.
  void find_scores(const T* k) {
    const int64_t D = problem_.D, stride = problem_.k.row_stride();
    const T* q = problem_.q.at(b_, h_, i_);
    for (int64_t d = 0; d < D; d += kW)
      narrow(query_ + d, load_some(q + d, std::min(kW, D - d)) * problem_.scale);
    for (int64_t first = 0; first < keys_; first += kW) {
      const int64_t last = std::min(kW, keys_ - first) - 1;
      Vector<A> products[kW] = {};
      for (int64_t d = 0; d < D; d += kW)
        for (int64_t j = 0; j < kW; ++j)
          products[j] +=
              load_some(k + (first + std::min(j, last)) * stride + d, std::min(kW, D - d)) * widen(query_ + d);
      transpose<A>(products);
      Vector<A> scores = products[0];
      for (int64_t j = 1; j < kW; ++j) scores += products[j];
      narrow(weights_ + first, scores);
    }
    std::fill(weights_ + keys_, weights_ + round_up(keys_, kW), kBlocked<A>);
  }

  void apply_mask() {
    const auto& bias = problem_.bias;
    if (bias.data) {
      const A* row = bias.at(b_, h_, i_);
      for (int64_t j = 0; j < keys_; ++j) {
        const A added = row[j * bias.column_stride()];
        weights_[j] = added == kBlocked<A> ? kBlocked<A> : weights_[j] + added;
      }
    }
    for (const auto* mask : {&problem_.keep, &problem_.key_keep}) {
      if (!mask->data) continue;
      const bool* row = mask->at(b_, h_, i_);
      for (int64_t j = 0; j < keys_; ++j)
        if (!row[j * mask->column_stride()]) weights_[j] = kBlocked<A>;
    }
  }

  // A weight of 0 does not touch its value, which may be NaN or Inf.
  void write_sum(const T* v, A factor, T* out) const {
    constexpr int64_t kVectors = 4;
    const int64_t stride = problem_.v.row_stride();
    for (int64_t d = 0; d < problem_.D; d += kVectors * kW) {
      const int64_t columns = std::min(kVectors * kW, problem_.D - d);
      Vector<A> sums[kVectors] = {};
      for (int64_t j = 0; j < keys_; ++j) {
        if (weights_[j] == 0) continue;
        const T* row = v + j * stride + d;
        if (columns == kVectors * kW)
          for (int64_t n = 0; n < kVectors; ++n) sums[n] += weights_[j] * widen(row + n * kW);
        else
          for (int64_t n = 0; n * kW < columns; ++n)
            sums[n] += weights_[j] * load_some(row + n * kW, std::min(kW, columns - n * kW));
      }
      for (int64_t n = 0; n * kW < columns; ++n)
        store_some(out + d + n * kW, sums[n] * factor, std::min(kW, columns - n * kW));
    }
  }

  // No key is allowed: all weigh the same, and a NaN or Inf value, blocked like all others, counts as 0.
  void write_mean(const T* v, T* out) const {
    for (int64_t d = 0; d < problem_.D; ++d) {
      A sum = 0;
      for (int64_t j = 0; j < problem_.Lk; ++j) {
        const A value = static_cast<A>(v[j * problem_.v.row_stride() + d]);
        sum += std::isfinite(value) ? value : A(0);
      }
      out[d] = static_cast<T>(sum / static_cast<A>(problem_.Lk));
    }
  }

  const AttentionProblem<T, A>& problem_;
  int64_t b_, h_, i_, keys_;
  A *weights_, *query_;
};

template <typename T, typename A>
void decode(const AttentionProblem<T, A>& problem, const View<T>& out, A* logsumexp) {
  const int64_t H = problem.H, Lq = problem.Lq, rows = problem.B * H * Lq;
  constexpr double kBoundByMemory = 4;  // a multiplication takes so much longer than in a tile
  for_tasks(rows, kBoundByMemory * double(rows) * double(problem.Lk * problem.D), [&](int64_t row) {
    const int64_t b = row / (H * Lq), h = row / Lq % H, i = row % Lq;
    logsumexp[row] = DecodedQuery<T, A>(problem, b, h, i).run(out.at(b, h, i));
  });
}

}  // namespace
}  // namespace transformer_fast
