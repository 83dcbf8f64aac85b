// A linear layer for the few rows of a decoding step. Such a product is bound by reading the weight, so the weight lies
// in the order in which it is read: panels of two vectors of outputs, in each one input after the other. While a block
// of a panel is multiplied with all rows, the next is fetched (K. Goto and R. van de Geijn, "Anatomy of high-performance
// matrix multiplication", 2008, with the small matrix in the place of their packed one).
#include "step_linear.h"

#include "operands.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <vector>

namespace transformer_fast {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using V = Vector<float>;

constexpr int64_t kW = kLanes<float>, kPanel = 2 * kW;
constexpr int64_t kDepth = 64;  // inputs at a time: their weights, the next ones and the rows stay in the first cache
constexpr int64_t kLine = 64 / sizeof(float);
#if defined(__AVX512F__)
constexpr int kMostRows = 12;  // 12 x 2 sums, 2 vectors of weights and a broadcast of 32 registers
#else
constexpr int kMostRows = 6;
#endif

struct InputRows {
  const float* data;
  int64_t stride;
};

// How a panel's results begin and end.
struct Edges {
  bool first, last;
  const float* bias;  // kPanel numbers, or null
  bool relu;
  int64_t columns;  // of the panel that exist
};

// out (kRows, columns) += x (kRows, depth) weights (depth, kPanel); kLines lines of what comes next are fetched a step.
// A block is summed by itself: sums of sums round less than one long sum.
template <int kRows, int kLines>
void multiply_block(InputRows x, const float* weights, const float* next, int64_t depth, float* out, int64_t out_stride,
              const Edges& edges) {
  V sums[kRows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + (k * kLines + line) * kLine, 0, 3);
    const V low = widen(weights + k * kPanel), high = widen(weights + k * kPanel + kW);
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      const V element = broadcast(x.data[m * x.stride + k]);
      sums[m][0] += element * low;
      sums[m][1] += element * high;
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      const int64_t count = std::min(kW, edges.columns - n * kW);
      if (count <= 0) continue;
      float* to = out + m * out_stride + n * kW;
      V v = sums[m][n];
      if (!edges.first)
        v += load_some(to, count);
      else if (edges.bias)
        v += widen(edges.bias + n * kW);
      if (edges.last && edges.relu) v = v < 0 ? V{} : v;  // a NaN passes, as in torch.relu
      store_some(to, v, count);
    }
}

template <int kRows, int kLines>
void multiply_some(int64_t rows, InputRows x, const float* weights, const float* next, int64_t depth, float* out,
                   int64_t out_stride, const Edges& edges) {
  if constexpr (kRows > 1)
    if (rows < kRows)
      return multiply_some<kRows - 1, kLines>(rows, x, weights, next, depth, out, out_stride, edges);
  multiply_block<kRows, kLines>(x, weights, next, depth, out, out_stride, edges);
}

// The rows of a thread's own copy: rows a power of two apart would share a few sets of the cache.
class OwnRows {
 public:
  InputRows copy(const float* x, int64_t rows, int64_t depth) {
    if (rows == 1) return {x, depth};
    const int64_t stride = depth + kLine;
    if (rows * stride > size_) {
      storage_.reset(new (std::align_val_t(64)) float[rows * stride]);
      size_ = rows * stride;
    }
    for (int64_t m = 0; m < rows; ++m) std::copy_n(x + m * depth, depth, storage_.get() + m * stride);
    return {storage_.get(), stride};
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<float[], Free> storage_;
  int64_t size_ = 0;
};

Tensor pack_step_weight(at::TensorList weights) {
  const int64_t depth = weights[0].size(1);
  std::vector<Tensor> kept;
  std::vector<const float*> rows;
  for (const Tensor& weight : weights) {
    kept.push_back(weight.contiguous());
    for (int64_t n = 0; n < weight.size(0); ++n) rows.push_back(kept.back().const_data_ptr<float>() + n * depth);
  }
  const int64_t outputs = static_cast<int64_t>(rows.size()), panels = (outputs + kPanel - 1) / kPanel;
  const Tensor packed = at::cpu::empty({panels, depth, kPanel}, weights[0].options());
  float* to = packed.mutable_data_ptr<float>();
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const float* const* from = rows.data() + panel * kPanel;
      const int64_t columns = std::min(kPanel, outputs - panel * kPanel);
      float* block = to + panel * depth * kPanel;
      if (columns < kPanel) std::fill_n(block, depth * kPanel, 0.0f);
      const auto row_at = [&](int64_t n, int64_t k, int64_t count) { return load_some(from[n] + k, count); };
      transpose_rows<float>(columns, depth, row_at, [&](int64_t k, int64_t n, Vector<float> v) {
        narrow(block + k * kPanel + n, v);
      });
    }
  });
  return packed;
}

}  // namespace

Tensor step_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs, bool relu) {
  const Tensor input = x.contiguous(), added = bias ? bias->contiguous() : Tensor();
  const int64_t depth = packed.size(1), panels = packed.size(0), rows = input.numel() / depth;
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  const Tensor out = at::cpu::empty(sizes, x.options());
  const float *from = input.const_data_ptr<float>(), *weights = packed.const_data_ptr<float>();
  const float* of_bias = bias ? added.const_data_ptr<float>() : nullptr;
  float* to = out.mutable_data_ptr<float>();
  const int64_t passes = (rows + kMostRows - 1) / kMostRows;
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    static thread_local OwnRows own;
    const InputRows copied = own.copy(from, rows, depth);
    for (int64_t panel = begin; panel < end; ++panel) {
      float last_bias[kPanel] = {};
      Edges edges{true, false, nullptr, relu, std::min(kPanel, outputs - panel * kPanel)};
      if (of_bias) {
        std::copy_n(of_bias + panel * kPanel, edges.columns, last_bias);
        edges.bias = last_bias;
      }
      for (int64_t k = 0; k < depth; k += kDepth) {
        const int64_t count = std::min(kDepth, depth - k);
        edges.first = k == 0, edges.last = k + count == depth;
        const float* block = weights + (panel * depth + k) * kPanel;
        const float* next = edges.last && panel + 1 == end ? block : block + count * kPanel;
        for (int64_t pass = 0, m = 0; pass < passes; ++pass) {
          const int64_t until = (pass + 1) * rows / passes;
          const InputRows part{copied.data + m * copied.stride + k, copied.stride};
          float* result = to + m * outputs + panel * kPanel;
          if (passes == 1)
            multiply_some<kMostRows, 2>(until - m, part, block, next, count, result, outputs, edges);
          else if (pass < 2)
            multiply_some<kMostRows, 1>(until - m, part, block, next + pass * count * kLine, count, result, outputs,
                                        edges);
          else
            multiply_some<kMostRows, 0>(until - m, part, block, next, count, result, outputs, edges);
          m = until;
        }
      }
    }
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def("pack_step_weight(Tensor[] weights) -> Tensor");
  m.def("step_linear(Tensor x, Tensor packed, Tensor? bias, int outputs, bool relu) -> Tensor");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("pack_step_weight", pack_step_weight);
  m.impl("step_linear", step_linear);
}

}  // namespace transformer_fast
