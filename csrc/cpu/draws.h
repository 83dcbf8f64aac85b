// Dropout on the CPU: the 16-bit draws of a stretch of one row, by the elementwise contract of philox.h.
//
// The draws go through a small buffer that stays in the first-level cache: making them (64-bit integer lanes) and
// using them (lanes of the element's type) are then two plain loops, and no kernel knows how a counter is laid out.

#pragma once

#include "philox.h"
#include "vec.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace transformer_fast {
namespace {

typedef uint64_t CounterVector __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kCounters = kVectorBytes / 8;

// Columns handled at a time, and the room their draws take: whole vectors are written, so a few more than asked for.
constexpr int64_t kDrawColumns = 1024;
constexpr int64_t kDrawRoom = kDrawColumns + 2 * kCounters * kDrawsPerCall;

// The low 32 bits of every lane times a 32-bit constant.
inline CounterVector multiply(CounterVector v, uint32_t constant) {
#if defined(__AVX512F__)
  return reinterpret_cast<CounterVector>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(v), _mm512_set1_epi64(constant)));
#elif defined(__AVX2__)
  return reinterpret_cast<CounterVector>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(v), _mm256_set1_epi64x(constant)));
#else
  return (v & 0xffffffff) * constant;
#endif
}

// Interleaves two vectors: low gets the first halves of both, high the second halves.
inline void interleave(CounterVector a, CounterVector b, CounterVector& low, CounterVector& high) {
#if defined(__AVX512F__)
  low = __builtin_shuffle(a, b, CounterVector{0, 8, 1, 9, 2, 10, 3, 11});
  high = __builtin_shuffle(a, b, CounterVector{4, 12, 5, 13, 6, 14, 7, 15});
#else
  low = __builtin_shuffle(a, b, CounterVector{0, 4, 1, 5});
  high = __builtin_shuffle(a, b, CounterVector{2, 6, 3, 7});
#endif
}

// Philox 4x32-10 of 2 x kCounters calls (c0 counts up from first_call, c1 and c2 hold the row), 8 draws each. One
// 32-bit word sits in the low half of each 64-bit lane, where the multiplication wants it; two independent vectors
// hide its latency. The upper halves carry garbage that no multiplication reads.
inline void draw_batch(uint64_t seed, uint64_t row, uint64_t first_call, uint16_t* draws) {
  CounterVector c0[2], c1[2], c2[2], c3[2];
  for (int u = 0; u < 2; ++u) {
    for (int64_t lane = 0; lane < kCounters; ++lane) c0[u][lane] = first_call + u * kCounters + lane;
    c1[u] = CounterVector{} + (row & 0xffffffff);
    c2[u] = CounterVector{} + (row >> 32);
    c3[u] = CounterVector{};
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int u = 0; u < 2; ++u) {
      const CounterVector product0 = multiply(c0[u], kPhiloxM0), product1 = multiply(c2[u], kPhiloxM1);
      c0[u] = (product1 >> 32) ^ c1[u] ^ static_cast<uint64_t>(key0);
      c1[u] = product1;
      c2[u] = (product0 >> 32) ^ c3[u] ^ static_cast<uint64_t>(key1);
      c3[u] = product0;
    }
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  for (int u = 0; u < 2; ++u) {
    CounterVector low, high;
    interleave((c0[u] & 0xffffffff) | (c1[u] << 32), (c2[u] & 0xffffffff) | (c3[u] << 32), low, high);
    std::memcpy(draws + u * 8 * kCounters, &low, sizeof(low));
    std::memcpy(draws + u * 8 * kCounters + 4 * kCounters, &high, sizeof(high));
  }
}

// The mask of one dropout call, and what it does to a vector of elements.
struct Dropout {
  uint64_t seed = 0;
  DropoutRate rate{0};

  Dropout() = default;
  Dropout(double p, int64_t seed_value) : seed(static_cast<uint64_t>(seed_value)), rate(p) {}

  // Draws of columns [column, column + count) of one row; column % 8 == 0, count <= kDrawColumns, draws[kDrawRoom].
  void draw(int64_t row, int64_t column, int64_t count, uint16_t* draws) const {
    for (int64_t c = 0; c < count; c += 2 * kCounters * kDrawsPerCall)
      draw_batch(seed, static_cast<uint64_t>(row), static_cast<uint64_t>(column + c) / kDrawsPerCall, draws + c);
  }

  template <typename A>
  Vector<A> apply(Vector<A> v, const uint16_t* draws) const {
    ShortVector<A> bits;
    std::memcpy(&bits, draws, sizeof(bits));
    const auto threshold = IntegerVector<A>{} + static_cast<IntegerLane<A>>(rate.threshold);
    const auto keep = __builtin_convertvector(bits, IntegerVector<A>) >= threshold;
    return keep ? v * static_cast<A>(rate.scale) : Vector<A>{};
  }
};

// None where p is 0; else by the seed, an int64 in a tensor.
inline Dropout dropout_of(double p, const std::optional<at::Tensor>& seed) {
  return p > 0 ? Dropout(p, *seed->const_data_ptr<int64_t>()) : Dropout();
}

}  // namespace
}  // namespace transformer_fast
