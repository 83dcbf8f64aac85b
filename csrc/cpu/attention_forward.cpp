// Attention forward on the CPU: softmax over tiles of keys with a running maximum (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022), one block of queries at a time.
#include "attention_mask.h"
#include "attention_rows_forward.h"

namespace transformer_fast {
namespace {

template <typename T, typename A>
class ForwardBlock {
 public:
  static constexpr int64_t kW = kLanes<A>;
  using E = Operand<T>;

  ForwardBlock(const AttentionProblem<T, A>& problem, int64_t b, int64_t h, int64_t first_query)
      : problem_(problem), b_(b), h_(h), kv_head_(h / (problem.H / problem.Hkv)), first_query_(first_query),
        queries_(std::min(kQueryTile, problem.Lq - first_query)), lanes_(round_up(queries_, kW)),
        width_(round_up(problem.D, kW)) {
    const int64_t keys = std::min(kKeyTile, problem.Lk);
    const int64_t sizes[] = {problem.D * lanes_, keys * lanes_, queries_ * width_, keys * width_, keys};
    A* buffers[std::size(sizes)];
    Workspace<A>::of_this_thread().divide(sizes, buffers);
    std::tie(query_lanes_, scores_, sum_, staged_, key_addend_) =
        std::tie(buffers[0], buffers[1], buffers[2], buffers[3], buffers[4]);
    if (problem.dropout.p > 0) dropout_.emplace(problem, b, h);
  }

  void run(const AttentionForward<T, A>& call) {
    const auto& [out, logsumexp, kept] = std::tie(call.out, call.logsumexp, call.kept);
    std::fill(maximum_, maximum_ + lanes_, kBlocked<A>);
    std::fill(total_, total_ + lanes_, A(0));
    query_operand_ = load_lanes(problem_.q.at(b_, h_, first_query_), problem_.q.row_stride(), queries_, problem_.D,
                                operand(query_lanes_));
    BlockMask<T, A> mask(problem_, b_, h_, first_query_, queries_, key_addend_);
    const Range visible = mask.keys();
    for (int64_t first = visible.begin; first < visible.end; first += kKeyTile) {
      const int64_t keys = mask.load(first, std::min(kKeyTile, visible.end - first), scores_);
      if (keys > 0) find_weights(mask, first, keys);
      if (kept) keep_tile(kept, first, keys);
      if (keys > 0) add_values(first, keys, false);
    }
    if (fresh_) std::fill(sum_, sum_ + queries_ * width_, A(0));
    fresh_ = false;
    if (kept) finish_kept(kept, visible.end);
    for (int64_t i = 0; i < queries_; ++i)
      *logsumexp.at(b_, h_, first_query_ + i) = total_[i] == 0 ? kBlocked<A> : maximum_[i] + std::log(total_[i]);
    if (!problem_.zero_empty_rows) add_empty_rows();
    write(out);
  }

 private:
  // The scores of a tile, then its weights relative to the maximum so far.
  void find_weights(const BlockMask<T, A>& mask, int64_t first_key, int64_t keys) {
    const auto& k = problem_.k;
    const Matrix<E> key_rows =
        load_factors(k.at(b_, kv_head_, first_key), k.row_stride(), keys, problem_.D, operand(staged_));
    mask.find_scores(keys, key_rows, query_operand_, scores_);
    A shrink[kQueryTile];
    for (int64_t lane = 0; lane < lanes_; lane += kW) softmax_lanes(first_key, keys, lane, shrink + lane);
    if (!fresh_)
      for (int64_t i = 0; i < queries_; ++i)
        if (shrink[i] != 1)
          for (int64_t d = 0; d < width_; ++d) sum_[i * width_ + d] *= shrink[i];
  }

  void keep_tile(const KeptWeights<T, A>& kept, int64_t first_key, int64_t keys) const {
    T* const target = kept.at(b_, h_, first_query_, lanes_, first_key);
    store_row(scores_, A(1), keys * lanes_, target);
    std::fill(target + keys * lanes_, target + std::min(kKeyTile, problem_.Lk - first_key) * lanes_, T(0));
    std::copy(maximum_, maximum_ + lanes_, kept.factors_at(b_, h_, first_query_, first_key));
  }

  // Keys from `end` on have no weight. What relates each tile to the last maximum and the whole sum is known now.
  void finish_kept(const KeptWeights<T, A>& kept, int64_t end) const {
    const int64_t kept_to = std::min(problem_.Lk, round_up(end, kKeyTile));
    std::fill(kept.at(b_, h_, first_query_, lanes_, kept_to), kept.at(b_, h_, first_query_, lanes_, problem_.Lk), T(0));
    for (int64_t first = 0; first < problem_.Lk; first += kKeyTile) {
      A* const factors = kept.factors_at(b_, h_, first_query_, first);
      for (int64_t lane = 0; lane < lanes_; lane += kW) {
        const Vector<A> total = widen(total_ + lane);
        const Vector<A> factor = exponential(widen(factors + lane) - widen(maximum_ + lane)) / total;
        narrow(factors + lane, total == 0 ? Vector<A>{} : factor);
      }
      std::fill(factors + (first < end ? queries_ : 0), factors + lanes_, A(0));
    }
  }

  // Scores to weights relative to the new maximum, for one vector of queries; `shrink`: by how much that lowers the
  // weights of the tiles before.
  void softmax_lanes(int64_t first_key, int64_t keys, int64_t lane, A* shrink) {
    A* scores = scores_ + lane;
    const Vector<A> before = widen(maximum_ + lane);
    Vector<A> maximum = before;
    for (int64_t row = 0; row < keys; ++row) {
      const Vector<A> score = widen(scores + row * lanes_);
      maximum = score > maximum ? score : maximum;
    }
    const Vector<A> origin = maximum == kBlocked<A> ? Vector<A>{} : maximum;  // -inf - -inf would be NaN
    Vector<A> totals[2] = {};
    for_rows(dropout(), keys, first_key, first_query_ + lane, [&](int64_t row, auto parity, auto kept) {
      A* score = scores + row * lanes_;
      const Vector<A> weight = exponential(widen(score) - origin);
      totals[parity] += weight;
      narrow(score, where_kept<A>(kept, weight));
    });
    const Vector<A> factor = exponential(before - origin);
    narrow(shrink, factor);
    narrow(maximum_ + lane, maximum);
    narrow(total_ + lane, fma(widen(total_ + lane), factor, totals[0] + totals[1]));
  }

  // Rows with no allowed key: weight 1 on every key. A NaN or Inf value is blocked like all others and must not show.
  void add_empty_rows() {
    if (std::all_of(total_, total_ + queries_, [](A total) { return total != 0; })) return;
    for (int64_t first = 0; first < problem_.Lk; first += kKeyTile) {
      const int64_t keys = std::min(kKeyTile, problem_.Lk - first);
      for (int64_t lane = 0; lane < lanes_; lane += kW) {
        const Vector<A> weight = widen(total_ + lane) == 0 ? broadcast(A(1)) : Vector<A>{};
        for_rows(dropout(), keys, first, first_query_ + lane, [&](int64_t row, auto, auto kept) {
          narrow(scores_ + row * lanes_ + lane, where_kept<A>(kept, weight));
        });
      }
      add_values(first, keys, true);
    }
    for (int64_t i = 0; i < queries_; ++i)
      if (total_[i] == 0) total_[i] = static_cast<A>(problem_.Lk);
  }

  void add_values(int64_t first_key, int64_t keys, bool replace_non_finite) {
    const auto& v = problem_.v;
    Rows<E> values = load_rows(v.at(b_, kv_head_, first_key), v.row_stride(), keys, problem_.D, operand(staged_));
    if (!values.finite && replace_non_finite) {
      zero_non_finite(values.data, (keys + kSteps<E> - 1) / kSteps<E> * width_, operand(staged_));
      values = {operand(staged_), width_, true};
    }
    multiply_add(queries_, width_, keys, over_keys<E>(scores_, keys, lanes_), values, fresh_, sum_, width_);
    fresh_ = false;
  }

  void write(View<T> out) const {
    const A rescale = dropout_ ? static_cast<A>(dropout_->dropout.rate.scale) : A(1);
    for (int64_t i = 0; i < queries_; ++i) {
      const A factor = total_[i] == 0 ? A(0) : rescale / total_[i];
      store_row(sum_ + i * width_, factor, problem_.D, out.at(b_, h_, first_query_ + i));
    }
  }

  const TileDropout<A>* dropout() const { return dropout_ ? &*dropout_ : nullptr; }

  static E* operand(A* buffer) { return reinterpret_cast<E*>(buffer); }

  const AttentionProblem<T, A>& problem_;
  int64_t b_, h_, kv_head_, first_query_, queries_, lanes_, width_;
  A *query_lanes_, *scores_, *sum_, *staged_, *key_addend_;
  Rows<E> query_operand_;
  A maximum_[kQueryTile], total_[kQueryTile];
  bool fresh_ = true;  // nothing is summed yet
  std::optional<TileDropout<A>> dropout_;
};

template <typename T, typename A>
class Forward {
 public:
  explicit Forward(c10::ArrayRef<AttentionForward<T, A>> calls) : calls_(calls), heads_(key_heads(calls)) {}

  void run() {
    int64_t room = 0;
    std::vector<int64_t> starts(calls_.size());
    double work = 0;
    for (std::size_t c = 0; c < calls_.size(); ++c) {
      const auto& p = calls_[c].problem;
      starts[c] = room;
      if (const int64_t ranges = ranges_of(c).count; ranges > 1) room += ranges * part_size(c) * p.B * p.Hkv;
      // Few queries are bound by memory: a multiplication takes so much longer than in a tile.
      work += (has_few_queries(p) ? 4.0 : 1.0) * double(p.B * p.H * p.Lq) * double(p.Lk * p.D);
    }
    const Buffer<A> parts(room);
    A* const storage = parts.data();
    for_tasks(
        calls_.size(), [&](int64_t c) { return tasks_of(c); }, work,
        [&](int64_t c, int64_t task) {
          const auto& p = calls_[c].problem;
          if (!has_few_queries(p)) return run_block(c, task);
          const KeyRanges ranges = ranges_of(c);
          const int64_t head = task / ranges.count, range = task % ranges.count;
          const int64_t slot = range * p.B * p.Hkv + head;
          RowsForward<T, A>(calls_[c], head / p.Hkv, head % p.Hkv)
              .run(range * ranges.length, ranges.length,
                   ranges.count > 1 ? storage + starts[c] + slot * part_size(c) : nullptr);
        });
    if (storage == nullptr) return;
    for (std::size_t c = 0; c < calls_.size(); ++c)
      if (const int64_t ranges = ranges_of(c).count; ranges > 1) {
        const auto& p = calls_[c].problem;
        for (int64_t head = 0; head < p.B * p.Hkv; ++head)
          RowsForward<T, A>(calls_[c], head / p.Hkv, head % p.Hkv)
              .join(storage + starts[c] + head * part_size(c), ranges, p.B * p.Hkv * part_size(c));
      }
  }

 private:
  KeyRanges ranges_of(int64_t c) const {
    const auto& p = calls_[c].problem;
    // All keys that the queries of a batch entry see, and those that come in front as the first chunk is a whole one.
    const int64_t span = std::min(p.Lk, p.upper - p.lower + p.Lq + kRowKeys);
    return KeyRanges(heads_, has_few_queries(p) ? span : 0);
  }

  // Of one key head and one range.
  int64_t part_size(int64_t c) const {
    const auto& p = calls_[c].problem;
    return p.H / p.Hkv * p.Lq * RowPart<A>::size(round_up(p.D, kLanes<A>));
  }

  static int64_t blocks(const AttentionProblem<T, A>& p) { return (p.Lq + kQueryTile - 1) / kQueryTile; }

  int64_t tasks_of(int64_t c) const {
    const auto& p = calls_[c].problem;
    if (p.Lq == 0) return 0;
    return has_few_queries(p) ? p.B * p.Hkv * ranges_of(c).count : p.B * p.H * blocks(p);
  }

  void run_block(int64_t c, int64_t task) const {
    const auto& p = calls_[c].problem;
    const int64_t head = task / blocks(p), first_query = task % blocks(p) * kQueryTile;
    ForwardBlock<T, A>(p, head / p.H, head % p.H, first_query).run(calls_[c]);
  }

  c10::ArrayRef<AttentionForward<T, A>> calls_;
  int64_t heads_;
};

}  // namespace

template <typename T, typename A>
void attention_forward(c10::ArrayRef<AttentionForward<T, A>> calls) {
  Forward<T, A>(calls).run();
}

template void attention_forward(c10::ArrayRef<AttentionForward<float, float>>);
template void attention_forward(c10::ArrayRef<AttentionForward<double, double>>);
template void attention_forward(c10::ArrayRef<AttentionForward<c10::Half, float>>);
template void attention_forward(c10::ArrayRef<AttentionForward<c10::BFloat16, float>>);

}  // namespace transformer_fast
