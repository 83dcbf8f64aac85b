// The gradient of the additive bias on the CPU: the sum of the gradients of the scores over whatever the bias was
// broadcast over. torch.ops.transformer_fast_native.attention_backward_bias has the backward store them all, and sums,
// where they are not too many; attention_grad_bias computes them again and stores none: a task owns some of the bias and
// walks over what it sums in one order. Two runs of either agree bit for bit.
#include "attention_gradients.h"
#include "attention_tensors.h"

#include <torch/library.h>

#include <numeric>
#include <tuple>
#include <utility>

namespace transformer_fast {
namespace {

// `grad` is (B | 1, H | 1, Lq | 1, Lk | 1), contiguous; `sizes` are its sizes.
template <typename T, typename A>
class BiasGradient {
 public:
  static constexpr int64_t kW = kLanes<A>;

  BiasGradient(const AttentionBackward<T, A>& call, at::IntArrayRef sizes, A* grad)
      : call_(call), problem_(call.problem), sizes_(sizes), grad_(grad),
        blocks_((problem_.Lq + kQueryTile - 1) / kQueryTile), own_blocks_(sizes[2] == 1 ? 1 : blocks_) {}

  void run() {
    const auto& p = problem_;
    for_tasks(sizes_[0] * sizes_[1] * own_blocks_, 2 * double(p.B * p.H * p.Lq) * double(p.Lk * p.D),
              [&](int64_t task) { run_part(task / own_blocks_ / sizes_[1], task / own_blocks_ % sizes_[1], task % own_blocks_); });
  }

 private:
  // One head's worth of the bias, and one block of its queries.
  void run_part(int64_t own_b, int64_t own_h, int64_t own_block) {
    const auto& p = problem_;
    const int64_t lanes = round_up(std::min(kQueryTile, p.Lq), kW);
    std::vector<A> sums(sizes_[3] * lanes, A(0));  // (Lk | 1, lanes)
    const auto range = [](int64_t size, int64_t own, int64_t all) {
      return size == 1 ? std::pair<int64_t, int64_t>{0, all} : std::pair<int64_t, int64_t>{own, own + 1};
    };
    const auto [first_b, last_b] = range(sizes_[0], own_b, p.B);
    const auto [first_h, last_h] = range(sizes_[1], own_h, p.H);
    const auto [first_block, last_block] = range(own_blocks_, own_block, blocks_);
    const int64_t none[] = {0};
    A* unused[1];
    for (int64_t b = first_b; b < last_b; ++b) {
      ScoreGradients<T, A> gradients(call_, b, none, unused);
      for (int64_t h = first_h; h < last_h; ++h)
        for (int64_t block = first_block; block < last_block; ++block) {
          const int64_t first_query = block * kQueryTile, queries = std::min(kQueryTile, p.Lq - first_query);
          const int64_t end = gradients.load(h, first_query, queries, 0, p.Lk);
          for (int64_t first = 0; first < end; first += kKeyTile)
            add_tile(gradients, first, gradients.find(first, std::min(kKeyTile, end - first)), queries, lanes, sums.data());
        }
    }
    write(own_b, own_h, own_block * kQueryTile, lanes, sums.data());
  }

  // Lanes past the last query are left out: they may hold anything.
  void add_tile(const ScoreGradients<T, A>& gradients, int64_t first_key, int64_t keys, int64_t queries, int64_t lanes,
                A* sums) const {
    const int64_t key_stride = sizes_[3] == 1 ? 0 : lanes;
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t lane = 0; lane < queries; lane += kW) {
        const Vector<A> grad = load_some(gradients.grads() + j * gradients.lanes() + lane, std::min(kW, queries - lane));
        A* sum = sums + (first_key + j) * key_stride + lane;
        narrow(sum, widen(sum) + grad);
      }
  }

  void write(int64_t b, int64_t h, int64_t first_query, int64_t lanes, const A* sums) const {
    const int64_t columns = sizes_[3];
    A* target = grad_ + ((b * sizes_[1] + h) * sizes_[2] + (sizes_[2] == 1 ? 0 : first_query)) * columns;
    for (int64_t j = 0; j < columns; ++j) {
      if (sizes_[2] == 1)
        target[j] = std::accumulate(sums + j * lanes, sums + (j + 1) * lanes, A(0));
      else
        for (int64_t i = 0; i < std::min(kQueryTile, problem_.Lq - first_query); ++i)
          target[i * columns + j] = sums[j * lanes + i];
    }
  }

  const AttentionBackward<T, A>& call_;
  const AttentionProblem<T, A>& problem_;
  at::IntArrayRef sizes_;
  A* grad_;
  int64_t blocks_, own_blocks_;
};

Tensor attention_grad_bias(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                           const Tensor& logsumexp, const OptionalTensor& keep, const OptionalTensor& key_keep,
                           const OptionalTensor& lengths, const Tensor& bias, std::optional<int64_t> causal,
                           double scale, double dropout_p, const OptionalTensor& seed, bool zero_empty_rows,
                           const OptionalTensor& grad_logsumexp) {
  Tensor grad = empty_statistics(q, bias.sizes());
  if (q.numel() == 0 || k.numel() == 0) return grad.zero_().to(bias.scalar_type());
  with_problem(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows,
               [&](const auto& problem) {
                 using T = typename std::decay_t<decltype(problem)>::Element;
                 using A = typename std::decay_t<decltype(problem)>::Arithmetic;
                 const AttentionBackward<T, A> call{
                     problem, view<const T>(grad_out), view<const T>(out), statistics_view<const A>(logsumexp),
                     grad_logsumexp ? statistics_view<const A>(*grad_logsumexp) : View<const A>{}, {}, {}, {}};
                 BiasGradient<T, A>(call, bias.sizes(), grad.mutable_data_ptr<A>()).run();
               });
  return grad.to(bias.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward_bias(
    const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& logsumexp, const OptionalTensor& keep, const OptionalTensor& key_keep, const OptionalTensor& lengths,
    const Tensor& bias, std::optional<int64_t> causal, double scale, double dropout_p, const OptionalTensor& seed,
    bool zero_empty_rows, const OptionalTensor& grad_logsumexp, const OptionalTensor& kept,
    const OptionalTensor& kept_factors) {
  const int64_t scores = q.size(0) * q.size(1) * q.size(2) * k.size(2);
  if (q.size(2) <= kFewQueries || q.numel() == 0 || k.numel() == 0 || scores > kMostStored)
    return std::tuple_cat(
        attention_backward(grad_out, q, k, v, out, logsumexp, keep, key_keep, lengths, bias, causal, scale, dropout_p,
                           seed, zero_empty_rows, grad_logsumexp, kept, kept_factors),
        std::make_tuple(attention_grad_bias(grad_out, q, k, v, out, logsumexp, keep, key_keep, lengths, bias, causal,
                                            scale, dropout_p, seed, zero_empty_rows, grad_logsumexp)));
  Tensor grad_q = at::empty_like(q), grad_k = at::empty_like(k), grad_v = at::empty_like(v);
  const Tensor grad_scores = at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options());
  with_problem(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows,
               [&](const auto& problem) {
                 using T = typename std::decay_t<decltype(problem)>::Element;
                 using A = typename std::decay_t<decltype(problem)>::Arithmetic;
                 attention_backward_cpu<T, A>(AttentionBackward<T, A>{
                     problem, view<const T>(grad_out), view<const T>(out), statistics_view<const A>(logsumexp),
                     grad_logsumexp ? statistics_view<const A>(*grad_logsumexp) : View<const A>{}, view<T>(grad_q),
                     view<T>(grad_k), view<T>(grad_v), view<T>(grad_scores),
                     kept_weights(problem, kept, kept_factors)});
               });
  return {grad_q, grad_k, grad_v, grad_scores.sum_to_size(bias.sizes()).to(bias.scalar_type())};
}

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "attention_grad_bias(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? keep, "
      "Tensor? key_keep, Tensor? lengths, Tensor bias, int? causal, float scale, float dropout_p, Tensor? seed, "
      "bool zero_empty_rows, Tensor? grad_logsumexp=None) -> Tensor");
  m.def(
      "attention_backward_bias(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
      "Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor bias, int? causal, float scale, float dropout_p, "
      "Tensor? seed, bool zero_empty_rows, Tensor? grad_logsumexp=None, Tensor? kept=None, "
      "Tensor? kept_factors=None) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("attention_grad_bias", &attention_grad_bias);
  m.impl("attention_backward_bias", &attention_backward_bias);
}

}  // namespace
}  // namespace transformer_fast
