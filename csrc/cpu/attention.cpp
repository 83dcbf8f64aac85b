// torch.ops.transformer_fast_native.attention_forward / attention_backward on the CPU: from tensors to a problem.
// Inputs were checked by transformer_fast/ops/attention.py, which also documents shapes and masks.
#include "attention.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace transformer_fast {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename T>
View<T> view(const Tensor& tensor) {
  View<T> result;
  result.data = static_cast<T*>(tensor.data_ptr());
  for (int dim = 0; dim < 4; ++dim) result.stride[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
  return result;
}

template <typename T>
View<T> view(const OptionalTensor& tensor) {
  return tensor ? view<T>(*tensor) : View<T>{};
}

// Statistics (batch, head, query).
template <typename T>
View<T> statistics_view(const Tensor& tensor) {
  return view<T>(tensor.unsqueeze(-1));
}

// The bias in the arithmetic's dtype; what is broadcast stays one copy.
OptionalTensor converted_bias(const OptionalTensor& bias, at::ScalarType dtype) {
  if (!bias || bias->scalar_type() == dtype) return bias;
  Tensor small = *bias;
  for (int dim = 0; dim < 4; ++dim)
    if (small.stride(dim) == 0 && small.size(dim) > 1) small = small.narrow(dim, 0, 1);
  return small.to(dtype);
}

// Calls body(problem) with a problem of the right types. Keeps `bias` alive while it runs.
template <typename Body>
void with_problem(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& keep,
                  const OptionalTensor& key_keep, const OptionalTensor& lengths, const OptionalTensor& bias,
                  std::optional<int64_t> causal, double scale, double dropout_p, const OptionalTensor& seed,
                  bool zero_empty_rows, Body body) {
  const OptionalTensor per_query =
      lengths ? OptionalTensor(lengths->dim() == 1 ? lengths->view({-1, 1, 1, 1}) : lengths->unsqueeze(1).unsqueeze(-1))
              : std::nullopt;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention", [&] {
    using A = Accumulate<scalar_t>;
    const OptionalTensor wide_bias = converted_bias(bias, c10::CppTypeToScalarType<A>::value);
    body(AttentionProblem<scalar_t, A>{
        q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3),
        view<const scalar_t>(q), view<const scalar_t>(k), view<const scalar_t>(v),
        view<const bool>(keep), view<const bool>(key_keep), view<const A>(wide_bias), view<const int32_t>(per_query),
        causal.has_value(), causal.value_or(0), static_cast<A>(scale),
        dropout_p, seed ? *seed->const_data_ptr<int64_t>() : 0, zero_empty_rows});
  });
}

Tensor empty_statistics(const Tensor& q) {
  const at::ScalarType dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(dtype));
}

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& keep, const OptionalTensor& key_keep,
    const OptionalTensor& lengths, const OptionalTensor& bias, std::optional<int64_t> causal, double scale,
    double dropout_p, const OptionalTensor& seed, bool zero_empty_rows) {
  Tensor out = at::empty_like(q), logsumexp = empty_statistics(q);
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
