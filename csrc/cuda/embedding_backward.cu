// The gradient of the embedding's weight on the GPU, two ways.
//
// Sorted (deterministic): the ids are sorted on the device and the order is cut into chunks. A thread walks one for
// eight columns and writes every id that begins and ends there; ids that cross into other chunks leave partial sums,
// which a second kernel adds in a fixed order. No atomics, no host synchronisation, and an id that fills the batch is
// still spread over the GPU, in both kernels. A radix sort passes over its keys once for every eight bits, so the ids
// are sorted as the narrowest integers that hold the vocabulary: most of a call's time on a small batch is this sort.
// Atomic: one pass in batch order with fp32 atomics; no sort, but not repeatable bit for bit.
#include "rows.cuh"

#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace transformer_fast {
namespace {

// Shared arguments of the kernels: grad (rows, d) contiguous, and the range of valid ids.
template <typename T>
struct Gradient {
  const T* grad;
  int64_t rows, d, vocabulary, padding_idx;
  float scale;
  DeviceDropout dropout;

  __device__ __forceinline__ bool counts(int64_t id) const { return id >= 0 && id < vocabulary && id != padding_idx; }

  // dropout'(grad) of one row, eight columns.
  template <bool kWide>
  __device__ __forceinline__ void load(int64_t row, int64_t column, int count, float (&x)[kPiece]) const {
    load_piece<kWide>(grad + row * d + column, 1, count, x);
    dropout.apply(row, column, x);
  }
};

// The rows of grad in order of their ids, cut into chunks of `tokens`.
struct Sorted {
  DeviceIds ids;
  const int64_t* row;
  int64_t tokens, chunks;
};

// partial is (chunks, 2, d): the sum of the id continued from the chunk before, and the sum of the id that continues
// into the next chunk.
template <bool kWide, typename T>
__global__ void __launch_bounds__(kThreads)
    chunk_kernel(T* __restrict__ out, float* __restrict__ partial, const Gradient<T> g, const Sorted sorted) {
  constexpr int kAhead = 4;  // rows loaded ahead of their sum, to overlap latencies
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; s < sorted.chunks; s += step) {
    const int64_t begin = s * sorted.tokens, end = min(begin + sorted.tokens, g.rows);
    const int64_t before = begin > 0 ? sorted.ids[begin - 1] : -1, after = end < g.rows ? sorted.ids[end] : -1;
    const bool came_in = begin > 0 && before == sorted.ids[begin];
    for (int64_t c = static_cast<int64_t>(threadIdx.x) * kPiece; c < g.d; c += blockDim.x * kPiece) {
      const int count = columns_left(c, g.d);
      float sum[kPiece] = {};
      bool first_id = true;
      for (int64_t i = begin; i < end; i += kAhead) {
        float x[kAhead][kPiece];
        int64_t id[kAhead + 1];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          id[a] = i + a < end ? sorted.ids[i + a] : -1;
          if (g.counts(id[a])) g.template load<kWide>(sorted.row[i + a], c, count, x[a]);
        }
        id[kAhead] = i + kAhead < end ? sorted.ids[i + kAhead] : -1;
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i + a >= end) continue;
          if (g.counts(id[a])) {
#pragma unroll
            for (int j = 0; j < kPiece; ++j) sum[j] += x[a][j];
          }
          const bool last = i + a + 1 == end;
          if (!last && id[a + 1] == id[a]) continue;
          if (g.counts(id[a])) {
            const bool comes_in = first_id && came_in, goes_on = last && end < g.rows && after == id[a];
            if (comes_in || goes_on) {
              store_piece<kWide>(partial + (2 * s + (comes_in ? 0 : 1)) * g.d + c, count, sum);
            } else {
#pragma unroll
              for (int j = 0; j < kPiece; ++j) sum[j] *= g.scale;
              store_piece<kWide>(out + id[a] * g.d + c, count, sum);
            }
          }
          first_id = false;
#pragma unroll
          for (int j = 0; j < kPiece; ++j) sum[j] = 0.f;
        }
      }
    }
  }
}

// One block per tile of columns of an id that spans several chunks: adds its partial sums, blockDim.y times kAhead at a
// time.
template <bool kWide, typename T>
__global__ void __launch_bounds__(kThreads)
    join_kernel(T* __restrict__ out, const float* __restrict__ partial, const Gradient<T> g, const Sorted sorted) {
  constexpr int kAhead = 4;
  __shared__ float sums[kThreads][kPiece];
  const int64_t columns = static_cast<int64_t>(blockDim.x) * kPiece, tiles = (g.d + columns - 1) / columns;
  for (int64_t b = blockIdx.x; b < (sorted.chunks - 1) * tiles; b += gridDim.x) {
    const int64_t s = b / tiles, c = b % tiles * columns + static_cast<int64_t>(threadIdx.x) * kPiece;
    const int64_t begin = s * sorted.tokens, end = begin + sorted.tokens, id = sorted.ids[end];
    const bool goes_on = id == sorted.ids[end - 1] && g.counts(id);
    const bool begins_here = begin == 0 || sorted.ids[begin - 1] != id;
    if (!goes_on || !begins_here) continue;
    int64_t last = s + 1, beyond = sorted.chunks;  // the last chunk of this id, found by the chunk's first token
    while (beyond - last > 1) {
      const int64_t middle = last + (beyond - last) / 2;
      if (sorted.ids[middle * sorted.tokens] == id)
        last = middle;
      else
        beyond = middle;
    }
    const int count = c < g.d ? columns_left(c, g.d) : 0;
    float sum[kPiece] = {};
    for (int64_t first = s + threadIdx.y; count > 0 && first <= last; first += kAhead * blockDim.y) {
      float x[kAhead][kPiece];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int64_t k = first + a * blockDim.y;
        if (k <= last) load_piece<kWide>(partial + (2 * k + (k == s ? 1 : 0)) * g.d + c, 1, count, x[a]);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (first + a * blockDim.y > last) continue;
#pragma unroll
        for (int j = 0; j < kPiece; ++j) sum[j] += x[a][j];
      }
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) sums[threadIdx.y * blockDim.x + threadIdx.x][j] = sum[j];
    __syncthreads();
    if (threadIdx.y == 0 && count > 0) {
      for (unsigned y = 1; y < blockDim.y; ++y)
#pragma unroll
        for (int j = 0; j < kPiece; ++j) sum[j] += sums[y * blockDim.x + threadIdx.x][j];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) sum[j] *= g.scale;
      store_piece<kWide>(out + id * g.d + c, count, sum);
    }
    __syncthreads();
  }
}

// The sort keys: ids without a gradient become the vocabulary size.
template <typename Key>
__global__ void __launch_bounds__(kThreads) key_kernel(Key* __restrict__ keys, const DeviceIds ids, const int64_t rows,
                                                       const int64_t vocabulary, const int64_t padding_idx) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; r < rows; r += step) {
    const int64_t id = ids[r];
    keys[r] = static_cast<Key>(id >= 0 && id < vocabulary && id != padding_idx ? id : vocabulary);
  }
}

template <bool kWide, typename T>
__global__ void __launch_bounds__(kThreads)
    atomic_kernel(float* __restrict__ out, const Gradient<T> g, const DeviceIds ids) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; r < g.rows; r += step) {
    const int64_t id = ids[r];
    if (!g.counts(id)) continue;
    for (int64_t c = static_cast<int64_t>(threadIdx.x) * kPiece; c < g.d; c += blockDim.x * kPiece) {
      const int count = columns_left(c, g.d);
      float x[kPiece];
      g.template load<kWide>(r, c, count, x);
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
        if (i < count) atomicAdd(out + id * g.d + c + i, x[i] * g.scale);
    }
  }
}

// Longer batches have longer chunks, so that joining the partial sums of a frequent id stays cheap. The length depends
// on the number of rows only, so that the order of summation does not depend on the GPU.
int64_t tokens_per_chunk(int64_t rows) {
  int64_t tokens = 8;
  while (16 * tokens * tokens < rows) tokens *= 2;
  return tokens;
}

template <typename Key, typename T>
at::Tensor sort_keys(const Gradient<T>& g, const at::Tensor& ids) {
  const at::Tensor keys = at::empty({g.rows}, ids.options().dtype(c10::CppTypeToScalarType<Key>::value));
  const unsigned grid = grid_size(g.rows, dim3(1, kThreads));
  const auto kernel = key_kernel<Key>;
  kernel<<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(keys.template mutable_data_ptr<Key>(),
                                                                   DeviceIds(ids), g.rows, g.vocabulary, g.padding_idx);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return keys;
}

template <typename T>
at::Tensor sorted_gradient(const Gradient<T>& g, const at::Tensor& ids, const at::TensorOptions& options) {
  const at::Tensor out = at::zeros({g.vocabulary, g.d}, options);
  const at::Tensor keys = g.vocabulary <= std::numeric_limits<int16_t>::max()   ? sort_keys<int16_t>(g, ids)
                          : g.vocabulary <= std::numeric_limits<int32_t>::max() ? sort_keys<int32_t>(g, ids)
                                                                                : sort_keys<int64_t>(g, ids);
  const auto [ordered, row] = at::sort(keys, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const int64_t tokens = tokens_per_chunk(g.rows), chunks = (g.rows + tokens - 1) / tokens;
  const Sorted sorted{DeviceIds(ordered), row.template const_data_ptr<int64_t>(), tokens, chunks};
  const at::Tensor partial = at::empty({chunks, 2, g.d}, options.dtype(at::kFloat));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  T* y = out.template mutable_data_ptr<T>();
  const bool wide = wide_rows(g.grad, g.d, 1, sizeof(T)) && wide_rows(y, g.d, 1, sizeof(T));

  const dim3 block = block_shape(g.d);
  const auto kernel = wide ? chunk_kernel<true, T> : chunk_kernel<false, T>;
  kernel<<<grid_size(chunks, block), block, 0, stream>>>(y, partial.mutable_data_ptr<float>(), g, sorted);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (chunks > 1) {
    const unsigned across = std::min(block.x, 32u);
    const dim3 join_block(across, kThreads / across);
    const int64_t tiles = (g.d + across * kPiece - 1) / (across * kPiece);
    const auto join = wide ? join_kernel<true, T> : join_kernel<false, T>;
    join<<<grid_size((chunks - 1) * tiles, dim3(1, 1)), join_block, 0, stream>>>(y, partial.const_data_ptr<float>(), g,
                                                                                 sorted);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return out;
}

template <typename T>
at::Tensor atomic_gradient(const Gradient<T>& g, const at::Tensor& ids, const at::TensorOptions& options) {
  const at::Tensor sum = at::zeros({g.vocabulary, g.d}, options.dtype(at::kFloat));
  const dim3 block = block_shape(g.d);
  const auto kernel = wide_rows(g.grad, g.d, 1, sizeof(T)) ? atomic_kernel<true, T> : atomic_kernel<false, T>;
  kernel<<<grid_size(g.rows, block), block, 0, c10::cuda::getCurrentCUDAStream()>>>(sum.mutable_data_ptr<float>(), g,
                                                                                    DeviceIds(ids));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return sum.to(options.dtype());
}

at::Tensor embed_backward(const at::Tensor& grad_out, const at::Tensor& ids, int64_t vocabulary, double scale,
                          std::optional<int64_t> padding_idx, double p, const OptionalTensor& seed,
                          bool deterministic) {
  check_embed_backward(grad_out, ids, vocabulary, scale, padding_idx, p, seed, deterministic);
  const c10::cuda::CUDAGuard guard(grad_out.device());
  const at::Tensor grad = grad_out.contiguous(), dense = ids.contiguous();
  if (grad.numel() == 0) return at::zeros({vocabulary, grad.size(-1)}, grad.options());
  return for_element_type(grad.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const Gradient<T> g{
        grad.const_data_ptr<T>(),  dense.numel(),         grad.size(-1), vocabulary, padding_idx.value_or(-1),
        static_cast<float>(scale), DeviceDropout(p, seed)};
    return deterministic ? sorted_gradient(g, dense, grad.options()) : atomic_gradient(g, dense, grad.options());
  });
}

}  // namespace
}  // namespace transformer_fast

TORCH_LIBRARY_IMPL(transformer_fast, CUDA, m) { m.impl("embed_backward", TORCH_FN(transformer_fast::embed_backward)); }
