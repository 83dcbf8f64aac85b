// torch.ops.transformer_fast_native.attention_forward / attention_backward on the CPU: from tensors to a problem.
// Inputs were checked by transformer_fast/ops/attention.py, which also documents shapes and masks.
#include "attention_tensors.h"

#include <torch/library.h>

#include <tuple>

namespace transformer_fast {
namespace {

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& keep, const OptionalTensor& key_keep,
    const OptionalTensor& lengths, const OptionalTensor& bias, std::optional<int64_t> causal, double scale,
    double dropout_p, const OptionalTensor& seed, bool zero_empty_rows) {
  Tensor out = at::empty_like(q), logsumexp = empty_statistics(q, q.sizes().slice(0, 3));
  with_problem(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows,
               [&](const auto& problem) {
                 using T = typename std::decay_t<decltype(problem)>::Element;
                 using A = typename std::decay_t<decltype(problem)>::Arithmetic;
                 attention_forward_cpu<T, A>(
                     AttentionForward<T, A>{problem, view<T>(out), statistics_view<A>(logsumexp)});
               });
  return {out, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& logsumexp, const OptionalTensor& keep, const OptionalTensor& key_keep, const OptionalTensor& lengths,
    const OptionalTensor& bias, std::optional<int64_t> causal, double scale, double dropout_p,
    const OptionalTensor& seed, bool zero_empty_rows, const OptionalTensor& grad_logsumexp) {
  Tensor grad_q = at::empty_like(q), grad_k = at::empty_like(k), grad_v = at::empty_like(v);
  if (q.numel() == 0 || k.numel() == 0) return {grad_q.zero_(), grad_k.zero_(), grad_v.zero_()};
  with_problem(q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, zero_empty_rows,
               [&](const auto& problem) {
                 using T = typename std::decay_t<decltype(problem)>::Element;
                 using A = typename std::decay_t<decltype(problem)>::Arithmetic;
                 attention_backward_cpu<T, A>(AttentionBackward<T, A>{
                     problem, view<const T>(grad_out), view<const T>(out), statistics_view<const A>(logsumexp),
                     grad_logsumexp ? statistics_view<const A>(*grad_logsumexp) : View<const A>{}, view<T>(grad_q),
                     view<T>(grad_k), view<T>(grad_v)});
               });
  return {grad_q, grad_k, grad_v};
}

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor? bias, "
      "int? causal, float scale, float dropout_p, Tensor? seed, bool zero_empty_rows) "
      "-> (Tensor out, Tensor logsumexp)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? keep, "
      "Tensor? key_keep, Tensor? lengths, Tensor? bias, int? causal, float scale, float dropout_p, Tensor? seed, "
      "bool zero_empty_rows, Tensor? grad_logsumexp=None) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("attention_forward", &attention_forward);
  m.impl("attention_backward", &attention_backward);
}

}  // namespace
}  // namespace transformer_fast
