// Inputs of a linear layer with quantised weights: rows, quantised in the order of their multiplication.
#pragma once

#include "../buffer.h"
#include "../parallel.h"
#include "../simd/quantized_products.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

namespace transformer_fast {
namespace {

using I = Int32Vector;

constexpr int64_t kW = kLanes<float>;

constexpr int64_t kGroup = 4;  // bytes in a word

// Number of groups of an output's weights, rounded up to whole reads by zeros.
int64_t groups_of(int64_t depth) {
  constexpr int64_t bytes = kGroup * kGroupsAtOnce;
  return (depth + bytes - 1) / bytes * kGroupsAtOnce;
}

struct Quantized {
  float scale;
  int32_t sum;  // of integers
};

// Quantises x to q * scale: 127 for its largest magnitude, and zeros up to `padded`. The scale is NaN for a row that is
// not finite, and 0 if it would be too small to divide by.
Quantized quantize(const float* x, int64_t depth, int8_t* q, int64_t padded) {
  I greatest[4] = {};  // magnitudes as integers, ordered with infinity and NaN last
  for_columns<float>(0, depth, [&](int64_t c, auto count, int slot) {
    const I magnitude = reinterpret_cast<I>(load(x + c, count)) & 0x7fffffff;
    greatest[slot] = magnitude > greatest[slot] ? magnitude : greatest[slot];
  });
  int32_t bits = 0;
  for (const I& v : greatest)
    for (int64_t lane = 0; lane < kW; ++lane) bits = std::max(bits, v[lane]);
  const float most = std::bit_cast<float>(bits), factor = 127 / most;
  std::fill_n(q + depth, padded - depth, int8_t{0});
  if (!(std::isfinite(most) && std::isfinite(factor))) {
    std::fill_n(q, depth, int8_t{0});
    return {std::isfinite(most) ? 0 : std::numeric_limits<float>::quiet_NaN(), 0};
  }
  I sums[4] = {};
  constexpr float kInteger = 0x1.8p23f;  // this plus a small number is an integer, ties to even
  for_columns<float>(0, depth, [&](int64_t c, auto count, int slot) {
    const I integers = reinterpret_cast<I>(load(x + c, count) * factor + kInteger) - std::bit_cast<int32_t>(kInteger);
    sums[slot] += integers;
    const ByteVector bytes = low_bytes(integers);
    std::memcpy(q + c, &bytes, count);
  });
  return {most / 127, sum(sums)};
}

// The rows of a call: the words of a group, one per plane (see quantized_products.h), are adjacent; and the scales.
struct QuantizedRows {
  const int32_t* words;
  int64_t stride;
  const float* scales;
};

I load_words(const int32_t* p) {
  I v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

void store_words(int32_t* p, I v) { std::memcpy(p, &v, sizeof(v)); }

// The words of each plane in turn.
template <std::size_t... kLane>
void interleave(const I (&planes)[1], int32_t* to, std::index_sequence<kLane...>) {
  store_words(to, planes[0]);
}

template <std::size_t... kLane>
void interleave(const I (&planes)[2], int32_t* to, std::index_sequence<kLane...>) {
  constexpr auto from = [](std::size_t word) { return static_cast<int32_t>(word / 2 + word % 2 * kW); };
  store_words(to, __builtin_shuffle(planes[0], planes[1], I{from(kLane)...}));
  store_words(to + kW, __builtin_shuffle(planes[0], planes[1], I{from(kLane + kW)...}));
}

template <typename Products>
QuantizedRows quantize_rows(const float* x, int64_t rows, int64_t depth) {
  static thread_local GrowingBuffer<int32_t> words_buffer;
  static thread_local GrowingBuffer<float> scales_buffer;
  constexpr int64_t planes = Products::kPlanes;
  const int64_t padded = (groups_of(depth) + kW - 1) / kW * kW;
  const int64_t stride = planes * padded + kW;  // not a power of two
  // A tile also reads rows past the last one; their results are not stored.
  int32_t* const words = words_buffer.reserve((rows + Products::kRows) * stride);
  float* const scales = scales_buffer.reserve(rows);
  parallel_for(0, rows, std::max<int64_t>(1, 32768 / depth), [&](int64_t begin, int64_t end) {
    static thread_local GrowingBuffer<float> groups_buffer;
    float* const groups = groups_buffer.reserve(padded);
    for (int64_t row = begin; row < end; ++row) {
      scales[row] = quantize(x + row * depth, depth, reinterpret_cast<int8_t*>(groups), kGroup * padded).scale;
      for (int64_t group = 0; group < padded; group += kW) {
        I in_planes[planes];
        Products::planes(reinterpret_cast<I>(load(groups + group)), in_planes);
        interleave(in_planes, words + row * stride + planes * group, std::make_index_sequence<kW>());
      }
    }
  });
  return {words, stride, scales};
}

}  // namespace
}  // namespace transformer_fast
