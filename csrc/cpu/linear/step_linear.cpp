// A linear layer for the few rows of a decoding step. Such a product is limited by reading the weight, so the weight is
// stored in reading order: panels of two vectors of outputs, input after input. While a block of a panel is multiplied
// with all rows, the next block is fetched (K. Goto and R. van de Geijn, "Anatomy of high-performance matrix
// multiplication", 2008, with the small matrix in the role of their packed one).
#include "ahead.h"
#include "linear_kernels.h"

#include "../buffer.h"
#include "../parallel.h"

#include <algorithm>

namespace transformer_fast {
namespace {

using V = Vector<float>;

constexpr int64_t kW = kLanes<float>, kPanel = kStepPanel;
constexpr int64_t kDepth = 64;  // inputs per block: weights, next weights and rows fit the first-level cache
constexpr int64_t kLine = 64 / sizeof(float);

struct InputRows {
  const float* data;
  int64_t stride;
};

// Begin and end of the computation of a panel's results.
struct Edges {
  bool first, last;
  const float* bias;  // kPanel numbers, or null
  bool relu;
  int64_t columns;  // of the panel that exist
};

// Stores a vector of a block's sums as results, or adds it to them. Each block is summed separately, because sums of
// sums round less than one long sum.
inline void add_sums(V v, float* to, int64_t n, const Edges& edges) {
  const int64_t count = std::min(kW, edges.columns - n);
  if (count <= 0) return;
  if (!edges.first)
    v += load_some(to + n, count);
  else if (edges.bias)
    v += load(edges.bias + n);
  if (edges.last && edges.relu) v = v < 0 ? V{} : v;  // a NaN passes, as in torch.relu
  store_some(to + n, v, count);
}

// out (kRows, columns) += x (kRows, depth) weights (depth, kPanel)
template <int kRows>
void multiply_block(InputRows x, const float* weights, const Ahead<float>& next, int64_t depth, float* out,
                    int64_t out_stride, const Edges& edges) {
  V sums[kRows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const V low = load(weights + k * kPanel), high = load(weights + k * kPanel + kW);
    next.fetch(k);
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      const V element = broadcast(x.data[m * x.stride + k]);
      sums[m][0] = fma(element, low, sums[m][0]);
      sums[m][1] = fma(element, high, sums[m][1]);
    }
  }
  if (edges.columns == kPanel && !edges.first && !edges.last) {  // the usual case, without a test per vector
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      float* const to = out + m * out_stride;
      store(to, sums[m][0] + load(to));
      store(to + kW, sums[m][1] + load(to + kW));
    }
    return;
  }
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m) {
    add_sums(sums[m][0], out + m * out_stride, 0, edges);
    add_sums(sums[m][1], out + m * out_stride, kW, edges);
  }
}

// Copies rows for a thread, because rows a power of two apart would share a few sets of the cache.
InputRows copy_rows(const float* x, int64_t rows, int64_t depth) {
  if (rows == 1) return {x, depth};
  static thread_local GrowingBuffer<float> buffer;
  const int64_t stride = depth + kLine;
  float* const copy = buffer.reserve(rows * stride);
  for (int64_t m = 0; m < rows; ++m) std::copy_n(x + m * depth, depth, copy + m * stride);
  return {copy, stride};
}

}  // namespace

void pack_step_weight(const float* const* rows, int64_t outputs, int64_t depth, void* packed) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const float* const* from = rows + panel * kPanel;
      const int64_t columns = std::min(kPanel, outputs - panel * kPanel);
      float* block = static_cast<float*>(packed) + panel * depth * kPanel;
      if (columns < kPanel) std::fill_n(block, depth * kPanel, 0.0f);
      const auto row_at = [&](int64_t n, int64_t k, int64_t count) { return load_some(from[n] + k, count); };
      transpose_rows<float>(columns, depth, row_at,
                            [&](int64_t k, int64_t n, Vector<float> v) { store(block + k * kPanel + n, v); });
    }
  });
}

void step_linear(const PackedLinearParams<float>& p) {
  const int64_t rows = p.rows, depth = p.depth, outputs = p.outputs, panels = (outputs + kPanel - 1) / kPanel;
  const float *const weights = static_cast<const float*>(p.packed), *const of_bias = p.bias;
  float* const to = p.out;
  const bool relu = p.activation == Activation::kRelu;
  const int64_t passes = (rows + kMostRows - 1) / kMostRows;
  const int64_t share = (kPanel + passes - 1) / passes;  // of the next weights, fetched in a pass
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    const InputRows copied = copy_rows(p.x, rows, depth);
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
          const int64_t fetched = pass * count * share;  // a part in each pass
          const Ahead<float> ahead{next + fetched, fetched < count * kPanel ? share : 0};
          with_rows(until - m, [&](auto constant) {
            multiply_block<constant>(part, block, ahead, count, result, outputs, edges);
          });
          m = until;
        }
      }
    }
  });
}

}  // namespace transformer_fast
