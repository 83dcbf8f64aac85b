// A linear layer in bfloat16 for few rows, with AVX512-BF16: sums of products of pairs, in float. Weights are in panels
// of two vectors of outputs, and within a panel in pairs of inputs, in reading order.
#include "ahead.h"
#include "linear_kernels.h"

#include "../buffer.h"
#include "../parallel.h"
#include "../simd/operands.h"

#include <algorithm>
#include <cstring>

namespace transformer_fast {

#if defined(__AVX512BF16__)
namespace {

using V = Vector<float>;
using B = c10::BFloat16;

constexpr int64_t kW = kLanes<float>, kPanel = kStepPanel;

int64_t groups_of_pairs(int64_t depth) { return (depth + 1) / 2; }

struct NarrowPanel {
  const int32_t* weights;  // (groups, kPanel) words
  int64_t groups;
  V bias[2];
  B* out;  // of the first row
  int64_t out_stride, columns;
};

template <int kRows>
void multiply_pairs(const int32_t* x, int64_t stride, int64_t row, const NarrowPanel& panel,
                    const Ahead<int32_t>& ahead) {
  const int32_t* const words = x + row * stride;
  V sums[kRows][2] = {};
  for (int64_t group = 0; group < panel.groups; ++group) {
    const auto at = reinterpret_cast<const float*>(panel.weights + group * kPanel);
    const V low = load(at), high = load(at + kW);
    ahead.fetch(group);
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      Pair inputs;
      std::memcpy(&inputs, words + m * stride + group, sizeof(inputs));
      sums[m][0] = add_product(sums[m][0], inputs, low);
      sums[m][1] = add_product(sums[m][1], inputs, high);
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int half = 0; half < 2; ++half) {
      const int64_t n = half * kW, count = std::min(kW, panel.columns - n);
      if (count > 0) store_some(panel.out + (row + m) * panel.out_stride + n, sums[m][half] + panel.bias[half], count);
    }
}

// Copies a row to whole words.
void copy_pairs(const B* row, int64_t depth, int32_t* words) {
  words[groups_of_pairs(depth) - 1] = 0;
  std::memcpy(words, row, depth * sizeof(B));
}

void narrow_linear(const PackedLinearParams<B>& p) {
  const int64_t groups = groups_of_pairs(p.depth), panels = (p.outputs + kPanel - 1) / kPanel;
  const int64_t stride = (groups + kW - 1) / kW * kW + kW;  // not a power of two
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    static thread_local GrowingBuffer<int32_t> buffer;
    int32_t* const words = buffer.reserve(p.rows * stride);
    for (int64_t row = 0; row < p.rows; ++row) copy_pairs(p.x + row * p.depth, p.depth, words + row * stride);
    for (int64_t n = begin; n < end; ++n) {
      const auto weights = static_cast<const int32_t*>(p.packed) + n * groups * kPanel;
      NarrowPanel panel{weights, groups, {}, p.out + n * kPanel, p.outputs, std::min(kPanel, p.outputs - n * kPanel)};
      for (int half = 0; p.bias && half < 2; ++half)
        panel.bias[half] =
            load_some(p.bias + n * kPanel + half * kW, std::clamp<int64_t>(panel.columns - half * kW, 0, kW));
      for_passes(0, p.rows, weights, groups, [&](int64_t from, auto rows, const Ahead<int32_t>& ahead) {
        multiply_pairs<rows>(words, stride, from, panel, ahead);
      });
    }
  });
}

void pack_narrow(const B* const* rows, int64_t outputs, int64_t depth, void* packed) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel, groups = groups_of_pairs(depth);
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    static thread_local GrowingBuffer<float> buffer;
    float* const words = buffer.reserve(kPanel * groups);
    for (int64_t panel = begin; panel < end; ++panel) {
      float* const block = static_cast<float*>(packed) + panel * groups * kPanel;
      const int64_t columns = std::min(kPanel, outputs - panel * kPanel);
      if (columns < kPanel) std::fill_n(block, groups * kPanel, 0.0f);
      for (int64_t n = 0; n < columns; ++n)
        copy_pairs(rows[panel * kPanel + n], depth, reinterpret_cast<int32_t*>(words + n * groups));
      const auto row_at = [&](int64_t n, int64_t k, int64_t count) { return load_some(words + n * groups + k, count); };
      transpose_rows<float>(columns, groups, row_at,
                            [&](int64_t k, int64_t n, V v) { store(block + k * kPanel + n, v); });
    }
  });
}

}  // namespace

PackedKernels<c10::BFloat16> narrow_kernels() { return {&pack_narrow, &narrow_linear}; }
#else
PackedKernels<c10::BFloat16> narrow_kernels() { return {}; }
#endif

}  // namespace transformer_fast
