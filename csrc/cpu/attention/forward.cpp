// Attention forward on the CPU: softmax over tiles of keys with a running maximum (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022), one block of queries at a time.
#include "few_queries_forward.h"
#include "mask.h"

#include <span>

namespace transformer_fast {
namespace {

template <typename T, typename A>
class ForwardBlock {
 public:
  static constexpr int64_t kW = kLanes<A>;
  using E = Operand<T>;

  ForwardBlock(const AttentionKernelParams<T, A>& params, int64_t b, int64_t h, int64_t first_query)
      : params_(params), b_(b), h_(h), kv_head_(h / (params.H / params.Hkv)), first_query_(first_query),
        queries_(std::min(kQueryTile, params.Lq - first_query)), lanes_(round_up(queries_, kW)),
        width_(round_up(params.D, kW)) {
    const int64_t keys = std::min(kKeyTile, params.Lk);
    Workspace<A>::divide({{&query_lanes_, params.D * lanes_},
                          {&scores_, keys * lanes_},
                          {&sum_, queries_ * width_},
                          {&staged_, keys * width_},
                          {&mask_buffers_.key_addend, keys},
                          {&mask_buffers_.pair_addend, params.softcap > 0 ? keys * lanes_ : 0}});
    if (params.dropout.p > 0) dropout_.emplace(params, b, h);
  }

  void run(const AttentionForward<T, A>& call) {
    const auto& [out, logsumexp, saved_probs] = std::tie(call.out, call.logsumexp, call.saved_probs);
    std::fill(row_max_, row_max_ + lanes_, sink_of(params_, h_));
    std::fill(row_sum_, row_sum_ + lanes_, A(params_.sinks ? 1 : 0));
    query_operand_ = load_lanes(params_.q.at(b_, h_, first_query_), params_.q.row_stride(), queries_, params_.D,
                                operands<T>(query_lanes_));
    BlockMask<T, A> mask(params_, b_, h_, first_query_, mask_buffers_);
    const Range visible = mask.keys();
    for (int64_t first = visible.begin; first < visible.end; first += kKeyTile) {
      const int64_t keys = mask.prepare(first, std::min(kKeyTile, visible.end - first), scores_);
      if (keys > 0) find_weights(mask, first, keys);
      if (saved_probs) save_tile(saved_probs, first, keys);
      if (keys > 0) add_values(first, keys, false);
    }
    if (fresh_) std::fill(sum_, sum_ + queries_ * width_, A(0));
    fresh_ = false;
    if (saved_probs) finish_saved_probs(saved_probs, visible.end);
    for (int64_t i = 0; i < queries_; ++i)
      *logsumexp.at(b_, h_, first_query_ + i) = row_sum_[i] == 0 ? kBlocked<A> : row_max_[i] + std::log(row_sum_[i]);
    if (params_.has_uniform_rows()) add_empty_rows();
    write(out);
  }

 private:
  // Computes the scores of a tile, then its weights relative to the running maximum.
  void find_weights(const BlockMask<T, A>& mask, int64_t first_key, int64_t keys) {
    const auto& k = params_.k;
    const Matrix<E> key_rows =
        load_factors(k.at(b_, kv_head_, first_key), k.row_stride(), keys, params_.D, operands<T>(staged_));
    mask.find_scores(keys, key_rows, query_operand_, scores_);
    A shrink[kQueryTile];
    for (int64_t lane = 0; lane < lanes_; lane += kW) softmax_lanes(first_key, keys, lane, shrink + lane);
    if (!fresh_)
      for (int64_t i = 0; i < queries_; ++i)
        if (shrink[i] != 1)
          for (int64_t d = 0; d < width_; ++d) sum_[i * width_ + d] *= shrink[i];
  }

  void save_tile(const SavedProbs<T, A>& saved_probs, int64_t first_key, int64_t keys) const {
    T* const target = saved_probs.at(b_, h_, first_query_, lanes_, first_key);
    store_row(scores_, A(1), keys * lanes_, target);
    std::fill(target + keys * lanes_, target + std::min(kKeyTile, params_.Lk - first_key) * lanes_, T(0));
    std::copy(row_max_, row_max_ + lanes_, saved_probs.factors_at(b_, h_, first_query_, first_key));
  }

  // Keys from `end` on have weight 0. The factors from each tile to the final maximum and sum are known now.
  void finish_saved_probs(const SavedProbs<T, A>& saved_probs, int64_t end) const {
    const int64_t saved_to = std::min(params_.Lk, round_up(end, kKeyTile));
    std::fill(saved_probs.at(b_, h_, first_query_, lanes_, saved_to),
              saved_probs.at(b_, h_, first_query_, lanes_, params_.Lk), T(0));
    for (int64_t first = 0; first < params_.Lk; first += kKeyTile) {
      A* const factors = saved_probs.factors_at(b_, h_, first_query_, first);
      for (int64_t lane = 0; lane < lanes_; lane += kW) {
        const Vector<A> total = load(row_sum_ + lane);
        const Vector<A> factor = exponential(load(factors + lane) - load(row_max_ + lane)) / total;
        store(factors + lane, total == 0 ? Vector<A>{} : factor);
      }
      std::fill(factors + (first < end ? queries_ : 0), factors + lanes_, A(0));
    }
  }

  // Converts scores to weights relative to the new maximum, for one vector of queries. `shrink`: factor for the weights
  // of earlier tiles.
  void softmax_lanes(int64_t first_key, int64_t keys, int64_t lane, A* shrink) {
    A* scores = scores_ + lane;
    const Vector<A> before = load(row_max_ + lane);
    Vector<A> maximum = before;
    for (int64_t row = 0; row < keys; ++row) {
      const Vector<A> score = load(scores + row * lanes_);
      maximum = score > maximum ? score : maximum;
    }
    const Vector<A> origin = maximum == kBlocked<A> ? Vector<A>{} : maximum;  // -inf - -inf would be NaN
    Vector<A> totals[2] = {};
    for_rows(dropout_, keys, first_key, first_query_ + lane, [&](int64_t row, auto parity, auto kept) {
      A* score = scores + row * lanes_;
      const Vector<A> weight = exponential(load(score) - origin);
      totals[parity] += weight;
      store(score, where_kept<A>(kept, weight));
    });
    const Vector<A> factor = exponential(before - origin);
    store(shrink, factor);
    store(row_max_ + lane, maximum);
    store(row_sum_ + lane, fma(load(row_sum_ + lane), factor, totals[0] + totals[1]));
  }

  // Rows with no allowed key: weight 1 on every key. NaN and Inf values are blocked and must not reach the result.
  void add_empty_rows() {
    if (std::all_of(row_sum_, row_sum_ + queries_, [](A total) { return total != 0; })) return;
    for (int64_t first = 0; first < params_.Lk; first += kKeyTile) {
      const int64_t keys = std::min(kKeyTile, params_.Lk - first);
      for (int64_t lane = 0; lane < lanes_; lane += kW) {
        const Vector<A> weight = load(row_sum_ + lane) == 0 ? broadcast(A(1)) : Vector<A>{};
        for_rows(dropout_, keys, first, first_query_ + lane, [&](int64_t row, auto, auto kept) {
          store(scores_ + row * lanes_ + lane, where_kept<A>(kept, weight));
        });
      }
      add_values(first, keys, true);
    }
    for (int64_t i = 0; i < queries_; ++i)
      if (row_sum_[i] == 0) row_sum_[i] = static_cast<A>(params_.Lk);
  }

  void add_values(int64_t first_key, int64_t keys, bool replace_non_finite) {
    const auto& v = params_.v;
    Rows<E> values = load_rows(v.at(b_, kv_head_, first_key), v.row_stride(), keys, params_.D, operands<T>(staged_));
    if (!values.finite && replace_non_finite) {
      zero_non_finite(values.data, (keys + kSteps<E> - 1) / kSteps<E> * width_, operands<T>(staged_));
      values = {operands<T>(staged_), width_, true};
    }
    multiply_add(queries_, width_, keys, over_keys<E>(scores_, keys, lanes_), values, fresh_, sum_, width_);
    fresh_ = false;
  }

  void write(View<T> out) const {
    const A rescale = dropout_ ? static_cast<A>(dropout_->dropout.rate.scale) : A(1);
    for (int64_t i = 0; i < queries_; ++i) {
      const A factor = row_sum_[i] == 0 ? A(0) : rescale / row_sum_[i];
      store_row(sum_ + i * width_, factor, params_.D, out.at(b_, h_, first_query_ + i));
    }
  }

  const AttentionKernelParams<T, A>& params_;
  int64_t b_, h_, kv_head_, first_query_, queries_, lanes_, width_;
  A *query_lanes_, *scores_, *sum_, *staged_;
  MaskBuffers<A> mask_buffers_;
  Rows<E> query_operand_;
  A row_max_[kQueryTile], row_sum_[kQueryTile];
  bool fresh_ = true;  // nothing is summed yet
  std::optional<TileDropout<A>> dropout_;
};

}  // namespace

template <typename T, typename A>
void attention_forward(std::span<const AttentionForward<T, A>> calls) {
  using Params = AttentionKernelParams<T, A>;
  const auto blocks_of = [](const Params& p) { return (p.Lq + kQueryTile - 1) / kQueryTile; };
  // All keys of a batch entry's queries, extended to begin at a whole chunk.
  const auto keys_of = [](const Params& p) { return has_few_queries(p) ? std::min(p.Lk, most_keys(p) + kRowKeys) : 0; };
  const auto head_size = [](const Params& p) {
    return p.H / p.Hkv * p.Lq * RowPart<A>::size(round_up(p.D, kLanes<A>));
  };
  Buffer<A> memory;
  const auto splits = split_keys(calls, keys_of, [&](const Params& p) { return p.B * p.Hkv * head_size(p); }, memory);
  const auto tasks_of = [&](int64_t c) -> int64_t {
    const Params& p = calls[c].params;
    if (p.Lq == 0) return 0;
    return has_few_queries(p) ? p.B * p.Hkv * splits[c].ranges.count : p.B * p.H * blocks_of(p);
  };
  double work = 0;
  for (const auto& [p, out, logsumexp, saved_probs] : calls)
    // Factor of the cost per multiplication against a tile: few queries are limited by memory.
    work += (has_few_queries(p) ? 4.0 : 1.0) * double(p.B * p.H * p.Lq) * double(p.Lk * p.D);
  for_tasks(calls.size(), tasks_of, work, [&](int64_t c, int64_t task) {
    const Params& p = calls[c].params;
    if (!has_few_queries(p)) {
      const int64_t head = task / blocks_of(p), first_query = task % blocks_of(p) * kQueryTile;
      return ForwardBlock<T, A>(p, head / p.H, head % p.H, first_query).run(calls[c]);
    }
    const KeyRanges& ranges = splits[c].ranges;
    const int64_t head = task / ranges.count, range = task % ranges.count;
    RowsForward<T, A>(calls[c], head / p.Hkv, head % p.Hkv)
        .run(range * ranges.length, ranges.length, splits[c].of_range(range, head * head_size(p)));
  });
  for (std::size_t c = 0; c < calls.size(); ++c) {
    const Params& p = calls[c].params;
    for (int64_t head = 0; splits[c].partial && head < p.B * p.Hkv; ++head)
      RowsForward<T, A>(calls[c], head / p.Hkv, head % p.Hkv)
          .join(splits[c].of_range(0, head * head_size(p)), splits[c].ranges.count, splits[c].size);
  }
}

template void attention_forward(std::span<const AttentionForward<float, float>>);
template void attention_forward(std::span<const AttentionForward<double, double>>);
template void attention_forward(std::span<const AttentionForward<c10::Half, float>>);
template void attention_forward(std::span<const AttentionForward<c10::BFloat16, float>>);

}  // namespace transformer_fast
