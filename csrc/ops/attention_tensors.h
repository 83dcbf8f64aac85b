// From the tensors of an attention op to what its kernels take.
#pragma once

#include "../cpu/kernels.h"
#include "tensors.h"

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

// Calls body(problem) with a problem of the right types.
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
    OptionalTensor converted;
    body(AttentionProblem<scalar_t, A>{
        q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), view<const scalar_t>(q),
        view<const scalar_t>(k), view<const scalar_t>(v), view<const bool>(keep), view<const bool>(key_keep),
        bias_view<scalar_t, A>(bias, converted), view<const int32_t>(per_query), causal.has_value(), causal.value_or(0),
        static_cast<A>(scale), dropout_p, seed ? *seed->const_data_ptr<int64_t>() : 0, zero_empty_rows});
  });
}

// The two tensors of kept weights, which both may be missing, as the kernels take them.
template <typename T, typename A>
KeptWeights<T, A> kept_weights(const AttentionProblem<T, A>& problem, const OptionalTensor& weights,
                               const OptionalTensor& factors) {
  if (!weights) return {};
  return {static_cast<T*>(weights->data_ptr()), static_cast<A*>(factors->data_ptr()), problem.H, weights->size(2),
          problem.Lk};
}

inline Tensor empty_statistics(const Tensor& q, at::IntArrayRef sizes) {
  return at::empty(sizes, q.options().dtype(arithmetic_type(q)));
}

}  // namespace

}  // namespace transformer_fast
