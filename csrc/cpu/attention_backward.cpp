// Attention backward on the CPU (Dao et al., "FlashAttention", 2022, algorithm 4): weights are computed again from the
// logsumexp, dropout is drawn again from the seed.
//
// A task owns a range of keys of one (batch, kv head) and sums their gradients alone, over all query heads of the group
// and all query blocks in order; only the gradient of q is shared between ranges, and summed over them in order at the
// end. The ranges follow from the shapes, so the result does not depend on the number of threads.
#include "attention_gradients.h"
#include "attention_rows_backward.h"

namespace transformer_fast {
namespace {

// Adds the gradients of one key range.
template <typename T, typename A>
class KeyRangeBackward {
 public:
  static constexpr int64_t kW = kLanes<A>;
  using E = Operand<T>;

  KeyRangeBackward(const AttentionBackward<T, A>& call, int64_t b, int64_t kv_head, Range range)
      : call_(call), problem_(call.problem), b_(b), kv_head_(kv_head), range_(range), width_(round_up(problem_.D, kW)),
        gradients_(call, b, sizes(), buffers_) {
    std::tie(query_rows_, grad_out_rows_, grad_q_, grad_k_, grad_v_) =
        std::tie(buffers_[0], buffers_[1], buffers_[2], buffers_[3], buffers_[4]);
  }

  // `partial_q`: (H, Lq, D) of this batch entry, where the gradient of q goes when there are several ranges.
  void run(A* partial_q) {
    const auto& p = problem_;
    const int64_t group = p.H / p.Hkv;
    for (int64_t h = kv_head_ * group; h < (kv_head_ + 1) * group; ++h)
      for (int64_t first_query = 0; first_query < p.Lq; first_query += kQueryTile) {
        const int64_t queries = std::min(kQueryTile, p.Lq - first_query);
        add_queries(h, first_query, queries, h == kv_head_ * group && first_query == 0);
        if (partial_q)
          write(grad_q_, queries, p.scale, partial_q + (h * p.Lq + first_query) * p.D, p.D);
        else
          write(grad_q_, queries, p.scale, call_.grad_q.at(b_, h, first_query), call_.grad_q.row_stride());
      }
    const auto &grad_k = call_.grad_k, &grad_v = call_.grad_v;
    const int64_t first = range_.begin, keys = range_.end - first;
    write(grad_k_, keys, p.scale, grad_k.at(b_, kv_head_, first), grad_k.row_stride());
    write(grad_v_, keys, A(1), grad_v.at(b_, kv_head_, first), grad_v.row_stride());
  }

 private:
  typedef const int64_t Sizes[5];

  const Sizes& sizes() {
    const int64_t rows = std::min(kQueryTile, problem_.Lq) * width_, range = (range_.end - range_.begin) * width_;
    for (int i = 0; i < 5; ++i) sizes_[i] = i < 3 ? rows : range;
    return sizes_;
  }

  // `fresh`: these are the first queries, and there are no gradients of keys and values yet.
  void add_queries(int64_t h, int64_t first_query, int64_t queries, bool fresh) {
    const auto& p = problem_;
    bool fresh_queries = true;
    const Range needed = gradients_.load(h, first_query, queries, range_);
    if (needed.empty()) {
      skip(h, first_query, queries, range_, fresh);
      return std::fill(grad_q_, grad_q_ + queries * width_, A(0));
    }
    skip(h, first_query, queries, {range_.begin, needed.begin}, fresh);
    skip(h, first_query, queries, {needed.end, range_.end}, fresh);
    const auto& grad_out = call_.grad_out;
    const Rows<E> q_rows = load_rows(p.q.at(b_, h, first_query), p.q.row_stride(), queries, p.D, operand(query_rows_));
    const Rows<E> grad_out_rows =
        load_rows(grad_out.at(b_, h, first_query), grad_out.row_stride(), queries, p.D, operand(grad_out_rows_));
    for (int64_t first = needed.begin; first < needed.end; first += kKeyTile) {
      const int64_t keys = gradients_.find(first, std::min(kKeyTile, needed.end - first));
      if (keys > 0) add_tile(h, first_query, first, keys, queries, q_rows, grad_out_rows, fresh, fresh_queries);
      fresh_queries &= keys == 0;
      skip(h, first_query, queries, {first + keys, std::min(first + kKeyTile, needed.end)}, fresh);
    }
    if (fresh_queries) std::fill(grad_q_, grad_q_ + queries * width_, A(0));
  }

  // Keys that these queries give no gradient.
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
#if defined(__AVX512BF16__)
      if constexpr (std::is_same_v<E, Pair>)
        store_bits(target, row, keys - first);
      else
#endif
        store_result(target, row, std::min(kW, keys - first));
    });
  }

  void add_tile(int64_t h, int64_t first_query, int64_t first_key, int64_t keys, int64_t queries, Rows<E> q_rows,
                Rows<E> grad_out_rows, bool fresh, bool fresh_queries) {
    const auto& k = problem_.k;
    const int64_t offset = (first_key - range_.begin) * width_;
    multiply_add(keys, width_, queries, gradients_.weights_over_queries(keys), grad_out_rows, fresh, grad_v_ + offset,
                 width_);
    multiply_add(keys, width_, queries, gradients_.grads_over_queries(keys), q_rows, fresh, grad_k_ + offset, width_);
    const Matrix<E> grad_scores = gradients_.grads_over_keys(keys);
    if (call_.grad_scores.data) store_scores(h, first_query, queries, first_key, keys, grad_scores);
    multiply_add(
        queries, width_, keys, grad_scores,
        load_rows(k.at(b_, kv_head_, first_key), k.row_stride(), keys, problem_.D, operand(gradients_.staged())),
        fresh_queries, grad_q_, width_);
  }

  static E* operand(A* buffer) { return reinterpret_cast<E*>(buffer); }

  template <typename U>
  void write(const A* rows, int64_t count, A factor, U* target, int64_t stride) const {
    for (int64_t i = 0; i < count; ++i) store_row(rows + i * width_, factor, problem_.D, target + i * stride);
  }

  const AttentionBackward<T, A>& call_;
  const AttentionProblem<T, A>& problem_;
  int64_t b_, kv_head_;
  Range range_;
  int64_t width_;
  int64_t sizes_[5];
  A* buffers_[5];
  ScoreGradients<T, A> gradients_;
  A *query_rows_, *grad_out_rows_, *grad_q_, *grad_k_, *grad_v_;
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
    const Buffer<A> parts(room);
    A* const storage = parts.data();
    for_tasks(
        calls_.size(), [&](int64_t c) { return tasks_of(c); }, work,
        [&](int64_t c, int64_t task) {
          const KeyRanges ranges = ranges_of(c);
          run_range(calls_[c], task / ranges.count, task % ranges.count * ranges.length, ranges.length,
                    ranges.count > 1 ? storage + starts[c] + task % ranges.count * query_elements(c) : nullptr);
        });
    if (storage == nullptr) return;
    for_tasks(
        calls_.size(),
        [&](int64_t c) { return ranges_of(c).count > 1 ? calls_[c].problem.B * calls_[c].problem.H : 0; }, double(room),
        [&](int64_t c, int64_t head) { sum_parts(c, head, storage + starts[c]); });
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
    const int64_t b = head / p.Hkv, kv_head = head % p.Hkv;
    const Range range{first_key, std::min(p.Lk, first_key + length)};
    const int64_t group = p.H / p.Hkv, of_batch = p.H * p.Lq * p.D;
    if (has_few_queries(p))
      RowsBackward<T, A>(call, b, kv_head)
          .run(range, partial_q ? partial_q + b * of_batch + kv_head * group * p.Lq * p.D : nullptr);
    else
      KeyRangeBackward<T, A>(call, b, kv_head, range).run(partial_q ? partial_q + b * of_batch : nullptr);
  }

  // grad_q of one head = the sum of the ranges' parts, in order.
  void sum_parts(int64_t c, int64_t head, const A* parts) const {
    const auto& p = calls_[c].problem;
    const int64_t ranges = ranges_of(c).count;
    for (int64_t i = 0; i < p.Lq; ++i) {
      T* target = calls_[c].grad_q.at(head / p.H, head % p.H, i);
      const A* part = parts + (head * p.Lq + i) * p.D;
      for (int64_t d = 0; d < p.D; d += kLanes<A>) {
        const int64_t count = std::min(kLanes<A>, p.D - d);
        Vector<A> total{};
        for (int64_t range = 0; range < ranges; ++range)
          total += load_some(part + range * query_elements(c) + d, count);
        store_result(target + d, total, count);
      }
    }
  }

  c10::ArrayRef<AttentionBackward<T, A>> calls_;
  int64_t heads_;
};

}  // namespace

template <typename T, typename A>
void attention_backward(c10::ArrayRef<AttentionBackward<T, A>> calls) {
  Backward<T, A>(calls).run();
}

template void attention_backward(c10::ArrayRef<AttentionBackward<float, float>>);
template void attention_backward(c10::ArrayRef<AttentionBackward<double, double>>);
template void attention_backward(c10::ArrayRef<AttentionBackward<c10::Half, float>>);
template void attention_backward(c10::ArrayRef<AttentionBackward<c10::BFloat16, float>>);

}  // namespace transformer_fast
