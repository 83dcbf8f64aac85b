// The weights of attention on request, by a softmax of their own. The logsumexp is not needed for them here, and beside a
// bias of -1e9 on a whole row it would have lost its digits.
#include "attention_mask.h"
#include "attention_rows.h"

namespace transformer_fast {
namespace {

template <typename T, typename A>
class WeightsBlock {
 public:
  static constexpr int64_t kW = kLanes<A>;
  using E = Operand<T>;

  WeightsBlock(const AttentionProblem<T, A>& problem, int64_t b, int64_t h, int64_t first_query)
      : problem_(problem), b_(b), h_(h), first_query_(first_query),
        queries_(std::min(kQueryTile, problem.Lq - first_query)), lanes_(round_up(queries_, kW)) {
    const int64_t keys = std::min(kKeyTile, problem.Lk);
    const int64_t sizes[] = {problem.D * lanes_, keys * round_up(problem.D, kW), keys, problem.Lk * lanes_};
    A* buffers[std::size(sizes)];
    Workspace<A>::of_this_thread().divide(sizes, buffers);
    std::tie(query_lanes_, staged_, key_addend_, scores_) = std::tie(buffers[0], buffers[1], buffers[2], buffers[3]);
    if (problem.dropout.p > 0) dropout_.emplace(problem, b, h);
  }

  // Writes the rows of the block, Lk elements each.
  void run(T* weights) {
    find_scores();
    for (int64_t lane = 0; lane < lanes_; lane += kW) softmax_lanes(lane);
    const int64_t Lk = problem_.Lk;
    for (int64_t j = 0; j < Lk; j += kW)
      for (int64_t i = 0; i < queries_; i += kW) {
        Vector<A> square[kW];
        for (int64_t row = 0; row < kW; ++row)
          square[row] = j + row < Lk ? widen(scores_ + (j + row) * lanes_ + i) : Vector<A>{};
        transpose<A>(square);
        for (int64_t query = 0; query < std::min(kW, queries_ - i); ++query)
          store_result(weights + (i + query) * Lk + j, square[query], std::min(kW, Lk - j));
      }
  }

 private:
  // (Lk, lanes), -inf where blocked.
  void find_scores() {
    const auto& p = problem_;
    const bool few = has_few_queries(p);
    Rows<E> query{};
    if (!few)
      query =
          load_lanes(p.q.at(b_, h_, first_query_), p.q.row_stride(), queries_, p.D, reinterpret_cast<E*>(query_lanes_));
    BlockMask<T, A> mask(p, b_, h_, first_query_, queries_, key_addend_);
    const Range visible = mask.keys();
    std::fill(scores_, scores_ + visible.begin * lanes_, kBlocked<A>);
    std::fill(scores_ + visible.end * lanes_, scores_ + p.Lk * lanes_, kBlocked<A>);
    for (int64_t first = visible.begin; first < visible.end; first += kKeyTile) {
      A* scores = scores_ + first * lanes_;
      const int64_t loaded = std::min(kKeyTile, visible.end - first), keys = mask.load(first, loaded, scores);
      std::fill(scores + keys * lanes_, scores + loaded * lanes_, kBlocked<A>);
      if (keys == 0) continue;
      const T* k = p.k.at(b_, h_ / (p.H / p.Hkv), first);
      if (few) {
        if (!mask.has_pairs()) std::fill(scores, scores + keys * lanes_, A(0));
        multiply_queries(k, keys, scores);
        mask.apply_keys_and_bounds(keys, scores);
        continue;
      }
      const Matrix<E> factors = load_factors(k, p.k.row_stride(), keys, p.D, reinterpret_cast<E*>(staged_));
      mask.find_scores(keys, factors, query, scores);
    }
  }

  // Adds the products of few queries as the forward finds them: a sum for each lane along D, and then of these, which
  // rounds less than one long sum.
  void multiply_queries(const T* k, int64_t keys, A* scores) {
    const auto& p = problem_;
    for (int64_t i = 0; i < queries_; ++i) {
      copy_operands(p.q.at(b_, h_, first_query_ + i), p.D, query_lanes_);
      multiply_rows(k, p.k.row_stride(), keys, p.D, query_lanes_, p.scale, staged_);
      for (int64_t j = 0; j < keys; ++j)
        if (A& score = scores[j * lanes_ + i]; score != kBlocked<A>) score += staged_[j];
    }
  }

  void softmax_lanes(int64_t lane) {
    A* scores = scores_ + lane;
    const int64_t Lk = problem_.Lk;
    Vector<A> maximum = broadcast(kBlocked<A>), total{};
    for (int64_t j = 0; j < Lk; ++j)
      maximum = widen(scores + j * lanes_) > maximum ? widen(scores + j * lanes_) : maximum;
    const auto empty = maximum == kBlocked<A>;
    const Vector<A> origin = empty ? Vector<A>{} : maximum;
    for (int64_t j = 0; j < Lk; ++j) {
      const Vector<A> weight = exponential(widen(scores + j * lanes_) - origin);
      total += weight;
      narrow(scores + j * lanes_, weight);
    }
    const A rescale = dropout_ ? static_cast<A>(dropout_->dropout.rate.scale) : A(1);
    const Vector<A> none = broadcast(problem_.zero_empty_rows ? A(0) : rescale / static_cast<A>(Lk));
    const auto unseen = total == 0;
    const Vector<A> factor = rescale / (unseen ? broadcast(A(1)) : total);
    for_rows(dropout_ ? &*dropout_ : nullptr, Lk, 0, first_query_ + lane, [&](int64_t j, auto, auto kept) {
      A* weight = scores + j * lanes_;
      narrow(weight, where_kept<A>(kept, unseen ? none : widen(weight) * factor));
    });
  }

  const AttentionProblem<T, A>& problem_;
  int64_t b_, h_, first_query_, queries_, lanes_;
  A *query_lanes_, *staged_, *key_addend_, *pair_addend_, *scores_;
  std::optional<TileDropout<A>> dropout_;
};

}  // namespace

template <typename T, typename A>
void attention_weights(const AttentionProblem<T, A>& p, T* weights) {
  const int64_t blocks = (p.Lq + kQueryTile - 1) / kQueryTile;
  for_tasks(p.B * p.H * blocks, double(p.B * p.H * p.Lq) * double(p.Lk * p.D), [&](int64_t task) {
    const int64_t head = task / blocks, first_query = task % blocks * kQueryTile;
    WeightsBlock<T, A>(p, head / p.H, head % p.H, first_query).run(weights + (head * p.Lq + first_query) * p.Lk);
  });
}

template void attention_weights(const AttentionProblem<float, float>&, float*);
template void attention_weights(const AttentionProblem<double, double>&, double*);
template void attention_weights(const AttentionProblem<c10::Half, float>&, c10::Half*);
template void attention_weights(const AttentionProblem<c10::BFloat16, float>&, c10::BFloat16*);

}  // namespace transformer_fast
