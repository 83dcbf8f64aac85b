// Rows of d elements in pieces of eight columns, one piece per thread: one Philox call, and one or two 128-bit
// accesses.
#pragma once

#include "../embedding_checks.h"
#include "../philox.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

namespace transformer_fast {

constexpr int kThreads = 256;
constexpr int kPiece = kColumnsPerCall;

template <typename T>
struct alignas(16) Part {
  T element[16 / sizeof(T)];
};

// Eight columns at p as floats; the first `count` of them at the end of a row. kWide: p is 16-byte aligned and columns
// are neighbours.
template <bool kWide, typename T>
__device__ __forceinline__ void load_piece(const T* p, int64_t column_stride, int count, float (&x)[kPiece]) {
  constexpr int kPart = 16 / sizeof(T);
  if (kWide && count == kPiece) {
#pragma unroll
    for (int i = 0; i < kPiece; i += kPart) {
      const Part<T> part = *reinterpret_cast<const Part<T>*>(p + i);
#pragma unroll
      for (int j = 0; j < kPart; ++j) x[i + j] = static_cast<float>(part.element[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[i] = i < count ? static_cast<float>(p[i * column_stride]) : 0.f;
  }
}

template <bool kWide, typename T>
__device__ __forceinline__ void store_piece(T* p, int count, const float (&x)[kPiece]) {
  constexpr int kPart = 16 / sizeof(T);
  if (kWide && count == kPiece) {
#pragma unroll
    for (int i = 0; i < kPiece; i += kPart) {
      Part<T> part;
#pragma unroll
      for (int j = 0; j < kPart; ++j) part.element[j] = static_cast<T>(x[i + j]);
      *reinterpret_cast<Part<T>*>(p + i) = part;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      if (i < count) p[i] = static_cast<T>(x[i]);
  }
}

__device__ __forceinline__ int columns_left(int64_t column, int64_t d) {
  return d - column < kPiece ? static_cast<int>(d - column) : kPiece;
}

// Dropout argument of a kernel. The seed stays on the device, so that a replayed CUDA graph reads a new seed; null: no
// dropout.
struct DeviceDropout {
  const int64_t* seed = nullptr;
  uint32_t threshold = 0;
  float scale = 1.f;

  DeviceDropout(double p, const OptionalTensor& seed_tensor) {
    if (p == 0) return;
    const DropoutRate rate(p);
    seed = seed_tensor->const_data_ptr<int64_t>();
    threshold = rate.threshold;
    scale = static_cast<float>(rate.scale);
  }

  __device__ __forceinline__ void apply(int64_t row, int64_t column, float (&x)[kPiece]) const {
    if (seed == nullptr) return;
    const PhiloxWords words = philox_elementwise(static_cast<uint64_t>(*seed), row, column / kPiece);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[i] = words.bits(i) >= threshold ? x[i] * scale : 0.f;
  }
};

// Contiguous integers of any width, such as token ids; default: none.
struct DeviceIds {
  const void* data = nullptr;
  int bytes = 0;

  DeviceIds() = default;
  explicit DeviceIds(const at::Tensor& ids) : data(ids.const_data_ptr()), bytes(static_cast<int>(ids.element_size())) {}

  __device__ __forceinline__ bool given() const { return data != nullptr; }

  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    return bytes == 8   ? static_cast<const int64_t*>(data)[i]
           : bytes == 4 ? static_cast<const int32_t*>(data)[i]
                        : static_cast<const int16_t*>(data)[i];
  }
};

// x: threads along the columns of a row (whole warps if the row is wide enough); y: rows per block.
inline dim3 block_shape(int64_t d) {
  const int64_t pieces = (d + kPiece - 1) / kPiece;
  int64_t x = 1;
  while (x < pieces && x < 32) x *= 2;
  if (pieces > 32) x = std::min<int64_t>((pieces + 31) / 32 * 32, kThreads);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(kThreads / x));
}

// Number of blocks for `rows` rows; kernels loop if the rows exceed the largest grid.
inline unsigned grid_size(int64_t rows, const dim3& block) {
  return static_cast<unsigned>(std::min<int64_t>((rows + block.y - 1) / block.y, std::numeric_limits<int32_t>::max()));
}

// Calls body with a value of the element type.
template <typename Body>
auto for_element_type(at::ScalarType type, const Body& body) {
  switch (type) {
    case at::kFloat:
      return body(float());
    case at::kHalf:
      return body(at::Half());
    case at::kBFloat16:
      return body(at::BFloat16());
    default:
      TORCH_CHECK_TYPE(false, "the CUDA kernels take float32, float16 and bfloat16, got ", type);
  }
}

// True if every row can be read and written 128 bits at a time.
inline bool wide_rows(const void* data, int64_t row_stride, int64_t column_stride, size_t element_size) {
  return column_stride == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * element_size % 16 == 0;
}

}  // namespace transformer_fast
