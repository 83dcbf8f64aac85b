// Attention backward on the CPU (Dao et al., "FlashAttention", 2022, algorithm 4). The backward recomputes the weights
// from the logsumexp, and draws dropout again from the seed. A task owns a range of keys of one (batch, kv head). The
// task sums the gradients of its keys over all query heads of the group and all query blocks, in order. Only the
// gradient of q is shared between ranges; it is summed over the ranges, in order, at the end. The ranges depend on
// shapes only, so the result does not depend on the number of threads.
#include "gradients.h"

#include <span>

namespace transformer_fast {
namespace {

// Adds the gradients of one key range.
template <typename T, typename A>
class KeyRangeBackward {
 public:
  static constexpr int64_t kW = kLanes<A>;
  using E = Operand<T>;

  KeyRangeBackward(const AttentionBackward<T, A>& call, int64_t b, int64_t kv_head, Range range)
      : call_(call), params_(call.params), b_(b), kv_head_(kv_head), range_(range), width_(round_up(params_.D, kW)),
        gradients_(call, b,
                   {{&query_rows_, block_size()},
                    {&grad_out_rows_, block_size()},
                    {&grad_q_, block_size()},
                    {&grad_k_, range_size()},
                    {&grad_v_, range_size()}}) {}

  // `partial_q`: (H, Lq, D) of this batch entry, where the gradient of q goes when there are several ranges.
  // `grad_distances`: (H / Hkv, distances), zeros to add to, if wanted.
  void run(A* partial_q, A* grad_distances) {
    const auto& p = params_;
    const int64_t group = p.H / p.Hkv;
    if (p.Lq == 0) skip(kv_head_ * group, 0, 0, range_, /*fresh=*/true);
    for (int64_t h = kv_head_ * group; h < (kv_head_ + 1) * group; ++h) {
      if (grad_distances) grad_distance_0_ = grad_distances + (h % group) * distances(p) + p.Lq - 1;
      for (int64_t first_query = 0; first_query < p.Lq; first_query += kQueryTile) {
        const int64_t queries = std::min(kQueryTile, p.Lq - first_query);
        add_queries(h, first_query, queries, h == kv_head_ * group && first_query == 0);
        if (partial_q)
          store_rows(grad_q_, width_, queries, p.scale, p.D, partial_q + (h * p.Lq + first_query) * p.D, p.D);
        else
          store_rows(grad_q_, width_, queries, p.scale, p.D, call_.grad_q.at(b_, h, first_query),
                     call_.grad_q.row_stride());
      }
    }
    const auto &grad_k = call_.grad_k, &grad_v = call_.grad_v;
    const int64_t first = range_.begin, keys = range_.end - first;
    store_rows(grad_k_, width_, keys, p.scale, p.D, grad_k.at(b_, kv_head_, first), grad_k.row_stride());
    store_rows(grad_v_, width_, keys, A(1), p.D, grad_v.at(b_, kv_head_, first), grad_v.row_stride());
  }

 private:
  int64_t block_size() const { return std::min(kQueryTile, params_.Lq) * width_; }
  int64_t range_size() const { return (range_.end - range_.begin) * width_; }

  // `fresh`: true for the first queries, which overwrite the gradients of keys and values.
  void add_queries(int64_t h, int64_t first_query, int64_t queries, bool fresh) {
    const auto& p = params_;
    bool fresh_queries = true;
    const Range needed = gradients_.prepare(h, first_query, queries, range_);
    if (needed.empty()) {
      skip(h, first_query, queries, range_, fresh);
      return std::fill(grad_q_, grad_q_ + queries * width_, A(0));
    }
    skip(h, first_query, queries, {range_.begin, needed.begin}, fresh);
    skip(h, first_query, queries, {needed.end, range_.end}, fresh);
    const auto& grad_out = call_.grad_out;
    const Rows<E> q_rows =
        load_rows(p.q.at(b_, h, first_query), p.q.row_stride(), queries, p.D, operands<T>(query_rows_));
    const Rows<E> grad_out_rows =
        load_rows(grad_out.at(b_, h, first_query), grad_out.row_stride(), queries, p.D, operands<T>(grad_out_rows_));
    for (int64_t first = needed.begin; first < needed.end; first += kKeyTile) {
      const int64_t keys = gradients_.find(first, std::min(kKeyTile, needed.end - first));
      if (keys > 0) add_tile(h, first_query, first, keys, queries, q_rows, grad_out_rows, fresh, fresh_queries);
      fresh_queries &= keys == 0;
      skip(h, first_query, queries, {first + keys, std::min(first + kKeyTile, needed.end)}, fresh);
    }
    if (fresh_queries) std::fill(grad_q_, grad_q_ + queries * width_, A(0));
  }

  // Keys without a gradient from these queries.
  void skip(int64_t h, int64_t first_query, int64_t queries, Range keys, bool fresh) const {
    if (keys.empty()) return;
    if (fresh)
      for (A* grads : {grad_k_, grad_v_})
        std::fill(grads + (keys.begin - range_.begin) * width_, grads + (keys.end - range_.begin) * width_, A(0));
    if (!call_.grad_scores.data) return;
    for (int64_t i = 0; i < queries; ++i) {
      T* row = call_.grad_scores.at(b_, h, first_query + i);
      std::fill(row + keys.begin, row + keys.end, T(0));
    }
  }

  // Elements of `grads` are one key, or two.
  void store_scores(int64_t h, int64_t first_query, int64_t queries, int64_t first_key, int64_t keys,
                    Matrix<E> grads) const {
    const auto row_at = [&](int64_t j, int64_t i, int64_t count) {
      return load_some(reinterpret_cast<const A*>(grads.data + j * grads.column_stride) + i, count);
    };
    T* const scores = call_.grad_scores.at(b_, h, first_query) + first_key;
    const int64_t stride = call_.grad_scores.row_stride();
    transpose_rows<A>((keys + kSteps<E> - 1) / kSteps<E>, queries, row_at, [&](int64_t i, int64_t j, Vector<A> row) {
      const int64_t first = j * kSteps<E>;
      T* target = scores + i * stride + first;
      if constexpr (std::is_same_v<E, Pair>)
        store_bits(target, row, keys - first);
      else
        store_result(target, row, std::min(kW, keys - first));
    });
  }

  void add_tile(int64_t h, int64_t first_query, int64_t first_key, int64_t keys, int64_t queries, Rows<E> q_rows,
                Rows<E> grad_out_rows, bool fresh, bool fresh_queries) {
    const auto& k = params_.k;
    if (grad_distance_0_) gradients_.add_to_distances(first_key, keys, grad_distance_0_);
    if (params_.softcap > 0) gradients_.apply_slopes(keys);
    const int64_t offset = (first_key - range_.begin) * width_;
    multiply_add(keys, width_, queries, gradients_.weights_over_queries(keys), grad_out_rows, fresh, grad_v_ + offset,
                 width_);
    multiply_add(keys, width_, queries, gradients_.grads_over_queries(keys), q_rows, fresh, grad_k_ + offset, width_);
    const Matrix<E> grad_scores = gradients_.grads_over_keys(keys);
    if (call_.grad_scores.data) store_scores(h, first_query, queries, first_key, keys, grad_scores);
    multiply_add(
        queries, width_, keys, grad_scores,
        load_rows(k.at(b_, kv_head_, first_key), k.row_stride(), keys, params_.D, operands<T>(gradients_.staged())),
        fresh_queries, grad_q_, width_);
  }

  const AttentionBackward<T, A>& call_;
  const AttentionKernelParams<T, A>& params_;
  int64_t b_, kv_head_;
  Range range_;
  int64_t width_;
  A *query_rows_, *grad_out_rows_, *grad_q_, *grad_k_, *grad_v_, *grad_distance_0_ = nullptr;
  ScoreGradients<T, A> gradients_;
};

// Gradients of the distances per task of a call: (B, Hkv, ranges, H / Hkv, distances), or nothing.
template <typename A>
struct DistanceParts {
  A* data = nullptr;
  int64_t size = 0;  // per task

  A* of_task(int64_t task) const { return data ? data + task * size : nullptr; }
};

// Sums over the tasks, in order.
template <typename T, typename A>
void sum_distances(const AttentionBackward<T, A>& call, const DistanceParts<A>& parts, int64_t ranges) {
  const auto& p = call.params;
  const int64_t group = p.H / p.Hkv, count = distances(p);
  for (int64_t task = 0; task < p.B * p.Hkv * ranges; ++task)
    for (int64_t member = 0; member < group; ++member) {
      const int64_t head = task / ranges, h = head % p.Hkv * group + member;
      A* const grad = call.grad_distance_bias.at(head / p.Hkv, h, 0) - own_key(p, head / p.Hkv, p.Lq - 1);
      const A* const part = parts.of_task(task) + member * count;
      for (int64_t n = 0; n < count; ++n) grad[n] += part[n];
    }
}

// grad_q of one head = the sum of the ranges' parts, in order.
template <typename T, typename A>
void sum_ranges(const AttentionBackward<T, A>& call, const KeySplit<A>& split, int64_t head) {
  const auto& p = call.params;
  for (int64_t i = 0; i < p.Lq; ++i) {
    T* target = call.grad_q.at(head / p.H, head % p.H, i);
    for (int64_t d = 0; d < p.D; d += kLanes<A>) {
      const int64_t count = std::min(kLanes<A>, p.D - d);
      Vector<A> total{};
      for (int64_t range = 0; range < split.ranges.count; ++range)
        total += load_some(split.of_range(range, (head * p.Lq + i) * p.D + d), count);
      store_result(target + d, total, count);
    }
  }
}

}  // namespace

template <typename T, typename A>
void attention_backward(std::span<const AttentionBackward<T, A>> calls) {
  using Params = AttentionKernelParams<T, A>;
  const auto elements = [](const Params& p) { return p.B * p.H * p.Lq * p.D; };  // of q
  Buffer<A> memory;
  const auto splits = split_keys(calls, [](const Params& p) { return p.Lk; }, elements, memory);
  std::vector<DistanceParts<A>> distance_parts(calls.size());
  Buffer<A> distance_memory;
  int64_t distance_size = 0;
  for (std::size_t c = 0; c < calls.size(); ++c)
    if (const Params& p = calls[c].params; calls[c].grad_distance_bias.data) {
      distance_parts[c].size = p.H / p.Hkv * distances(p);
      distance_size += p.B * p.Hkv * splits[c].ranges.count * distance_parts[c].size;
    }
  distance_memory.resize(distance_size);
  std::fill(distance_memory.data(), distance_memory.data() + distance_size, A(0));
  A* next = distance_memory.data();
  for (std::size_t c = 0; c < calls.size(); ++c)
    if (calls[c].grad_distance_bias.data) {
      distance_parts[c].data = next;
      next += calls[c].params.B * calls[c].params.Hkv * splits[c].ranges.count * distance_parts[c].size;
    }
  double work = 0, sum_work = 0;
  for (std::size_t c = 0; c < calls.size(); ++c) {
    work += 2.5 * double(elements(calls[c].params)) * double(calls[c].params.Lk);
    if (splits[c].partial) sum_work += double(splits[c].ranges.count * splits[c].size);
  }
  const auto tasks_of = [&](int64_t c) -> int64_t {
    const Params& p = calls[c].params;
    return p.Lk == 0 ? 0 : p.B * p.Hkv * splits[c].ranges.count;
  };
  for_tasks(calls.size(), tasks_of, work, [&](int64_t c, int64_t task) {
    const Params& p = calls[c].params;
    const KeyRanges& ranges = splits[c].ranges;
    const int64_t head = task / ranges.count, b = head / p.Hkv, kv_head = head % p.Hkv, range = task % ranges.count;
    const int64_t head_size = p.Lq * p.D, first_key = range * ranges.length;
    const Range keys{first_key, std::min(p.Lk, first_key + ranges.length)};
    KeyRangeBackward<T, A>(calls[c], b, kv_head, keys)
        .run(splits[c].of_range(range, b * p.H * head_size), distance_parts[c].of_task(task));
  });
  for (std::size_t c = 0; c < calls.size(); ++c)
    if (distance_parts[c].data) sum_distances(calls[c], distance_parts[c], splits[c].ranges.count);
  if (memory.data() == nullptr) return;
  for_tasks(
      calls.size(), [&](int64_t c) { return splits[c].partial ? calls[c].params.B * calls[c].params.H : 0; }, sum_work,
      [&](int64_t c, int64_t head) { sum_ranges(calls[c], splits[c], head); });
}

template void attention_backward(std::span<const AttentionBackward<float, float>>);
template void attention_backward(std::span<const AttentionBackward<double, double>>);
template void attention_backward(std::span<const AttentionBackward<c10::Half, float>>);
template void attention_backward(std::span<const AttentionBackward<c10::BFloat16, float>>);

}  // namespace transformer_fast
