// torch.ops.transformer_fast_native: attention_forward, attention_backward, the gradient of the bias and the weights on the
// CPU, from tensors to what the kernels take.
// Inputs were checked by transformer_fast/ops/attention.py, which also documents shapes and masks.
#include "attention_tensors.h"

#include <torch/library.h>

#include <tuple>

namespace transformer_fast {
namespace {

// Whether a forward keeps the weights for its backward. To compute them again takes a product and the exponentials, and
// with an addend for each pair of query and key and nothing dropped, that is more than eager spends on keeping them.
bool keeps_weights(const Tensor& q, const Tensor& k, const OptionalTensor& bias, double dropout_p) {
  if (!bias || bias->size(2) == 1 || bias->size(3) == 1 || dropout_p > 0 || q.size(2) <= kFewQueries) return false;
  return q.numel() > 0 && q.size(0) * q.size(1) * q.size(2) * k.size(2) <= kMostStored;
}

using Outcome = std::tuple<Tensor, Tensor, OptionalTensor, OptionalTensor>;

Outcome forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& keep,
                const OptionalTensor& key_keep, const OptionalTensor& lengths, const OptionalTensor& bias,
                std::optional<int64_t> causal, double scale, double dropout_p, const OptionalTensor& seed,
                bool zero_empty_rows, bool keep_weights) {
  Tensor out = at::empty_like(q), logsumexp = empty_statistics(q, q.sizes().slice(0, 3));
  OptionalTensor weights, factors;
  with_problem(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows,
               [&](const auto& problem) {
                 using T = typename std::decay_t<decltype(problem)>::Element;
                 using A = typename std::decay_t<decltype(problem)>::Arithmetic;
                 if (keep_weights) {
                   const int64_t vector = kernels().vector_bytes / static_cast<int64_t>(sizeof(A));
                   const int64_t lanes = (problem.Lq + vector - 1) / vector * vector,
                                 tiles = KeptWeights<T, A>::tiles(problem.Lk);
                   weights = at::empty({problem.B, problem.H, lanes, problem.Lk}, q.options());
                   factors = empty_statistics(q, {problem.B, problem.H, tiles, lanes});
                 }
                 kernels().of<T>().attention_forward(AttentionForward<T, A>{
                     problem, view<T>(out), statistics_view<A>(logsumexp), kept_weights(problem, weights, factors)});
               });
  return {out, logsumexp, weights, factors};
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const OptionalTensor& keep, const OptionalTensor& key_keep,
                                             const OptionalTensor& lengths, const OptionalTensor& bias,
                                             std::optional<int64_t> causal, double scale, double dropout_p,
                                             const OptionalTensor& seed, bool zero_empty_rows) {
  const auto [out, logsumexp, weights, factors] =
      forward(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows, false);
  return {out, logsumexp};
}

Outcome attention_forward_training(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& keep,
                                   const OptionalTensor& key_keep, const OptionalTensor& lengths,
                                   const OptionalTensor& bias, std::optional<int64_t> causal, double scale,
                                   double dropout_p, const OptionalTensor& seed, bool zero_empty_rows) {
  return forward(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows,
                 keeps_weights(q, k, bias, dropout_p));
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                                                      const OptionalTensor& keep, const OptionalTensor& key_keep,
                                                      const OptionalTensor& lengths, const OptionalTensor& bias,
                                                      std::optional<int64_t> causal, double scale, double dropout_p,
                                                      const OptionalTensor& seed, bool zero_empty_rows,
                                                      const OptionalTensor& grad_logsumexp, const OptionalTensor& kept,
                                                      const OptionalTensor& kept_factors) {
  Tensor grad_q = at::empty_like(q), grad_k = at::empty_like(k), grad_v = at::empty_like(v);
  if (q.numel() == 0 || k.numel() == 0) return {grad_q.zero_(), grad_k.zero_(), grad_v.zero_()};
  with_problem(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows,
               [&](const auto& problem) {
                 using T = typename std::decay_t<decltype(problem)>::Element;
                 using A = typename std::decay_t<decltype(problem)>::Arithmetic;
                 kernels().of<T>().attention_backward(AttentionBackward<T, A>{
                     problem,
                     view<const T>(grad_out),
                     view<const T>(out),
                     statistics_view<const A>(logsumexp),
                     grad_logsumexp ? statistics_view<const A>(*grad_logsumexp) : View<const A>{},
                     view<T>(grad_q),
                     view<T>(grad_k),
                     view<T>(grad_v),
                     {},
                     kept_weights(problem, kept, kept_factors)});
               });
  return {grad_q, grad_k, grad_v};
}

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
                 const AttentionBackward<T, A> call{problem,
                                                    view<const T>(grad_out),
                                                    view<const T>(out),
                                                    statistics_view<const A>(logsumexp),
                                                    grad_logsumexp ? statistics_view<const A>(*grad_logsumexp)
                                                                   : View<const A>{},
                                                    {},
                                                    {},
                                                    {}};
                 kernels().of<T>().attention_grad_bias(
                     call, {grad.mutable_data_ptr<A>(), {bias.size(0), bias.size(1), bias.size(2), bias.size(3)}});
               });
  return grad.to(bias.scalar_type());
}

// The same with the gradients of q, k and v. The backward stores those of the scores, to be summed, where they are not too
// many.
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
                 kernels().of<T>().attention_backward(AttentionBackward<T, A>{
                     problem, view<const T>(grad_out), view<const T>(out), statistics_view<const A>(logsumexp),
                     grad_logsumexp ? statistics_view<const A>(*grad_logsumexp) : View<const A>{}, view<T>(grad_q),
                     view<T>(grad_k), view<T>(grad_v), view<T>(grad_scores),
                     kept_weights(problem, kept, kept_factors)});
               });
  return {grad_q, grad_k, grad_v, grad_scores.sum_to_size(bias.sizes()).to(bias.scalar_type())};
}

Tensor attention_weights(const Tensor& q, const Tensor& k, const Tensor&, const OptionalTensor& keep,
                         const OptionalTensor& key_keep, const OptionalTensor& lengths, const OptionalTensor& bias,
                         std::optional<int64_t> causal, double scale, double dropout_p, const OptionalTensor& seed,
                         bool zero_empty_rows) {
  Tensor weights = at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options());
  if (weights.numel() == 0) return weights;
  with_problem(q, k, k, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows,
               [&](const auto& p) {
                 using T = typename std::decay_t<decltype(p)>::Element;
                 kernels().of<T>().attention_weights(p, weights.mutable_data_ptr<T>());
               });
  return weights;
}

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor? bias, "
      "int? causal, float scale, float dropout_p, Tensor? seed, bool zero_empty_rows) "
      "-> (Tensor out, Tensor logsumexp)");
  m.def(
      "attention_forward_training(Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? key_keep, Tensor? lengths, "
      "Tensor? bias, int? causal, float scale, float dropout_p, Tensor? seed, bool zero_empty_rows) "
      "-> (Tensor out, Tensor logsumexp, Tensor? kept, Tensor? kept_factors)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? keep, "
      "Tensor? key_keep, Tensor? lengths, Tensor? bias, int? causal, float scale, float dropout_p, Tensor? seed, "
      "bool zero_empty_rows, Tensor? grad_logsumexp=None, Tensor? kept=None, Tensor? kept_factors=None) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  m.def(
      "attention_grad_bias(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? keep, "
      "Tensor? key_keep, Tensor? lengths, Tensor bias, int? causal, float scale, float dropout_p, Tensor? seed, "
      "bool zero_empty_rows, Tensor? grad_logsumexp=None) -> Tensor");
  m.def(
      "attention_backward_bias(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
      "Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor bias, int? causal, float scale, float dropout_p, "
      "Tensor? seed, bool zero_empty_rows, Tensor? grad_logsumexp=None, Tensor? kept=None, "
      "Tensor? kept_factors=None) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "attention_weights(Tensor q, Tensor k, Tensor logsumexp, Tensor? keep, Tensor? key_keep, Tensor? lengths, "
      "Tensor? bias, int? causal, float scale, float dropout_p, Tensor? seed, bool zero_empty_rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("attention_forward", &attention_forward);
  m.impl("attention_forward_training", &attention_forward_training);
  m.impl("attention_backward", &attention_backward);
  m.impl("attention_grad_bias", &attention_grad_bias);
  m.impl("attention_backward_bias", &attention_backward_bias);
  m.impl("attention_weights", &attention_weights);
}

}  // namespace
}  // namespace transformer_fast
