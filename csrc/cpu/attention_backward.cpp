// Attention backward on the CPU (Dao et al., "FlashAttention", 2022, algorithm 4): weights are computed again from the
// logsumexp, dropout is drawn again from the seed.
//
// A task owns a range of keys of one (batch, kv head) and sums their gradients alone, over all query heads of the group
// and all query blocks in order; only the gradient of q is shared between ranges, and summed over them in order at the
// end. The ranges follow from the shapes, so the result does not depend on the number of threads.
#include "attention_mask.h"
#include "attention_rows_backward.h"

#include <ATen/ATen.h>

namespace transformer_fast {
namespace {

// Adds the gradients of one key range.
template <typename T, typename A>
class KeyRangeBackward {
 public:
  static constexpr int64_t kW = kLanes<A>;
  using E = Operand<T>;

  KeyRangeBackward(const AttentionBackward<T, A>& call, int64_t b, int64_t kv_head, int64_t first_key,
                   int64_t last_key)
      : problem_(call.problem), call_(call), b_(b), kv_head_(kv_head), first_key_(first_key), last_key_(last_key),
        width_(round_up(problem_.D, kW)), rescale_(static_cast<A>(DropoutRate(problem_.dropout_p).scale)) {
    const int64_t queries = std::min(kQueryTile, problem_.Lq), lanes = round_up(queries, kW);
    const int64_t range = last_key - first_key, keys = std::min(kKeyTile, range);
    const int64_t sizes[] = {problem_.D * lanes, problem_.D * lanes, queries * width_, queries * width_, queries * width_,
                             keys * lanes,      keys * lanes,      keys * width_,    keys,
                             keys * lanes,      range * width_,    range * width_};
    A* buffers[std::size(sizes)];
    Workspace<A>::of_this_thread().divide(sizes, buffers);
    A** next = buffers;
    for (A** buffer : {&query_lanes_, &grad_out_lanes_, &query_rows_, &grad_out_rows_, &grad_q_, &weights_, &grads_,
                       &staged_, &key_addend_, &pair_addend_, &grad_k_, &grad_v_})
      *buffer = *next++;
    std::fill(grad_k_, grad_k_ + range * width_, A(0));
    std::fill(grad_v_, grad_v_ + range * width_, A(0));
  }

  // `partial_q`: (H, Lq, D) of this batch entry, where the gradient of q goes when there are several ranges.
  void run(A* partial_q) {
    const auto& p = problem_;
    const int64_t group = p.H / p.Hkv;
    for (int64_t h = kv_head_ * group; h < (kv_head_ + 1) * group; ++h)
      for (int64_t first_query = 0; first_query < p.Lq; first_query += kQueryTile) {
        add_queries(h, first_query, std::min(kQueryTile, p.Lq - first_query));
        if (partial_q)
          write(grad_q_, queries_, p.scale, partial_q + (h * p.Lq + first_query) * p.D, p.D);
        else
          write(grad_q_, queries_, p.scale, call_.grad_q.at(b_, h, first_query), call_.grad_q.row_stride());
      }
    const auto &grad_k = call_.grad_k, &grad_v = call_.grad_v;
    write(grad_k_, last_key_ - first_key_, p.scale, grad_k.at(b_, kv_head_, first_key_), grad_k.row_stride());
    write(grad_v_, last_key_ - first_key_, A(1), grad_v.at(b_, kv_head_, first_key_), grad_v.row_stride());
  }

 private:
  void add_queries(int64_t h, int64_t first_query, int64_t queries) {
    const auto& p = problem_;
    h_ = h, first_query_ = first_query, queries_ = queries, lanes_ = round_up(queries, kW);
    std::fill(grad_q_, grad_q_ + queries * width_, A(0));
    if (p.dropout_p > 0) dropout_.emplace(p, b_, h);
    const bool uniform = load_statistics();

    BlockMask<T, A> mask(p, b_, h, first_query, queries, key_addend_, pair_addend_);
    const int64_t end = uniform ? last_key_ : std::min(last_key_, mask.keys());
    if (first_key_ >= end) return;
    const T* q = p.q.at(b_, h, first_query);
    const T* grad_out = call_.grad_out.at(b_, h, first_query);
    const int64_t q_stride = p.q.row_stride(), grad_stride = call_.grad_out.row_stride();
    q_ = {load_lanes(q, q_stride, queries, p.D, operand(query_lanes_)),
          load_rows(q, q_stride, queries, p.D, operand(query_rows_))};
    grad_out_ = {load_lanes(grad_out, grad_stride, queries, p.D, operand(grad_out_lanes_)),
                 load_rows(grad_out, grad_stride, queries, p.D, operand(grad_out_rows_))};
    const bool one_tile = first_key_ == 0 && mask.keys() <= std::min(last_key_, kKeyTile);
    if (!one_tile) load_delta();
    for (int64_t first = first_key_; first < end; first += kKeyTile) {
      const int64_t keys = std::min(kKeyTile, end - first), visible = mask.load(first, keys);
      if (uniform || visible > 0)
        add_tile(mask, first, uniform ? keys : visible, one_tile && first == 0);
    }
  }

  // What every key of the block needs to know of a query; whether some query has no allowed key and weighs all alike.
  bool load_statistics() {
    const auto& p = problem_;
    bool any = false;
    std::fill(logsumexp_, logsumexp_ + lanes_, -kBlocked<A>);  // lanes past the last query get weight 0
    std::fill(uniform_, uniform_ + lanes_, A(0));
    std::fill(grad_logsumexp_, grad_logsumexp_ + lanes_, A(0));
    for (int64_t i = 0; i < queries_; ++i) {
      logsumexp_[i] = *call_.logsumexp.at(b_, h_, first_query_ + i);
      if (call_.grad_logsumexp.data) grad_logsumexp_[i] = *call_.grad_logsumexp.at(b_, h_, first_query_ + i);
      if (logsumexp_[i] == kBlocked<A> && !p.zero_empty_rows) {
        uniform_[i] = A(1) / static_cast<A>(p.Lk);
        any = true;
      }
    }
    return any;
  }

  // delta, the sum over all keys of weight times its gradient, is also the product of the output and its gradient. The
  // logsumexp grows with each score by its weight, so its gradient is taken off.
  void load_delta() {
    std::fill(delta_, delta_ + lanes_, A(0));
    for (int64_t i = 0; i < queries_; ++i) {
      const T* out = call_.out.at(b_, h_, first_query_ + i);
      const T* grad_out = call_.grad_out.at(b_, h_, first_query_ + i);
      Vector<A> products{};
      for (int64_t d = 0; d < problem_.D; d += kW) {
        const int64_t count = std::min(kW, problem_.D - d);
        products += load_some(out + d, count) * load_some(grad_out + d, count);
      }
      delta_[i] = lane_sum<A>(products) - grad_logsumexp_[i];
    }
  }

  void add_tile(const BlockMask<T, A>& mask, int64_t first_key, int64_t keys, bool sum_delta) {
    const auto& p = problem_;
    const T* k = p.k.at(b_, kv_head_, first_key);
    const T* v = p.v.at(b_, kv_head_, first_key);
    const int64_t k_stride = p.k.row_stride(), v_stride = p.v.row_stride();
    multiply(keys, lanes_, p.D, load_factors(k, k_stride, keys, p.D, operand(staged_)), q_.lanes, p.scale, weights_,
             lanes_);
    multiply(keys, lanes_, p.D, load_factors(v, v_stride, keys, p.D, operand(staged_)), grad_out_.lanes, A(1), grads_,
             lanes_);
    mask.apply(keys, weights_);
    for (int64_t lane = 0; lane < lanes_; lane += kW) {
      find_weights(first_key, keys, lane, sum_delta);
      differentiate(keys, lane);
    }
    const int64_t offset = (first_key - first_key_) * width_;
    multiply_add(keys, width_, queries_, over_queries<E>(weights_, keys, queries_, lanes_, weights_), grad_out_.rows,
                 grad_v_ + offset, width_);
    // The weights have done their work, and leave their room.
    multiply_add(keys, width_, queries_, over_queries<E>(grads_, keys, queries_, lanes_, weights_), q_.rows,
                 grad_k_ + offset, width_);
    multiply_add(queries_, width_, keys, over_keys<E>(grads_, keys, lanes_),
                 load_rows(k, k_stride, keys, p.D, operand(staged_)), grad_q_, width_);
  }

  // Scores to weights, and the gradients of dropped weights to those of weights, for one vector of queries. The sign
  // of a weight tells whether it was dropped. With `sum_delta` the tile holds all keys of its queries, and gives delta
  // too: then a row with one key has a gradient of exactly 0, as in eager.
  void find_weights(int64_t first_key, int64_t keys, int64_t lane, bool sum_delta) {
    const Vector<A> logsumexp = widen(logsumexp_ + lane), uniform = widen(uniform_ + lane);
    const A rescale = rescale_;
    Vector<A> delta{};
    for_rows(dropout_ ? &*dropout_ : nullptr, keys, first_key, first_query_ + lane, [&](int64_t row, auto kept) {
      A* weights = weights_ + row * lanes_ + lane;
      A* grads = grads_ + row * lanes_ + lane;
      const Vector<A> score = widen(weights);
      const auto blocked = score == kBlocked<A>;  // also keeps a NaN or Inf value of the key out of its gradient
      const Vector<A> weight = blocked ? uniform : exponential(score - logsumexp);
      const Vector<A> grad = blocked ? Vector<A>{} : where_kept<A>(kept, widen(grads) * rescale);
      delta += weight * grad;
      narrow(weights, where_kept<A>(kept, weight, -weight));
      narrow(grads, grad);
    });
    if (sum_delta) narrow(delta_ + lane, delta - widen(grad_logsumexp_ + lane));
  }

  // Weights to dropped weights, and the gradients of weights to those of scores.
  void differentiate(int64_t keys, int64_t lane) {
    const Vector<A> delta = widen(delta_ + lane), uniform = widen(uniform_ + lane);
    const A rescale = rescale_;
    for (int64_t row = 0; row < keys; ++row) {
      A* weights = weights_ + row * lanes_ + lane;
      A* grads = grads_ + row * lanes_ + lane;
      const Vector<A> signed_weight = widen(weights);
      const Vector<A> weight = signed_weight < 0 ? -signed_weight : signed_weight;
      const Vector<A> grad = weight * (widen(grads) - delta);
      narrow(grads, (weight == 0) | (uniform > 0) ? Vector<A>{} : grad);
      narrow(weights, signed_weight < 0 ? Vector<A>{} : signed_weight * rescale);
    }
  }

  static E* operand(A* buffer) { return reinterpret_cast<E*>(buffer); }

  template <typename U>
  void write(const A* rows, int64_t count, A factor, U* target, int64_t stride) const {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < problem_.D; d += kW)
        store_result(target + i * stride + d, widen(rows + i * width_ + d) * factor, std::min(kW, problem_.D - d));
  }

  const AttentionProblem<T, A>& problem_;
  const AttentionBackward<T, A>& call_;
  int64_t b_, kv_head_, first_key_, last_key_, width_;
  A rescale_;
  int64_t h_ = 0, first_query_ = 0, queries_ = 0, lanes_ = 0;
  A *query_lanes_, *grad_out_lanes_, *query_rows_, *grad_out_rows_, *grad_q_, *weights_, *grads_, *staged_,
      *key_addend_, *pair_addend_, *grad_k_, *grad_v_;
  struct {
    Rows<E> lanes, rows;  // as the right operand of a product along the queries, and of one over them
  } q_, grad_out_;
  A logsumexp_[kQueryTile], grad_logsumexp_[kQueryTile], delta_[kQueryTile], uniform_[kQueryTile];
  std::optional<TileDropout<A>> dropout_;
};

template <typename T, typename A>
class Backward {
 public:
  explicit Backward(c10::ArrayRef<AttentionBackward<T, A>> calls) : calls_(calls), heads_(key_heads(calls)) {}

  void run() {
    std::vector<int64_t> starts(calls_.size());
    int64_t room = 0;
    double work = 0;
    for (std::size_t c = 0; c < calls_.size(); ++c) {
      starts[c] = room;
      if (const int64_t ranges = ranges_of(c).count; ranges > 1) room += ranges * query_elements(c);
      work += 2.5 * double(query_elements(c)) * double(calls_[c].problem.Lk);
    }
    at::Tensor parts;
    if (room > 0) parts = at::empty({room}, c10::CppTypeToScalarType<A>::value);
    A* const storage = room > 0 ? parts.mutable_data_ptr<A>() : nullptr;
    for_tasks(calls_.size(), [&](int64_t c) { return tasks_of(c); }, work, [&](int64_t c, int64_t task) {
      const KeyRanges ranges = ranges_of(c);
      run_range(calls_[c], task / ranges.count, task % ranges.count * ranges.length, ranges.length,
                ranges.count > 1 ? storage + starts[c] + task % ranges.count * query_elements(c) : nullptr);
    });
    if (storage == nullptr) return;
    for_tasks(calls_.size(), [&](int64_t c) { return ranges_of(c).count > 1 ? calls_[c].problem.B * calls_[c].problem.H : 0; },
              double(room), [&](int64_t c, int64_t head) { sum_parts(c, head, storage + starts[c]); });
  }

 private:
  KeyRanges ranges_of(int64_t c) const { return KeyRanges(heads_, calls_[c].problem.Lk); }

  int64_t query_elements(int64_t c) const {
    const auto& p = calls_[c].problem;
    return p.B * p.H * p.Lq * p.D;
  }

  int64_t tasks_of(int64_t c) const {
    const auto& p = calls_[c].problem;
    return p.Lk == 0 ? 0 : p.B * p.Hkv * ranges_of(c).count;
  }

  static void run_range(const AttentionBackward<T, A>& call, int64_t head, int64_t first_key, int64_t length,
                        A* partial_q) {
    const auto& p = call.problem;
    const int64_t b = head / p.Hkv, kv_head = head % p.Hkv, last_key = std::min(p.Lk, first_key + length);
    const int64_t group = p.H / p.Hkv, of_batch = p.H * p.Lq * p.D;
    if (has_few_queries(p))
      RowsBackward<T, A>(call, b, kv_head)
          .run(first_key, last_key,
               partial_q ? partial_q + b * of_batch + kv_head * group * p.Lq * p.D : nullptr);
    else
      KeyRangeBackward<T, A>(call, b, kv_head, first_key, last_key)
          .run(partial_q ? partial_q + b * of_batch : nullptr);
  }

  // grad_q of one head = the sum of the ranges' parts, in order.
  void sum_parts(int64_t c, int64_t head, const A* parts) const {
    const auto& p = calls_[c].problem;
    const int64_t ranges = ranges_of(c).count;
    for (int64_t i = 0; i < p.Lq; ++i) {
      T* target = calls_[c].grad_q.at(head / p.H, head % p.H, i);
      const A* part = parts + (head * p.Lq + i) * p.D;
      for (int64_t d = 0; d < p.D; ++d) {
        A total = 0;
        for (int64_t range = 0; range < ranges; ++range) total += part[range * query_elements(c) + d];
        target[d] = static_cast<T>(total);
      }
    }
  }

  c10::ArrayRef<AttentionBackward<T, A>> calls_;
  int64_t heads_;
};

}  // namespace

template <typename T, typename A>
void attention_backward_cpu(c10::ArrayRef<AttentionBackward<T, A>> calls) {
  Backward<T, A>(calls).run();
}

template void attention_backward_cpu(c10::ArrayRef<AttentionBackward<float, float>>);
template void attention_backward_cpu(c10::ArrayRef<AttentionBackward<double, double>>);
template void attention_backward_cpu(c10::ArrayRef<AttentionBackward<c10::Half, float>>);
template void attention_backward_cpu(c10::ArrayRef<AttentionBackward<c10::BFloat16, float>>);

}  // namespace transformer_fast
