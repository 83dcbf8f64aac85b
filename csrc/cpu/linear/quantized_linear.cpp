// A linear layer with int8 weights: the weights per output, and the inputs per row, are integers of magnitude at most
// 127 times a scale. The products of the integers are summed exactly, so results are the same for any number of rows
// and threads, and on any vector unit. transformer_fast/reference/quantized_linear.py has the definition.
//
// Weights are in panels of two vectors of outputs, and within a panel in groups of four inputs, in reading order. A
// task multiplies one panel with a block of rows, a few of which are summed in registers at a time.
#include "quantized_rows.h"

#include "ahead.h"
#include "linear_kernels.h"

#include "../parallel.h"
#include "../simd/gelu.h"
#include "../simd/operands.h"

#include <algorithm>
#include <bit>

namespace transformer_fast {
namespace {

using V = Vector<float>;
using Words = Ahead<int32_t>;

constexpr int64_t kPanel = kStepPanel;
constexpr int64_t kBlock = 192;   // rows of a task
constexpr int64_t kFar = 262144;  // results that do not fit a second-level cache of 1 MB
constexpr int64_t kLine = 64 / sizeof(int32_t);

// A panel of packed weights, and the end of its computation.
struct Panel {
  const float* scales;
  const int32_t* sums;
  const int32_t* weights;  // (groups, kPanel) words
  int64_t groups;
  const float* bias;  // kPanel numbers
  Activation activation;
  int64_t columns;  // of the panel that exist
  bool far;         // the results do not fit the second-level cache: their lines are fetched before they are written
};

V activated(V v, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return v < 0 ? V{} : v;  // a NaN passes, as in torch.relu
    case Activation::kGelu:
      return gelu(v);
    case Activation::kGeluTanh:
      return gelu_tanh(v);
    case Activation::kNone:
      break;
  }
  return v;
}

// Converts the sums of one row and half of the panel's outputs to results.
void finish(I sums, float x_scale, const Panel& panel, int half, float* out) {
  const int64_t n = half * kW, count = std::min(kW, panel.columns - n);
  if (count <= 0) return;
  const V sum = __builtin_convertvector(sums, V) * (x_scale * load(panel.scales + n)) + load(panel.bias + n);
  const V v = activated(sum, panel.activation);
  count == kW ? store(out + n, v) : store_some(out + n, v, count);
}

template <typename Products, int kRows>
void multiply(const QuantizedRows& x, int64_t row, const Panel& panel, const Words& ahead, float* out,
              int64_t out_stride) {
  const int32_t* const words = x.words + row * x.stride;
  for (int m = 0; panel.far && m < kRows; ++m)
    for (int half = 0; half < 2; ++half) __builtin_prefetch(out + (row + m) * out_stride + half * kW, 1);
  I sums[kRows][2];
  for (auto& of_row : sums)
    for (int half = 0; half < 2; ++half) of_row[half] = Products::begin(load_words(panel.sums + half * kW));
  for (int64_t group = 0; group < panel.groups; ++group) {
    const int32_t* const at = panel.weights + group * kPanel;
    const I low_words = load_words(at), high_words = load_words(at + kW);
    ahead.fetch(group);
#pragma GCC unroll 2
    for (int plane = 0; plane < Products::kPlanes; ++plane) {
      const I low = Products::weights(low_words, plane), high = Products::weights(high_words, plane);
#pragma GCC unroll 12
      for (int m = 0; m < kRows; ++m) {
        const int32_t inputs = words[m * x.stride + group * Products::kPlanes + plane];
        sums[m][0] = Products::add(sums[m][0], inputs, low);
        sums[m][1] = Products::add(sums[m][1], inputs, high);
      }
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int half = 0; half < 2; ++half)
      finish(sums[m][half], x.scales[row + m], panel, half, out + (row + m) * out_stride);
}

#if defined(TRANSFORMER_FAST_TILES)
// One or two tiles of rows with both halves of a panel: sums in tiles 0 to 3, inputs in 4 and 5, weights in 6 and 7.
template <int kTiles>
void multiply_tiles(const QuantizedRows& x, int64_t row, int64_t rows, const Panel& panel, float* out, int64_t stride) {
  constexpr int64_t kBytes = sizeof(int32_t), kSums = kTileRows * kPanel;
  const int32_t *const low = x.words + row * x.stride, *const high = low + kTileRows * x.stride;
  alignas(64) int32_t sums[kTiles * kSums];
  zero_tile<0>(), zero_tile<1>();
  if constexpr (kTiles == 2) zero_tile<2>(), zero_tile<3>();
  for (int64_t group = 0; group < panel.groups; group += kTileGroups) {
    const int32_t* const weights = panel.weights + group * kPanel;
    for (int64_t word = 0; word < kTileGroups * kPanel; word += kLine)
      __builtin_prefetch(weights + kTileGroups * kPanel + word);
    load_tile<6>(weights, kPanel * kBytes), load_tile<7>(weights + kW, kPanel * kBytes);
    load_tile<4>(low + group, x.stride * kBytes);
    multiply_tile<0, 4, 6>(), multiply_tile<1, 4, 7>();
    if constexpr (kTiles == 2) {
      load_tile<5>(high + group, x.stride * kBytes);
      multiply_tile<2, 5, 6>(), multiply_tile<3, 5, 7>();
    }
  }
  store_tile<0>(sums, kPanel * kBytes), store_tile<1>(sums + kW, kPanel * kBytes);
  if constexpr (kTiles == 2)
    store_tile<2>(sums + kSums, kPanel * kBytes), store_tile<3>(sums + kSums + kW, kPanel * kBytes);
  for (int64_t m = 0; m < rows; ++m)
    for (int half = 0; half < 2; ++half)
      finish(load_words(sums + m * kPanel + half * kW), x.scales[row + m], panel, half, out + (row + m) * stride);
}
#endif

// Multiplies rows `row` to `end` with a panel.
template <typename Products>
void multiply_rows(const QuantizedRows& x, int64_t row, int64_t end, const Panel& panel, float* out, int64_t stride) {
  if constexpr (Products::kRows == 1) {
    for_passes(row, end, panel.weights, panel.groups, [&](int64_t from, auto rows, const Words& ahead) {
      multiply<Products, rows>(x, from, panel, ahead, out, stride);
    });
  }
#if defined(TRANSFORMER_FAST_TILES)
  if constexpr (Products::kRows == kTileRows) {
    for (; end - row > kTileRows; row = std::min(row + 2 * kTileRows, end))
      multiply_tiles<2>(x, row, std::min(2 * kTileRows, end - row), panel, out, stride);
    if (row < end) multiply_tiles<1>(x, row, end - row, panel, out, stride);
  }
#endif
}

template <typename Products>
void linear(const PackedLinearParams<float>& p) {
  const int64_t rows = p.rows, groups = groups_of(p.depth), blocks = (rows + kBlock - 1) / kBlock;
  const int64_t panels = (p.outputs + kPanel - 1) / kPanel;
  const QuantizedRows x = quantize_rows<Products>(p.x, rows, p.depth);
  const auto start_of = [&](int64_t block) {
    return block == blocks ? rows : block * rows / blocks / Products::kRows * Products::kRows;
  };
  parallel_for(0, blocks * panels, 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const typename Products::Session session(rows);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task / panels, first = task % panels * kPanel;
      const int64_t columns = std::min(kPanel, p.outputs - first);
      const auto words = static_cast<const int32_t*>(p.packed) + first * (kPanelHeader + groups);
      float bias[kPanel] = {};
      if (p.bias) std::copy_n(p.bias + first, columns, bias);
      const Panel panel{reinterpret_cast<const float*>(words),
                        words + kPanel,
                        words + kPanelHeader * kPanel,
                        groups,
                        bias,
                        p.activation,
                        columns,
                        rows * p.outputs >= kFar};
      multiply_rows<Products>(x, start_of(block), start_of(block + 1), panel, p.out + first, p.outputs);
    }
  });
}

template <typename Products>
void pack(const float* const* rows, int64_t outputs, int64_t depth, void* packed) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel, groups = groups_of(depth);
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    static thread_local GrowingBuffer<float> words_buffer;
    float* const words = words_buffer.reserve(kPanel * groups);
    for (int64_t panel = begin; panel < end; ++panel) {
      float* const block = static_cast<float*>(packed) + panel * (kPanelHeader + groups) * kPanel;
      const int64_t columns = std::min(kPanel, outputs - panel * kPanel);
      if (columns < kPanel) std::fill_n(block, (kPanelHeader + groups) * kPanel, 0.0f);
      for (int64_t n = 0; n < columns; ++n) {
        const auto bytes = reinterpret_cast<int8_t*>(words + n * groups);
        const Quantized row = quantize(rows[panel * kPanel + n], depth, bytes, groups * kGroup);
        block[n] = row.scale, block[kPanel + n] = std::bit_cast<float>(row.sum);
      }
      const auto row_at = [&](int64_t n, int64_t k, int64_t count) { return load_some(words + n * groups + k, count); };
      transpose_rows<float>(columns, groups, row_at, [&](int64_t k, int64_t n, V v) {
        const I stored = Products::stored(reinterpret_cast<I>(v));
        store(block + (kPanelHeader + k) * kPanel + n, reinterpret_cast<V>(stored));
      });
    }
  });
}

#if defined(TRANSFORMER_FAST_TILES)
// Few rows would leave most of a tile idle.
void linear_by_tiles(const PackedLinearParams<float>& p) {
  p.rows <= 8 ? linear<VnniBytes>(p) : linear<TileProducts>(p);
}
#endif

template <typename Products>
PackedKernels<float> kernels_of(void (*multiply)(const PackedLinearParams<float>&) = &linear<Products>) {
  return {&pack<Products>, multiply};
}

}  // namespace

int64_t int8_groups(int64_t depth) { return groups_of(depth); }

PackedKernels<float> int8_kernels() {
#if defined(TRANSFORMER_FAST_TILES)
  if (has_tiles() && VnniBytes::is_there()) return kernels_of<VnniBytes>(&linear_by_tiles);
#endif
#if defined(__AVX512F__)
  if (VnniBytes::is_there()) return kernels_of<VnniBytes>();
#endif
  return kernels_of<WidenedBytes>();
}

}  // namespace transformer_fast
