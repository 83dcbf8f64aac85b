// From the tensors of an attention op to the parameters of its kernels.
#pragma once

#include "../cpu/kernels.h"
#include "attention.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>

namespace transformer_fast {
namespace {

// The stride of a dimension; 0 for one of size 1. Views are made from strides, not from views of tensors: PyTorch's own
// take half a microsecond each.
inline int64_t stride_of(const Tensor& tensor, int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); }

template <typename T>
View<T> view(const Tensor& tensor) {
  View<T> result;
  result.data = static_cast<T*>(tensor.data_ptr());
  for (int dim = 0; dim < 4; ++dim) result.stride[dim] = stride_of(tensor, dim);
  return result;
}

template <typename T>
View<T> view(const OptionalTensor& tensor) {
  return tensor ? view<T>(*tensor) : View<T>{};
}

// Rows of q, k or v from `start` on: (B, H, L, D) with start 0, or one sequence of a packed batch (T, H, D).
template <typename T>
View<T> rows_view(const Tensor& tensor, int64_t start) {
  if (tensor.dim() == 4) return view<T>(tensor);
  return {static_cast<T*>(tensor.data_ptr()) + start * tensor.stride(0), {0, tensor.stride(1), tensor.stride(0), 1}};
}

// Statistics of rows from `start` on: (B, H, L), or packed (H, T).
template <typename T>
View<T> statistics_view(const Tensor& tensor, int64_t start = 0) {
  if (tensor.dim() == 3)
    return {static_cast<T*>(tensor.data_ptr()), {stride_of(tensor, 0), stride_of(tensor, 1), stride_of(tensor, 2), 0}};
  return {static_cast<T*>(tensor.data_ptr()) + start * tensor.stride(1), {0, tensor.stride(0), tensor.stride(1), 0}};
}

template <typename T>
View<T> statistics_view(const OptionalTensor& tensor, int64_t start = 0) {
  return tensor ? statistics_view<T>(*tensor, start) : View<T>{};
}

// A distance bias or its gradient, with data at distance 0 (entry `zero`). Without queries and keys it has no entries.
template <typename T>
View<T> distance_view(const OptionalTensor& bias, int64_t zero) {
  return bias && bias->numel() > 0 ? view<T>(bias->unsqueeze(2)).moved(zero) : View<T>{};
}

// The ids (B | 1, L) of queries or keys; for a packed batch (T,), from `start` on.
inline View<const int32_t> ids_view(const OptionalTensor& ids, int64_t start = 0) {
  if (!ids) return {};
  if (ids->dim() == 1) return {ids->const_data_ptr<int32_t>() + start, {0, 0, 1, 0}};
  return {ids->const_data_ptr<int32_t>(), {ids->size(0) == 1 ? 0 : ids->stride(0), 0, 1, 0}};
}

// Sets the pointers and strides of q (B, H, Lq, D), k and v (B, Hkv, Lk, D).
template <typename T, typename A>
void set_tensors(AttentionKernelParams<T, A>& p, const Tensor& q, const Tensor& k, const Tensor& v) {
  p.B = q.size(0), p.H = q.size(1), p.Hkv = k.size(1), p.Lq = q.size(2), p.Lk = k.size(2), p.D = q.size(3);
  p.q = view<const T>(q), p.k = view<const T>(k), p.v = view<const T>(v);
}

// Clamps a value to the range of the kernels' integers.
template <typename T, typename A>
void set_diagonals(AttentionKernelParams<T, A>& p, std::optional<int64_t> causal, std::optional<int64_t> window) {
  p.upper = std::clamp(causal.value_or(kNoDiagonal), -kNoDiagonal, kNoDiagonal);
  p.lower = std::clamp(window.value_or(-kNoDiagonal), -kNoDiagonal, kNoDiagonal);
}

// Lengths (B,) or (B, Lq) per batch entry and query.
inline View<const int32_t> lengths_view(const OptionalTensor& lengths) {
  if (!lengths) return {};
  return {lengths->const_data_ptr<int32_t>(),
          {stride_of(*lengths, 0), 0, lengths->dim() == 2 ? stride_of(*lengths, 1) : 0, 0}};
}

inline Tensor empty_statistics(const Tensor& q, at::IntArrayRef sizes) {
  return at::cpu::empty(sizes, q.options().dtype(arithmetic_type(q)));
}

}  // namespace

}  // namespace transformer_fast
