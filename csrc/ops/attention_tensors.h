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

// Of q (B, H, Lq, D), k and v (B, Hkv, Lk, D).
template <typename T>
AttentionKernelParams<T, Accumulate<T>> kernel_params_of(const Tensor& q, const Tensor& k, const Tensor& v) {
  AttentionKernelParams<T, Accumulate<T>> p;
  p.B = q.size(0), p.H = q.size(1), p.Hkv = k.size(1), p.Lq = q.size(2), p.Lk = k.size(2), p.D = q.size(3);
  p.q = view<const T>(q), p.k = view<const T>(k), p.v = view<const T>(v);
  return p;
}

// Within what the kernels' arithmetic holds.
template <typename T, typename A>
void set_diagonals(AttentionKernelParams<T, A>& p, std::optional<int64_t> causal, std::optional<int64_t> window) {
  p.upper = std::clamp(causal.value_or(kNoDiagonal), -kNoDiagonal, kNoDiagonal);
  p.lower = std::clamp(window.value_or(-kNoDiagonal), -kNoDiagonal, kNoDiagonal);
}

// What padded and packed batches have alike.
template <typename T, typename A>
void set_options(AttentionKernelParams<T, A>& p, const AttentionParams& params) {
  set_diagonals(p, params.causal, params.window);
  p.scale = static_cast<A>(params.scale), p.zero_empty_rows = params.zero_empty_rows;
  p.dropout = dropout_params(params.dropout_p, params.seed);
}

// Calls body(p) with the parameters of the kernels for the tensors' type.
template <typename Body>
void with_kernel_params(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params, Body body) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention", [&] {
    OptionalTensor converted;
    auto p = kernel_params_of<scalar_t>(q, k, v);
    p.keep = view<const bool>(params.keep), p.key_keep = view<const bool>(params.key_keep);
    p.bias = bias_view<scalar_t, Accumulate<scalar_t>>(params.bias, converted);
    if (const auto& lengths = params.lengths)
      p.lengths =
          view<const int32_t>(lengths->dim() == 1 ? lengths->view({-1, 1, 1, 1}) : lengths->unsqueeze(1).unsqueeze(-1));
    set_options(p, params);
    body(p);
  });
}

// What a forward saved of its weights, if it did, as the kernels take it.
template <typename T, typename A>
SavedProbs<T, A> saved_probs_view(const AttentionKernelParams<T, A>& p, const AttentionResult& result) {
  if (!result.saved_probs) return {};
  return {static_cast<T*>(result.saved_probs->data_ptr()), static_cast<A*>(result.saved_factors->data_ptr()), p.H,
          result.saved_probs->size(2), p.Lk};
}

inline Tensor empty_statistics(const Tensor& q, at::IntArrayRef sizes) {
  return at::empty(sizes, q.options().dtype(arithmetic_type(q)));
}

}  // namespace

}  // namespace transformer_fast
