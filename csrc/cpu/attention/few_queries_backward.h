// Attention backward of few queries: a task owns a range of keys of one key head, and processes them in chunks for all
// queries of the group.
#pragma once

#include "few_queries.h"
#include "gradients.h"

namespace transformer_fast {
namespace {

template <typename T, typename A>
class RowsBackward {
 public:
  static constexpr int64_t kW = kLanes<A>;

  RowsBackward(const AttentionBackward<T, A>& call, int64_t b, int64_t kv_head)
      : call_(call), params_(call.params), rows_(params_, b, kv_head), b_(b), kv_head_(kv_head),
        width_(round_up(params_.D, kW)), rescale_(static_cast<A>(DropoutRate(params_.dropout.p).scale)) {
    const int64_t rows = rows_.count() * width_, keys = kRowKeys * width_;
    Workspace<A>::divide({{&q_operands_, rows},
                          {&grad_operands_, rows},
                          {&q_, rows},
                          {&grad_out_, rows},
                          {&grad_q_, rows},
                          {&numbers_, rows_.count() * kNumbers},
                          {&weights_, kRowKeys},
                          {&grads_, kRowKeys},
                          {&slopes_, kRowKeys},
                          {&grad_k_, keys},
                          {&grad_v_, keys}});
  }

  // Backward of a range of keys. The gradient of q goes to `partial_q` (rows, D) if the range is not all keys.
  // `grad_distances`: (H / Hkv, distances), zeros to add to, if wanted.
  void run(Range range, A* partial_q, A* grad_distances) {
    grad_distances_ = grad_distances;
    Range needed;
    for (int64_t row = 0; row < rows_.count(); ++row) needed = needed.hull(prepare(row));
    needed = needed.from_multiple(kRowKeys);
    const bool all_at_once = range.begin <= needed.begin && needed.end <= std::min(range.end, needed.begin + kRowKeys);
    if (!all_at_once)
      for (int64_t row = 0; row < rows_.count(); ++row) load_delta(row);
    for (int64_t first = range.begin; first < range.end; first += kRowKeys) {
      const int64_t keys = std::min(kRowKeys, range.end - first);
      // A chunk lies either wholly before the visible keys, or not at all.
      const int64_t some = first < needed.begin ? 0 : std::clamp<int64_t>(needed.end - first, 0, keys);
      const auto &grad_k = call_.grad_k, &grad_v = call_.grad_v;
      T* const grad_keys = grad_k.at(b_, kv_head_, first);
      T* const grad_values = grad_v.at(b_, kv_head_, first);
      if (rows_.count() == 1) {  // nothing to sum
        if (some > 0) find_gradients(0, first, some, all_at_once);
        std::fill(weights_ + some, weights_ + keys, A(0));
        std::fill(grads_ + some, grads_ + keys, A(0));
        write_outer_product(grads_, q_, keys, params_.scale, grad_keys, grad_k.row_stride());
        write_outer_product(weights_, grad_out_, keys, A(1), grad_values, grad_v.row_stride());
        continue;
      }
      std::fill(grad_k_, grad_k_ + keys * width_, A(0));
      std::fill(grad_v_, grad_v_ + keys * width_, A(0));
      for (int64_t row = 0; row < rows_.count() && some > 0; ++row) {
        find_gradients(row, first, some, all_at_once);
        add_outer_product(weights_, grad_out_ + row * width_, some, width_, grad_v_);
        add_outer_product(grads_, q_ + row * width_, some, width_, grad_k_);
      }
      store_rows(grad_k_, width_, keys, params_.scale, params_.D, grad_keys, grad_k.row_stride());
      store_rows(grad_v_, width_, keys, A(1), params_.D, grad_values, grad_v.row_stride());
    }
    for (int64_t row = 0; row < rows_.count(); ++row) {
      const A* grad = grad_q_ + row * width_;
      if (partial_q)
        store_row(grad, params_.scale, params_.D, partial_q + row * params_.D);
      else
        store_row(grad, params_.scale, params_.D, call_.grad_q.at(b_, rows_.head(row), rows_.position(row)));
    }
  }

 private:
  enum Number { kLogsumexp, kRest, kUniform, kDelta, kGradLogsumexp, kNumbers };

  A& number(int64_t row, Number which) { return numbers_[row * kNumbers + which]; }

  // Returns the keys that the row needs: all keys if none is allowed, because all then have equal weight.
  Range prepare(int64_t row) {
    const int64_t h = rows_.head(row), i = rows_.position(row), D = params_.D;
    const T* q = params_.q.at(b_, h, i);
    const T* grad_out = call_.grad_out.at(b_, h, i);
    copy_operands(q, D, q_operands_ + row * width_);
    copy_operands(grad_out, D, grad_operands_ + row * width_);
    for (int64_t d = 0; d < D; d += kW) {
      store(q_ + row * width_ + d, load_some(q + d, std::min(kW, D - d)));
      store(grad_out_ + row * width_ + d, load_some(grad_out + d, std::min(kW, D - d)));
    }
    std::fill(grad_q_ + row * width_, grad_q_ + (row + 1) * width_, A(0));
    number(row, kLogsumexp) = *call_.logsumexp.at(b_, h, i);
    number(row, kGradLogsumexp) = call_.grad_logsumexp.data ? *call_.grad_logsumexp.at(b_, h, i) : A(0);
    number(row, kRest) = 0;
    if (is_large(number(row, kLogsumexp), A(8))) sum_again(row);
    const bool uniform = number(row, kLogsumexp) == kBlocked<A> && params_.has_uniform_rows();
    number(row, kUniform) = uniform ? A(1) / static_cast<A>(params_.Lk) : A(0);
    return uniform ? Range{0, params_.Lk} : rows_.visible(row);
  }

  // The logsumexp as two numbers, maximum and rest, from all scores.
  void sum_again(int64_t row) {
    TwoPartLogsumexp<A> total(sink_of(params_, rows_.head(row)));
    const Range visible = rows_.visible(row);
    for (int64_t first = visible.from_multiple(kRowKeys).begin; first < visible.end; first += kRowKeys) {
      RowsAt<T> k, v;
      const int64_t keys = rows_.find_keys(first, std::min(kRowKeys, visible.end - first), &k, &v);
      rows_.find_scores(row, q_operands_ + row * width_, k, first, keys, weights_);
      total.add(weights_, keys, 1);
    }
    number(row, kLogsumexp) = total.maximum, number(row, kRest) = total.rest();
  }

  void load_delta(int64_t row) {
    const int64_t h = rows_.head(row), i = rows_.position(row);
    number(row, kDelta) =
        dot(call_.out.at(b_, h, i), call_.grad_out.at(b_, h, i), params_.D) - number(row, kGradLogsumexp);
  }

  // Computes weights (after dropout) and score gradients of some keys; adds to the gradient of q.
  void find_gradients(int64_t row, int64_t first, int64_t keys, bool sum_delta) {
    const auto& p = params_;
    RowsAt<T> k, v;
    rows_.find_keys(first, keys, &k, &v);
    const A uniform = number(row, kUniform), logsumexp = number(row, kLogsumexp);
    const A rest = number(row, kRest);
    rows_.find_scores(row, q_operands_ + row * width_, k, first, keys, weights_, {}, slopes_);
    multiply_rows(v, keys, p.D, grad_operands_ + row * width_, A(1), grads_);
    uint16_t draws[kRowKeys];
    if (p.dropout.p > 0) {
      rows_.draw(row, first, keys, draws);
      drop(draws, DropoutRate(p.dropout.p), keys, rescale_, grads_);
    }
    Vector<A> products{};
    for (int64_t j = 0; j < keys; j += kW) {
      const Vector<A> score = load(weights_ + j);
      const auto blocked = score == kBlocked<A>;  // also keeps a NaN or Inf value of the key out of its gradient
      const Vector<A> weight = blocked ? broadcast(uniform) : exponential((score - logsumexp) - rest);
      const Vector<A> grad = blocked ? Vector<A>{} : load(grads_ + j);
      products = fma(weight, grad, products);
      store(weights_ + j, weight);
      store(grads_ + j, grad);
    }
    // From the weights themselves if all keys are in the chunk, so that a row with one key has a gradient of exactly 0.
    const A delta = sum_delta ? lane_sum<A>(products) - number(row, kGradLogsumexp) : number(row, kDelta);
    for (int64_t j = 0; j < keys; j += kW) {
      const Vector<A> weight = load(weights_ + j), grad = weight * (load(grads_ + j) - delta);
      store(grads_ + j, (weight == 0) | (broadcast(uniform) > 0) ? Vector<A>{} : grad);
    }
    if (grad_distances_) {
      const int64_t distance_0 = row / p.Lq * distances(p) + p.Lq - 1;
      A* const own = grad_distances_ + distance_0 + first - rows_.position(row);
      for (int64_t j = 0; j < keys; ++j) own[j] += grads_[j];
    }
    for (int64_t j = 0; p.softcap > 0 && j < keys; j += kW) store(grads_ + j, load(grads_ + j) * load(slopes_ + j));
    std::fill(weights_ + keys, weights_ + round_up(keys, kW), A(0));
    if (p.dropout.p > 0) drop(draws, DropoutRate(p.dropout.p), keys, rescale_, weights_);
    add_rows(grads_, k, keys, p.D, grad_q_ + row * width_);
  }

  void write_outer_product(const A* weights, const A* vector, int64_t count, A factor, T* target,
                           int64_t stride) const {
    for (int64_t j = 0; j < count; ++j)
      for (int64_t d = 0; d < params_.D; d += kW) {
        const Vector<A> product = weights[j] == 0 ? Vector<A>{} : weights[j] * factor * load(vector + d);
        store_result(target + j * stride + d, product, std::min(kW, params_.D - d));
      }
  }

  const AttentionBackward<T, A>& call_;
  const AttentionKernelParams<T, A>& params_;
  QueryRows<T, A> rows_;
  int64_t b_, kv_head_, width_;
  A rescale_;
  A *q_operands_, *grad_operands_, *q_, *grad_out_, *grad_q_, *numbers_, *weights_, *grads_, *slopes_, *grad_k_,
      *grad_v_;
  A* grad_distances_ = nullptr;
};

}  // namespace
}  // namespace transformer_fast
