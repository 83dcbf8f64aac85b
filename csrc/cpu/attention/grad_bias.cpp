// The gradient of the additive bias: the sum of the score gradients over all broadcast dimensions of the bias. Score
// gradients are recomputed and not stored. A task owns a part of the bias and sums in a fixed order, so two runs agree
// bit for bit.
#include "gradients.h"

#include <numeric>
#include <utility>

namespace transformer_fast {
namespace {

template <typename T, typename A>
class BiasGradient {
 public:
  static constexpr int64_t kW = kLanes<A>;

  BiasGradient(const AttentionBackward<T, A>& call, const BiasGradientResult<A>& grad)
      : call_(call), params_(call.params), sizes_(grad.sizes), grad_(grad.data),
        blocks_((params_.Lq + kQueryTile - 1) / kQueryTile), own_blocks_(sizes_[2] == 1 ? 1 : blocks_) {}

  void run() {
    const auto& p = params_;
    for_tasks(sizes_[0] * sizes_[1] * own_blocks_, 2 * double(p.B * p.H * p.Lq) * double(p.Lk * p.D),
              [&](int64_t task) {
                run_part(task / own_blocks_ / sizes_[1], task / own_blocks_ % sizes_[1], task % own_blocks_);
              });
  }

 private:
  // One head of the bias, and one block of its queries.
  void run_part(int64_t own_b, int64_t own_h, int64_t own_block) {
    const auto& p = params_;
    const int64_t lanes = round_up(std::min(kQueryTile, p.Lq), kW);
    std::vector<A> sums(sizes_[3] * lanes, A(0));  // (Lk | 1, lanes)
    const auto range = [](int64_t size, int64_t own, int64_t all) {
      return size == 1 ? std::pair<int64_t, int64_t>{0, all} : std::pair<int64_t, int64_t>{own, own + 1};
    };
    const auto [first_b, last_b] = range(sizes_[0], own_b, p.B);
    const auto [first_h, last_h] = range(sizes_[1], own_h, p.H);
    const auto [first_block, last_block] = range(own_blocks_, own_block, blocks_);
    for (int64_t b = first_b; b < last_b; ++b) {
      ScoreGradients<T, A> gradients(call_, b);
      for (int64_t h = first_h; h < last_h; ++h)
        for (int64_t block = first_block; block < last_block; ++block) {
          const int64_t first_query = block * kQueryTile, queries = std::min(kQueryTile, p.Lq - first_query);
          const Range keys = gradients.prepare(h, first_query, queries, {0, p.Lk});
          for (int64_t first = keys.begin; first < keys.end; first += kKeyTile)
            add_tile(gradients, first, gradients.find(first, std::min(kKeyTile, keys.end - first)), queries, lanes,
                     sums.data());
        }
    }
    write(own_b, own_h, own_block * kQueryTile, lanes, sums.data());
  }

  // Lanes past the last query are skipped, because their values are arbitrary.
  void add_tile(const ScoreGradients<T, A>& gradients, int64_t first_key, int64_t keys, int64_t queries, int64_t lanes,
                A* sums) const {
    const int64_t key_stride = sizes_[3] == 1 ? 0 : lanes;
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t lane = 0; lane < queries; lane += kW) {
        const Vector<A> grad =
            load_some(gradients.grads() + j * gradients.lanes() + lane, std::min(kW, queries - lane));
        A* sum = sums + (first_key + j) * key_stride + lane;
        store(sum, load(sum) + grad);
      }
  }

  void write(int64_t b, int64_t h, int64_t first_query, int64_t lanes, const A* sums) const {
    const int64_t columns = sizes_[3];
    A* target = grad_ + ((b * sizes_[1] + h) * sizes_[2] + (sizes_[2] == 1 ? 0 : first_query)) * columns;
    for (int64_t j = 0; j < columns; ++j) {
      if (sizes_[2] == 1)
        target[j] = std::accumulate(sums + j * lanes, sums + (j + 1) * lanes, A(0));
      else
        for (int64_t i = 0; i < std::min(kQueryTile, params_.Lq - first_query); ++i)
          target[i * columns + j] = sums[j * lanes + i];
    }
  }

  const AttentionBackward<T, A>& call_;
  const AttentionKernelParams<T, A>& params_;
  const int64_t (&sizes_)[4];
  A* grad_;
  int64_t blocks_, own_blocks_;
};

}  // namespace

template <typename T, typename A>
void attention_grad_bias(const AttentionBackward<T, A>& call, const BiasGradientResult<A>& grad) {
  BiasGradient<T, A>(call, grad).run();
}

template void attention_grad_bias(const AttentionBackward<float, float>&, const BiasGradientResult<float>&);
template void attention_grad_bias(const AttentionBackward<double, double>&, const BiasGradientResult<double>&);
template void attention_grad_bias(const AttentionBackward<c10::Half, float>&, const BiasGradientResult<float>&);
template void attention_grad_bias(const AttentionBackward<c10::BFloat16, float>&, const BiasGradientResult<float>&);

}  // namespace transformer_fast
