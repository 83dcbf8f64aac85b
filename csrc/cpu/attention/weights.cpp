// The weights of attention on request, by a separate softmax. The logsumexp of the forward is not used, because it
// loses its digits with a bias of -1e9 on a whole row.
#include "few_queries.h"
#include "mask.h"

namespace transformer_fast {
namespace {

template <typename T, typename A>
class WeightsBlock {
 public:
  static constexpr int64_t kW = kLanes<A>;
  using E = Operand<T>;

  WeightsBlock(const AttentionKernelParams<T, A>& params, int64_t b, int64_t h, int64_t first_query)
      : params_(params), b_(b), h_(h), first_query_(first_query),
        queries_(std::min(kQueryTile, params.Lq - first_query)), lanes_(round_up(queries_, kW)) {
    const int64_t keys = std::min(kKeyTile, params.Lk);
    Workspace<A>::divide({{&query_lanes_, params.D * lanes_},
                          {&staged_, std::max(keys * round_up(params.D, kW), params.Lk)},
                          {&mask_buffers_.key_addend, keys},
                          {&mask_buffers_.pair_addend, params.softcap > 0 ? keys * lanes_ : 0},
                          {&scores_, params.Lk * lanes_}});
    if (params.dropout.p > 0) dropout_.emplace(params, b, h);
  }

  // Writes the rows of the block, Lk elements each.
  void run(T* weights) {
    has_few_queries(params_) ? find_few_scores() : find_scores();
    for (int64_t lane = 0; lane < lanes_; lane += kW) softmax_lanes(lane);
    const int64_t Lk = params_.Lk;
    transpose_rows<A>(
        Lk, queries_, [&](int64_t j, int64_t i, int64_t) { return load(scores_ + j * lanes_ + i); },
        [&](int64_t i, int64_t j, Vector<A> row) { store_result(weights + i * Lk + j, row, std::min(kW, Lk - j)); });
  }

 private:
  // (Lk, lanes), -inf where blocked.
  void find_scores() {
    const auto& p = params_;
    const Rows<E> query =
        load_lanes(p.q.at(b_, h_, first_query_), p.q.row_stride(), queries_, p.D, operands<T>(query_lanes_));
    BlockMask<T, A> mask(p, b_, h_, first_query_, mask_buffers_);
    const Range visible = mask.keys();
    std::fill(scores_, scores_ + visible.begin * lanes_, kBlocked<A>);
    std::fill(scores_ + visible.end * lanes_, scores_ + p.Lk * lanes_, kBlocked<A>);
    for (int64_t first = visible.begin; first < visible.end; first += kKeyTile) {
      A* scores = scores_ + first * lanes_;
      const int64_t loaded = std::min(kKeyTile, visible.end - first), keys = mask.prepare(first, loaded, scores);
      std::fill(scores + keys * lanes_, scores + loaded * lanes_, kBlocked<A>);
      if (keys == 0) continue;
      const T* const k = p.k.at(b_, h_ / (p.H / p.Hkv), first);
      mask.find_scores(keys, load_factors(k, p.k.row_stride(), keys, p.D, operands<T>(staged_)), query, scores);
    }
  }

  // The same of few queries, as their forward sums it, which rounds less than one long sum.
  void find_few_scores() {
    const auto& p = params_;
    const int64_t group = p.H / p.Hkv;
    QueryRows<T, A> rows(p, b_, h_ / group);
    RowsAt<T> k, v;
    rows.find_keys(0, p.Lk, &k, &v);
    for (int64_t i = 0; i < queries_; ++i) {
      copy_operands(p.q.at(b_, h_, first_query_ + i), p.D, query_lanes_);
      rows.find_scores(h_ % group * p.Lq + first_query_ + i, query_lanes_, k, 0, p.Lk, staged_);
      for (int64_t j = 0; j < p.Lk; ++j) scores_[j * lanes_ + i] = staged_[j];
    }
  }

  void softmax_lanes(int64_t lane) {
    A* scores = scores_ + lane;
    const int64_t Lk = params_.Lk;
    const A sink = sink_of(params_, h_);
    Vector<A> maximum = broadcast(sink), total{};
    for (int64_t j = 0; j < Lk; ++j)
      maximum = load(scores + j * lanes_) > maximum ? load(scores + j * lanes_) : maximum;
    const auto empty = maximum == kBlocked<A>;
    const Vector<A> origin = empty ? Vector<A>{} : maximum;
    for (int64_t j = 0; j < Lk; ++j) {
      const Vector<A> weight = exponential(load(scores + j * lanes_) - origin);
      total += weight;
      store(scores + j * lanes_, weight);
    }
    if (params_.sinks) total += exponential(sink - origin);
    const A rescale = dropout_ ? static_cast<A>(dropout_->dropout.rate.scale) : A(1);
    const Vector<A> none = broadcast(params_.has_uniform_rows() ? rescale / static_cast<A>(Lk) : A(0));
    const auto unseen = total == 0;
    const Vector<A> factor = rescale / (unseen ? broadcast(A(1)) : total);
    for_rows(dropout_, Lk, 0, first_query_ + lane, [&](int64_t j, auto, auto kept) {
      A* weight = scores + j * lanes_;
      store(weight, where_kept<A>(kept, unseen ? none : load(weight) * factor));
    });
  }

  const AttentionKernelParams<T, A>& params_;
  int64_t b_, h_, first_query_, queries_, lanes_;
  A *query_lanes_, *staged_, *scores_;
  MaskBuffers<A> mask_buffers_;
  std::optional<TileDropout<A>> dropout_;
};

}  // namespace

template <typename T, typename A>
void attention_weights(const AttentionKernelParams<T, A>& p, T* weights) {
  const int64_t blocks = (p.Lq + kQueryTile - 1) / kQueryTile;
  for_tasks(p.B * p.H * blocks, double(p.B * p.H * p.Lq) * double(p.Lk * p.D), [&](int64_t task) {
    const int64_t head = task / blocks, first_query = task % blocks * kQueryTile;
    WeightsBlock<T, A>(p, head / p.H, head % p.H, first_query).run(weights + (head * p.Lq + first_query) * p.Lk);
  });
}

template void attention_weights(const AttentionKernelParams<float, float>&, float*);
template void attention_weights(const AttentionKernelParams<double, double>&, double*);
template void attention_weights(const AttentionKernelParams<c10::Half, float>&, c10::Half*);
template void attention_weights(const AttentionKernelParams<c10::BFloat16, float>&, c10::BFloat16*);

}  // namespace transformer_fast
