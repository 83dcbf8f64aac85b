// Weights and gradients of scores for the backward kernels, a tile of one block of queries at a time.
#pragma once

#include "../simd/operands.h"
#include "mask.h"
#include "saved_tile.h"

namespace transformer_fast {
namespace {

// A logsumexp this far from 0 has lost digits, which gives all weights of its row the same relative error. Causes:
// ALiBi far from every key, or a bias of -1e9 on a whole row, where even the number of keys is lost. The forward of few
// queries sums scores in another order than the backward: from 8 on, half a unit in the last place of the logsumexp is
// four units in the last place of a weight.
template <typename A>
bool is_large(A logsumexp, bool few_queries) {
  return std::abs(logsumexp) > (few_queries ? 8 : 64) && std::isfinite(logsumexp);
}

// A logsumexp as the sum of two numbers, of which the first is exact.
template <typename A>
struct TwoPartLogsumexp {
  A maximum = kBlocked<A>, sum = 0;

  // The sink's part; -inf without a sink.
  explicit TwoPartLogsumexp(A sink) { add(&sink, 1, 1); }

  void add(const A* scores, int64_t count, int64_t stride) {
    const A before = maximum;
    for (int64_t j = 0; j < count; ++j) maximum = std::max(maximum, scores[j * stride]);
    if (maximum == kBlocked<A>) return;
    sum *= std::exp(before - maximum);
    for (int64_t j = 0; j < count; ++j) sum += std::exp(scores[j * stride] - maximum);
  }

  A rest() const { return sum > 0 ? std::log(sum) : A(0); }
};

template <typename T>
Accumulate<T> dot(const T* a, const T* b, int64_t D) {
  using A = Accumulate<T>;
  Vector<A> products{};
  for (int64_t d = 0; d < D; d += kLanes<A>) {
    const int64_t count = std::min(kLanes<A>, D - d);
    products = fma(load_some(a + d, count), load_some(b + d, count), products);
  }
  return lane_sum<A>(products);
}

template <typename T, typename A>
class ScoreGradients {
 public:
  static constexpr int64_t kW = kLanes<A>;
  using E = Operand<T>;

  // The workspace also provides `more` buffers.
  ScoreGradients(const AttentionBackward<T, A>& call, int64_t b, typename Workspace<A>::Parts more = {})
      : call_(call), params_(call.params), b_(b), rescale_(static_cast<A>(DropoutRate(params_.dropout.p).scale)) {
    const int64_t queries = std::min(kQueryTile, params_.Lq), lanes = round_up(queries, kW);
    const int64_t D = params_.D, keys = std::min(kKeyTile, params_.Lk), tile = keys * lanes;
    Workspace<A>::divide({{&query_lanes_, D * lanes},
                          {&grad_out_lanes_, D * lanes},
                          {&weights_, tile},
                          {&grads_, tile},
                          {&staged_, keys * round_up(D, kW)},
                          {&mask_buffers_.key_addend, keys},
                          {&mask_buffers_.pair_addend, params_.softcap > 0 ? tile : 0},
                          {&mask_buffers_.slopes, params_.softcap > 0 ? tile : 0}},
                         more);
  }

  // Prepares a block of queries and a range of keys; returns the range of keys that its tiles cover.
  Range prepare(int64_t h, int64_t first_query, int64_t queries, Range range) {
    const auto& p = params_;
    h_ = h, kv_head_ = h / (p.H / p.Hkv), first_query_ = first_query, queries_ = queries;
    lanes_ = round_up(queries, kW);
    if (p.dropout.p > 0) dropout_.emplace(p, b_, h);
    uniform_rows_ = load_statistics();
    mask_.emplace(p, b_, h, first_query, mask_buffers_);
    const Range visible = mask_->keys(), needed = uniform_rows_ ? Range{0, p.Lk} : visible;
    const Range keys = needed.intersection(range);
    if (keys.empty()) return keys;
    if (!call_.saved_probs)  // else no score is recomputed
      q_ = load_lanes(p.q.at(b_, h, first_query), p.q.row_stride(), queries, p.D, operands<T>(query_lanes_));
    grad_out_ = load_lanes(call_.grad_out.at(b_, h, first_query), call_.grad_out.row_stride(), queries, p.D,
                           operands<T>(grad_out_lanes_));
    has_large_ &= !call_.saved_probs;
    if (has_large_) sum_again();
    first_tile_ = keys.begin;
    sum_delta_ = keys.begin == needed.begin && visible.end <= std::min(range.end, keys.begin + kKeyTile);
    std::fill(delta_, delta_ + lanes_, A(0));
    std::fill(weight_sums_, weight_sums_ + lanes_, A(0));
    if (!sum_delta_) {
      if (has_large_ && !has_few_queries()) {
        for (int64_t first = visible.begin; first < visible.end; first += kKeyTile)
          find_weights(first, std::min(kKeyTile, visible.end - first), Pass::kSum);
        normalize_delta();
      } else {
        load_delta();
      }
      take_off_grad_logsumexp();
    }
    return keys;
  }

  // Computes the weights (after dropout) and the score gradients of a tile; returns the number of keys left of `keys`.
  int64_t find(int64_t first_key, int64_t keys) {
    // The tile holds all visible keys, so it also gives delta.
    const bool only_tile = sum_delta_ && first_key == first_tile_;
    keys = find_weights(first_key, keys, only_tile ? Pass::kSum : Pass::kOnly);
    if (!only_tile) return keys;
    normalize_delta();
    take_off_grad_logsumexp();
    if (call_.saved_probs)
      saved_tile(first_key).differentiate(keys);
    else
      for (int64_t lane = 0; lane < lanes_; lane += kW) differentiate(keys, lane);
    return keys;
  }

  // Adds the gradients of a tile to the gradients of the distances; `grad` points at distance 0.
  void add_to_distances(int64_t first_key, int64_t keys, A* grad) const {
    for (int64_t row = 0; row < keys; ++row) {
      // The distance of a key falls by one per query.
      A* const own = grad + first_key + row - first_query_;
      for (int64_t i = 0; i < queries_; ++i) own[-i] += grads_[row * lanes_ + i];
    }
  }

  // Converts score gradients to gradients before the softcap.
  void apply_slopes(int64_t keys) {
    for (int64_t n = 0; n < keys * lanes_; n += kW)
      store(grads_ + n, load(grads_ + n) * load(mask_buffers_.slopes + n));
  }

  // Results as left operands of products. Call these in order: each reuses the memory of the one before.
  Matrix<E> weights_over_queries(int64_t keys) {
    return packed() ? packed_over_queries(0) : over_queries<E>(weights_, keys, queries_, lanes_, weights_);
  }
  Matrix<E> grads_over_queries(int64_t keys) {
    return packed() ? packed_over_queries(lanes_ / 2) : over_queries<E>(grads_, keys, queries_, lanes_, weights_);
  }
  Matrix<E> grads_over_keys(int64_t keys) {
    return packed() ? pairs_over_keys<E>(grads_, lanes_) : over_keys<E>(grads_, keys, lanes_);
  }

  // The gradients before the conversion to operands, (keys, lanes), if no weights were kept.
  const A* grads() const { return grads_; }
  A* staged() const { return staged_; }
  int64_t lanes() const { return lanes_; }

 private:
  // Kind of pass over a tile: a single pass with known delta, or a first pass that sums delta and leaves the rest to
  // differentiate().
  enum class Pass { kOnly, kSum };

  void find_scores(int64_t first_key, int64_t keys) {
    const auto& p = params_;
    const T* k = p.k.at(b_, kv_head_, first_key);
    mask_->find_scores(keys, load_factors(k, p.k.row_stride(), keys, p.D, operands<T>(staged_)), q_, weights_);
  }

  // Loads the statistics per query. Returns true if a query has no allowed key, so that all keys have equal weight.
  bool load_statistics() {
    const auto& p = params_;
    bool any = false;
    has_large_ = false;
    std::fill(rest_, rest_ + lanes_, A(0));
    std::fill(logsumexp_, logsumexp_ + lanes_, -kBlocked<A>);  // lanes past the last query get weight 0
    std::fill(uniform_, uniform_ + lanes_, A(0));
    std::fill(grad_logsumexp_, grad_logsumexp_ + lanes_, A(0));
    for (int64_t i = 0; i < queries_; ++i) {
      logsumexp_[i] = *call_.logsumexp.at(b_, h_, first_query_ + i);
      if (call_.grad_logsumexp.data) grad_logsumexp_[i] = *call_.grad_logsumexp.at(b_, h_, first_query_ + i);
      has_large_ |= is_large(logsumexp_[i], has_few_queries());
      if (logsumexp_[i] == kBlocked<A> && p.has_uniform_rows()) {
        uniform_[i] = A(1) / static_cast<A>(p.Lk);
        any = true;
      }
    }
    return any;
  }

  // The logsumexp of the block as two numbers, maximum and rest, from all scores.
  void sum_again() {
    std::vector<TwoPartLogsumexp<A>> totals(queries_, TwoPartLogsumexp<A>(sink_of(params_, h_)));
    const Range visible = mask_->keys();
    for (int64_t first = visible.begin; first < visible.end; first += kKeyTile) {
      const int64_t keys = mask_->prepare(first, std::min(kKeyTile, visible.end - first), weights_);
      if (keys == 0) continue;
      find_scores(first, keys);
      for (int64_t i = 0; i < queries_; ++i) totals[i].add(weights_ + i, keys, lanes_);
    }
    for (int64_t i = 0; i < queries_; ++i) logsumexp_[i] = totals[i].maximum, rest_[i] = totals[i].rest();
  }

  // delta, the sum over all keys of weight times weight gradient, equals the dot product of output and output gradient.
  void load_delta() {
    for (int64_t i = first_query_; i < first_query_ + queries_; ++i)
      delta_[i - first_query_] = dot(call_.out.at(b_, h_, i), call_.grad_out.at(b_, h_, i), params_.D);
  }

  // delta from weights normalised to sum 1. Weights from a rounded logsumexp are off by one common factor; a weight of
  // almost 1 would then get a gradient that should be 0.
  void normalize_delta() {
    if (call_.saved_probs) return;
    const A sink = sink_of(params_, h_);
    for (int64_t lane = 0; lane < lanes_; lane += kW) {
      Vector<A> total = load(weight_sums_ + lane);
      if (params_.sinks) total += exponential((sink - load(logsumexp_ + lane)) - load(rest_ + lane));
      const Vector<A> delta = load(delta_ + lane);
      store(delta_ + lane, total > 0 ? delta / total : delta);
    }
  }

  // The derivative of the logsumexp by a score is the weight.
  void take_off_grad_logsumexp() {
    for (int64_t i = 0; i < queries_; ++i) delta_[i] -= grad_logsumexp_[i];
  }

  // Fills `weights` and `grads`; returns the number of keys left of `keys`. Summing delta from the weights gives a row
  // with one key a gradient of exactly 0, as in eager PyTorch.
  int64_t find_weights(int64_t first_key, int64_t keys, Pass pass) {
    if (!call_.saved_probs) {
      const int64_t visible = mask_->prepare(first_key, keys, weights_);
      if (!uniform_rows_) keys = visible;
      if (keys == 0) return 0;
      find_scores(first_key, keys);
    }
    const auto& p = params_;
    const T* v = p.v.at(b_, kv_head_, first_key);
    multiply(keys, lanes_, p.D, load_factors(v, p.v.row_stride(), keys, p.D, operands<T>(staged_)), grad_out_,
             Scaled<A>{1}, grads_, lanes_);
    if (call_.saved_probs) {
      const SavedTile<T, A> tile = saved_tile(first_key);
      pass == Pass::kOnly ? tile.differentiate(keys) : tile.add_to_delta(keys);
      return keys;
    }
    for (int64_t lane = 0; lane < lanes_; lane += kW)
      pass == Pass::kOnly ? weigh<Pass::kOnly>(first_key, keys, lane) : weigh<Pass::kSum>(first_key, keys, lane);
    return keys;
  }

  // For one vector of queries: converts scores to weights after dropout, and weight gradients to score gradients. A
  // summing pass instead gives weights before dropout, negative if dropped, and weight gradients.
  template <Pass kPass>
  void weigh(int64_t first_key, int64_t keys, int64_t lane) {
    const Vector<A> logsumexp = load(logsumexp_ + lane), rest = load(rest_ + lane), uniform = load(uniform_ + lane);
    const A rescale = rescale_;
    Vector<A> delta = load(delta_ + lane), weight_sum = load(weight_sums_ + lane);
    for_rows(dropout_, keys, first_key, first_query_ + lane, [&](int64_t row, auto, auto kept) {
      A* weights = weights_ + row * lanes_ + lane;
      A* grads = grads_ + row * lanes_ + lane;
      const Vector<A> score = load(weights);
      const auto blocked = score == kBlocked<A>;  // also keeps a NaN or Inf value of the key out of its gradient
      const Vector<A> weight = blocked ? uniform : exponential((score - logsumexp) - rest);
      const Vector<A> grad = blocked ? Vector<A>{} : where_kept<A>(kept, load(grads) * rescale);
      if constexpr (kPass == Pass::kOnly) {
        store(weights, where_kept<A>(kept, weight * rescale));
        store(grads, blocked | (weight == 0) ? Vector<A>{} : weight * (grad - delta));
      } else {
        delta = fma(weight, grad, delta);
        weight_sum += weight;
        store(weights, where_kept<A>(kept, weight, -weight));
        store(grads, grad);
      }
    });
    if constexpr (kPass == Pass::kSum) store(delta_ + lane, delta), store(weight_sums_ + lane, weight_sum);
  }

  // After a summing pass: converts weights to weights after dropout, and weight gradients to score gradients.
  void differentiate(int64_t keys, int64_t lane) {
    const Vector<A> delta = load(delta_ + lane), uniform = load(uniform_ + lane);
    const A rescale = rescale_;
    for (int64_t row = 0; row < keys; ++row) {
      A* weights = weights_ + row * lanes_ + lane;
      A* grads = grads_ + row * lanes_ + lane;
      const Vector<A> signed_weight = load(weights);
      const Vector<A> weight = signed_weight < 0 ? -signed_weight : signed_weight;
      const Vector<A> grad = weight * (load(grads) - delta);
      store(grads, (weight == 0) | (uniform > 0) ? Vector<A>{} : grad);
      store(weights, signed_weight < 0 ? Vector<A>{} : signed_weight * rescale);
    }
  }

  SavedTile<T, A> saved_tile(int64_t first_key) {
    const T* const saved = call_.saved_probs.at(b_, h_, first_query_, lanes_, first_key);
    const A* const factors = call_.saved_probs.factors_at(b_, h_, first_query_, first_key);
    return {saved, factors, uniform_, delta_, weights_, grads_, queries_, lanes_};
  }

  bool has_few_queries() const { return params_.Lq <= kFewQueries; }
  bool packed() const { return kPaired<T> && call_.saved_probs; }

  Matrix<E> packed_over_queries(int64_t offset) const {
    return {reinterpret_cast<const E*>(weights_ + offset), lanes_, 1};
  }

  const AttentionBackward<T, A>& call_;
  const AttentionKernelParams<T, A>& params_;
  int64_t b_;
  A rescale_;
  int64_t h_ = 0, kv_head_ = 0, first_query_ = 0, queries_ = 0, lanes_ = 0, first_tile_ = 0;
  bool uniform_rows_ = false, has_large_ = false, sum_delta_ = false;
  A *query_lanes_, *grad_out_lanes_, *weights_, *grads_, *staged_;
  MaskBuffers<A> mask_buffers_;
  Rows<E> q_, grad_out_;
  // A weight is exp(score - logsumexp - rest).
  A logsumexp_[kQueryTile], rest_[kQueryTile], grad_logsumexp_[kQueryTile], delta_[kQueryTile], uniform_[kQueryTile],
      weight_sums_[kQueryTile];
  std::optional<TileDropout<A>> dropout_;
  std::optional<BlockMask<T, A>> mask_;
};

}  // namespace
}  // namespace transformer_fast
