// From the tensors of an attention op to what its kernels take.
#pragma once

#include "../cpu/kernels.h"
#include "attention.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <tuple>

namespace transformer_fast {
namespace {

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

template <typename T>
View<T> statistics_view(const OptionalTensor& tensor) {
  return tensor ? statistics_view<T>(*tensor) : View<T>{};
}

// The bias in one of the two dtypes; what is broadcast stays one copy. Keeps a converted one alive.
template <typename T, typename A>
Bias<T, A> bias_view(const OptionalTensor& bias, OptionalTensor& converted) {
  if (!bias) return {};
  if (bias->scalar_type() == c10::CppTypeToScalarType<A>::value) return {view<const A>(*bias), {}};
  if (bias->scalar_type() == c10::CppTypeToScalarType<T>::value) return {{}, view<const T>(*bias)};
  Tensor small = *bias;
  for (int dim = 0; dim < 4; ++dim)
    if (small.stride(dim) == 0 && small.size(dim) > 1) small = small.narrow(dim, 0, 1);
  converted = small.to(c10::CppTypeToScalarType<A>::value);
  return {view<const A>(*converted), {}};
}

// Within what the kernels' arithmetic holds.
template <typename T, typename A>
void set_diagonals(AttentionProblem<T, A>& problem, std::optional<int64_t> causal, std::optional<int64_t> window) {
  problem.upper = std::clamp(causal.value_or(kNoDiagonal), -kNoDiagonal, kNoDiagonal);
  problem.lower = std::clamp(window.value_or(-kNoDiagonal), -kNoDiagonal, kNoDiagonal);
}

// What padded and packed batches have alike.
template <typename T, typename A>
void set_options(AttentionProblem<T, A>& problem, const AttentionParams& params) {
  set_diagonals(problem, params.causal, params.window);
  problem.scale = static_cast<A>(params.scale), problem.zero_empty_rows = params.zero_empty_rows;
  problem.dropout = dropout_params(params.dropout_p, params.seed);
}

// Calls body(problem) with a problem of the right types.
template <typename Body>
void with_problem(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params, Body body) {
  const auto& lengths = params.lengths;
  const OptionalTensor per_query =
      lengths ? OptionalTensor(lengths->dim() == 1 ? lengths->view({-1, 1, 1, 1}) : lengths->unsqueeze(1).unsqueeze(-1))
              : std::nullopt;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention", [&] {
    using A = Accumulate<scalar_t>;
    OptionalTensor converted;
    AttentionProblem<scalar_t, A> problem{q.size(0),
                                          q.size(1),
                                          k.size(1),
                                          q.size(2),
                                          k.size(2),
                                          q.size(3),
                                          view<const scalar_t>(q),
                                          view<const scalar_t>(k),
                                          view<const scalar_t>(v),
                                          view<const bool>(params.keep),
                                          view<const bool>(params.key_keep),
                                          bias_view<scalar_t, A>(params.bias, converted),
                                          view<const int32_t>(per_query)};
    set_options(problem, params);
    body(problem);
  });
}

// What a forward kept, if it did, as the kernels take it.
template <typename T, typename A>
KeptWeights<T, A> kept_weights(const AttentionProblem<T, A>& problem, const AttentionResult& result) {
  if (!result.kept) return {};
  return {static_cast<T*>(result.kept->data_ptr()), static_cast<A*>(result.kept_factors->data_ptr()), problem.H,
          result.kept->size(2), problem.Lk};
}

inline Tensor empty_statistics(const Tensor& q, at::IntArrayRef sizes) {
  return at::empty(sizes, q.options().dtype(arithmetic_type(q)));
}

}  // namespace

}  // namespace transformer_fast
