// Checks that the eager fast paths of attention share.
#pragma once

#include "eager_call.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cmath>

namespace transformer_fast::eager {

// True if autocast casts nothing: it is off on the device of q, or q has its type.
inline bool has_autocast_type(const Tensor& q) {
  const c10::DeviceType device = q.device().type();
  return !at::autocast::is_autocast_enabled(device) || q.scalar_type() == at::autocast::get_autocast_dtype(device);
}

// True if q, keys and values share a device and a dtype, which autocast leaves as it is, the heads of q are a multiple
// of `key_heads`, and the rows have equal width and unit stride.
inline bool inputs_fit(const Tensor& q, const Tensor& k, const Tensor& v, int64_t key_heads) {
  for (const Tensor* tensor : {&q, &k, &v})
    if (tensor->device() != q.device() || tensor->scalar_type() != q.scalar_type() || tensor->size(-1) != q.size(-1) ||
        tensor->stride(-1) != 1)
      return false;
  return v.sizes() == k.sizes() && q.size(-1) > 0 && key_heads > 0 && q.size(1) % key_heads == 0 &&
         has_autocast_type(q);
}

// True if the Triton kernels take these queries.
inline bool triton_takes(const Tensor& q) {
  constexpr int64_t kLargestHeadDim = 256;
  return q.size(-1) <= kLargestHeadDim && q.scalar_type() != at::kDouble;
}

inline double default_scale(const Tensor& q) { return 1 / std::sqrt(static_cast<double>(q.size(-1))); }

template <typename T>
bool all_within(const Tensor& lengths, int64_t most) {
  const T* values = lengths.const_data_ptr<T>();
  return std::all_of(values, values + lengths.numel(), [&](T length) { return length >= 0 && length <= most; });
}

// Contiguous int32 lengths, or nothing if a length is outside [0, most] (checked on the CPU only). Also nothing for
// lengths per query that are all 0 or 1, which may be a keep mask: Python raises the error.
inline OptionalTensor int_lengths(const Tensor& lengths, int64_t most) {
  const bool wide = lengths.scalar_type() == at::kLong;
  if (!wide && lengths.scalar_type() != at::kInt) return std::nullopt;
  if (!lengths.is_contiguous()) return std::nullopt;
  const auto within = [&](int64_t limit) {
    return wide ? all_within<int64_t>(lengths, limit) : all_within<int32_t>(lengths, limit);
  };
  if (lengths.is_cpu() && (!within(most) || (lengths.dim() == 2 && most > 1 && within(1)))) return std::nullopt;
  return wide ? lengths.to(at::kInt) : lengths;
}

}  // namespace transformer_fast::eager
