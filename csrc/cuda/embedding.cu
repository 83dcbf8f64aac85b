// Embedding on the GPU: gather * scale + positional encoding + dropout in one pass, and the sinusoidal table.
//
// An id outside the vocabulary, or a position outside the table, is never read. The output row of such an id is NaN,
// and the id contributes no gradient. So the error shows in the loss, without a host synchronisation, a device
// assertion or a lost CUDA context.
//
// A thread processes one piece of eight columns: for 16-bit types 16 bytes read and 16 written. 1280 threads fit on a
// multiprocessor (at 48 registers each). A thread waits for an id and then for its row, about 1.2 us. So the 132
// multiprocessors of an H100 can move 4.5 TB/s, more than a copy does.
#include "rows.cuh"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace transformer_fast {
namespace {

// A matrix of `rows` rows, read at any strides.
template <typename T>
struct DeviceMatrix {
  const T* data = nullptr;
  int64_t rows = 0, row_stride = 0, column_stride = 1;

  DeviceMatrix() = default;
  explicit DeviceMatrix(const at::Tensor& m)
      : data(m.const_data_ptr<T>()), rows(m.size(0)), row_stride(m.stride(0)), column_stride(m.stride(1)) {}

  bool wide() const { return data == nullptr || wide_rows(data, row_stride, column_stride, sizeof(T)); }
};

// out[r] = dropout(source[ids[r]] * scale + table[offset + offsets[r / length] + r % length]); without ids, row r of
// the source; without offsets, none.
template <bool kWide, typename T, typename Table>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(T* __restrict__ out, const Rows rows, const DeviceMatrix<T> source, const DeviceIds ids,
                  const float scale, const DeviceMatrix<Table> table, const int64_t offset, const DeviceIds offsets,
                  const DeviceDropout dropout) {
  const bool gather = ids.given();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; r < rows.count; r += step) {
    const int64_t from = gather ? ids[r] : r;
    // A 64-bit division costs as much as the dropout; nearly every batch has fewer than 2^31 rows.
    const int64_t sequence = rows.count < (int64_t{1} << 31)
                                 ? static_cast<int64_t>(static_cast<uint32_t>(r) / static_cast<uint32_t>(rows.length))
                                 : r / rows.length;
    const int64_t position = offset + (offsets.given() ? offsets[sequence] : 0) + r - sequence * rows.length;
    const bool valid = from >= 0 && from < source.rows && (!table.data || (position >= 0 && position < table.rows));
    for (int64_t c = static_cast<int64_t>(threadIdx.x) * kPiece; c < rows.d; c += blockDim.x * kPiece) {
      const int count = columns_left(c, rows.d);
      float x[kPiece];
      if (valid) {
        const T* first = source.data + from * source.row_stride + c * source.column_stride;
        load_piece<kWide>(first, source.column_stride, count, x);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) x[i] *= scale;
        if (table.data) {
          float t[kPiece];
          const Table* encoding = table.data + position * table.row_stride + c * table.column_stride;
          load_piece<kWide>(encoding, table.column_stride, count, t);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) x[i] += t[i];
        }
        dropout.apply(r, c, x);
      } else {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) x[i] = __int_as_float(0x7fc00000);
      }
      store_piece<kWide>(out + r * rows.d + c, count, x);
    }
  }
}

template <typename T, typename Table>
void launch_encode(const at::Tensor& out, const Rows& rows, const at::Tensor& source, const DeviceIds& ids,
                   double scale, const OptionalTensor& table, int64_t offset, const DeviceIds& offsets,
                   const DeviceDropout& dropout) {
  const DeviceMatrix<T> from(source);
  const DeviceMatrix<Table> encoding = table ? DeviceMatrix<Table>(*table) : DeviceMatrix<Table>();
  T* y = out.mutable_data_ptr<T>();
  const bool wide = from.wide() && encoding.wide() && wide_rows(y, rows.d, 1, sizeof(T));
  const dim3 block = block_shape(rows.d);
  const auto kernel = wide ? encode_kernel<true, T, Table> : encode_kernel<false, T, Table>;
  kernel<<<grid_size(rows.count, block), block, 0, c10::cuda::getCurrentCUDAStream()>>>(
      y, rows, from, ids, static_cast<float>(scale), encoding, offset, offsets, dropout);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void encode(const at::Tensor& out, const Rows& rows, const at::Tensor& source, const DeviceIds& ids, double scale,
            const OptionalTensor& table, int64_t offset, const OptionalTensor& offsets, double p,
            const OptionalTensor& seed) {
  const DeviceDropout dropout(p, seed);
  const at::Tensor dense = offsets ? offsets->contiguous() : at::Tensor();
  const DeviceIds starts = offsets ? DeviceIds(dense) : DeviceIds();
  for_element_type(source.scalar_type(), [&](auto element) {
    using T = decltype(element);
    if (table && table->scalar_type() == source.scalar_type())
      launch_encode<T, T>(out, rows, source, ids, scale, table, offset, starts, dropout);
    else
      launch_encode<T, float>(out, rows, source, ids, scale, table, offset, starts, dropout);
  });
}

at::Tensor embed(const at::Tensor& ids, const at::Tensor& weight, const OptionalTensor& table, double scale,
                 int64_t offset, const OptionalTensor& offsets, std::optional<int64_t> /* padding_idx */, double p,
                 const OptionalTensor& seed, bool /* deterministic */) {
  check_embed(ids, weight, table, scale, offset, offsets, {}, p, seed, true);
  const Rows rows(ids.sizes(), weight.size(1));
  const c10::cuda::CUDAGuard guard(weight.device());
  auto shape = ids.sizes().vec();
  shape.push_back(rows.d);
  const at::Tensor out = at::empty(shape, weight.options());
  if (rows.empty()) return out;
  const at::Tensor dense = ids.contiguous();
  encode(out, rows, weight, DeviceIds(dense), scale, table, offset, offsets, p, seed);
  return out;
}

at::Tensor add_positional(const at::Tensor& x, const OptionalTensor& table, int64_t offset,
                          const OptionalTensor& offsets, double p, const OptionalTensor& seed) {
  check_add_positional(x, table, offset, offsets, p, seed);
  const Rows rows(x.sizes().slice(0, x.dim() - 1), x.size(-1));
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor out = at::empty(x.sizes(), x.options());
  if (rows.empty()) return out;
  encode(out, rows, x.reshape({rows.count, rows.d}), DeviceIds(), 1.0, table, offset, offsets, p, seed);
  return out;
}

__global__ void __launch_bounds__(kThreads)
    positional_kernel(float* __restrict__ table, const int64_t length, const int64_t d) {
  const int64_t pairs = (d + 1) / 2, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < length * pairs; i += step) {
    const int64_t row = i / pairs, pair = i % pairs;
    double sine, cosine;
    sincos(row * pow(10000.0, -2.0 * pair / d), &sine, &cosine);
    table[row * d + 2 * pair] = static_cast<float>(sine);
    if (2 * pair + 1 < d) table[row * d + 2 * pair + 1] = static_cast<float>(cosine);
  }
}

void fill_positional_table(const at::Tensor& table) {
  check_positional_table(table);
  const c10::cuda::CUDAGuard guard(table.device());
  const int64_t threads = table.size(0) * ((table.size(1) + 1) / 2);
  if (threads == 0) return;
  const unsigned grid = grid_size(threads, dim3(1, kThreads));
  positional_kernel<<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(table.mutable_data_ptr<float>(),
                                                                              table.size(0), table.size(1));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace transformer_fast

TORCH_LIBRARY_IMPL(transformer_fast, CUDA, m) {
  m.impl("embed", TORCH_FN(transformer_fast::embed));
  m.impl("add_positional", TORCH_FN(transformer_fast::add_positional));
  m.impl("fill_positional_table", TORCH_FN(transformer_fast::fill_positional_table));
}
