// Dropout on the CPU: 16 random bits for each element, by the elementwise contract of philox.h.
//
// The bits go through a small buffer in the first-level cache. So drawing (64-bit integer lanes) and use (lanes of the
// element type) are two plain loops, and kernels do not depend on the layout of counters.

#pragma once

#include "philox.h"
#include "vec.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace transformer_fast {
namespace {

// Lane indices 0, 1, 2 ..; a constant, because the compiler turns a loop into one insertion per lane.
template <std::size_t... lane>
inline CounterVector ascending(std::index_sequence<lane...>) {
  return CounterVector{lane...};
}
inline CounterVector lane_numbers() { return ascending(std::make_index_sequence<kCounters>()); }

// Columns per chunk, and memory for their 16 random bits each. Whole vectors are written, so the memory is a little
// larger.
constexpr int64_t kChunkColumns = 1024;
constexpr int64_t kBitsRoom = kChunkColumns + 2 * kCounters * kColumnsPerCall;  // plus one batch

// Interleaves two vectors: low gets the first halves of both, high the second halves.
template <std::size_t... lane>
inline void interleave(CounterVector a, CounterVector b, CounterVector& low, CounterVector& high,
                       std::index_sequence<lane...>) {
  low = __builtin_shuffle(a, b, CounterVector{lane / 2 + lane % 2 * kCounters...});
  high = __builtin_shuffle(a, b, CounterVector{kCounters / 2 + lane / 2 + lane % 2 * kCounters...});
}

// A batch of Philox calls: call[u][lane] of row[u][lane].
struct Batch {
  static constexpr int64_t kCalls = 2 * kCounters;
  CounterVector call[2], row[2];

  // The batch that begins at a call of a row.
  Batch(uint64_t first_row, uint64_t first_call) {
    for (int u = 0; u < 2; ++u) {
      call[u] = lane_numbers() + (first_call + u * kCounters);
      row[u] = CounterVector{} + first_row;
    }
  }

  // Wraps calls past the end of a row (`calls` per row) to the next rows.
  void wrap(uint64_t calls) {
    for (int u = 0; u < 2; ++u)
      for (int64_t lane = 0; lane < kCounters; ++lane) {
        row[u][lane] += call[u][lane] / calls;
        call[u][lane] %= calls;
      }
  }

  // The next batch, wrapped.
  void advance(uint64_t calls) {
    for (int u = 0; u < 2; ++u) {
      call[u] += kCalls % calls;
      row[u] += kCalls / calls;
      const auto past = call[u] >= calls;
      call[u] = past ? call[u] - calls : call[u];
      row[u] = past ? row[u] + 1 : row[u];
    }
  }
};

// Philox 4x32-10 of a batch: bits of 8 columns per call. Each 64-bit lane holds a 32-bit word in its low half, as the
// multiplication needs; two independent vectors hide the latency. The high halves hold arbitrary bits, which no
// multiplication reads.
inline void philox_batch(uint64_t seed, const Batch& batch, uint16_t* bits) {
  CounterVector c0[2], c1[2], c2[2], c3[2];
  for (int u = 0; u < 2; ++u) {
    c0[u] = batch.call[u];
    c1[u] = batch.row[u] & 0xffffffff;
    c2[u] = batch.row[u] >> 32;
    c3[u] = CounterVector{};
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int u = 0; u < 2; ++u) {
      const CounterVector product0 = multiply_low_words(c0[u], kPhiloxM0),
                          product1 = multiply_low_words(c2[u], kPhiloxM1);
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
    interleave((c0[u] & 0xffffffff) | (c1[u] << 32), (c2[u] & 0xffffffff) | (c3[u] << 32), low, high,
               std::make_index_sequence<kCounters>());
    std::memcpy(bits + u * 8 * kCounters, &low, sizeof(low));
    std::memcpy(bits + u * 8 * kCounters + 4 * kCounters, &high, sizeof(high));
  }
}

// The mask of one dropout call, and its application to a vector of elements.
struct Dropout {
  uint64_t seed = 0;
  DropoutRate rate{0};

  Dropout() = default;
  explicit Dropout(const DropoutParams& params) : seed(static_cast<uint64_t>(params.seed)), rate(params.p) {}

  // The bits of columns [column, column + count) of one row; column % 8 == 0, count <= kChunkColumns, bits[kBitsRoom].
  void random_bits(int64_t row, int64_t column, int64_t count, uint16_t* bits) const {
    for (int64_t c = 0; c < count; c += Batch::kCalls * kColumnsPerCall)
      philox_batch(seed, Batch(row, (column + c) / kColumnsPerCall), bits + c);
  }

  template <typename A>
  Vector<A> apply(Vector<A> v, const uint16_t* bits) const {
    ShortVector<A> lanes;
    std::memcpy(&lanes, bits, sizeof(lanes));
    const auto threshold = IntegerVector<A>{} + static_cast<IntegerLane<A>>(rate.threshold);
    const auto keep = __builtin_convertvector(lanes, IntegerVector<A>) >= threshold;
    return keep ? v * static_cast<A>(rate.scale) : Vector<A>{};
  }
};

// The random bits of consecutive rows of d columns: per chunk of a wide row, or for many narrow rows at once, because a
// single narrow row would waste half a batch of calls or more.
class RandomBits {
 public:
  // For the rows before `end`.
  RandomBits(const Dropout& dropout, int64_t d, int64_t end)
      : dropout_(dropout), d_(d), calls_((d + kColumnsPerCall - 1) / kColumnsPerCall), end_(end) {}

  // Same as Dropout::random_bits; valid until the next call.
  const uint16_t* of(int64_t row, int64_t column, int64_t count) {
    if (calls_ > Batch::kCalls / 2) {
      dropout_.random_bits(row, column, count, bits_);
      return bits_;
    }
    return of_narrow(row) + column;
  }

  // The bits of narrow rows, of kChunkColumns elements together at most, side by side and as long as the rows.
  const uint16_t* side_by_side(int64_t first, int64_t last) {
    const uint16_t* const held = of_narrow(first);
    if (d_ % kColumnsPerCall == 0 && last <= last_) return held;
    uint16_t* place = packed_;
    for (int64_t row = first; row < last; ++row, place += d_) {
      const uint16_t* const bits = of_narrow(row);
      for (int64_t c = 0; c < d_; c += kColumnsPerCall)  // may write past the row; the next row overwrites it
        std::memcpy(place + c, bits + c, kColumnsPerCall * sizeof(uint16_t));
    }
    return packed_;
  }

 private:
  const uint16_t* of_narrow(int64_t row) {
    if (row < first_ || row >= last_) fill_rows(row);
    return bits_ + (row - first_) * calls_ * kColumnsPerCall;
  }

  void fill_rows(int64_t row) {
    first_ = row;
    last_ = std::min(end_, row + kChunkColumns / kColumnsPerCall / calls_);
    Batch batch(row, 0);
    batch.wrap(calls_);
    const int64_t count = (last_ - first_) * calls_ * kColumnsPerCall;
    for (int64_t i = 0; i < count; i += Batch::kCalls * kColumnsPerCall, batch.advance(calls_))
      philox_batch(dropout_.seed, batch, bits_ + i);
  }

  const Dropout dropout_;
  const int64_t d_, calls_, end_;
  int64_t first_ = 0, last_ = 0;  // the narrow rows with bits in the buffer
  alignas(64) uint16_t bits_[kBitsRoom];
  alignas(64) uint16_t packed_[kChunkColumns + kColumnsPerCall];
};

}  // namespace
}  // namespace transformer_fast
