// The random-number contract, version 1: the dropout mask is a pure function of (seed, position), equal bit for bit in
// the reference (reference/dropout.py), in Triton (triton/philox.py) and here, on the host and on the device.
//
// Philox 4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
// The key is the 64-bit seed. One call gives four 32-bit words, each word two 16-bit numbers (low half first).
// An element is kept iff its number >= threshold = round(p * 65536); kept values are multiplied by 1 / (1 - p).
//
// Elementwise dropout of a (rows, d) view, row r, column c:
//   counter = (c >> 3, low half of r, high half of r, 0), word (c >> 1) & 3, half c & 1
// so the eight numbers of one call, read as little-endian uint16, are those of eight neighbouring columns.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define TF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TF_HOST_DEVICE inline
#endif

namespace transformer_fast {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // added to the key after each round
constexpr int kPhiloxRounds = 10;
constexpr int kColumnsPerCall = 8;  // elements per call, 16 random bits each

struct PhiloxWords {
  uint32_t word[4];

  TF_HOST_DEVICE uint32_t bits(int i) const { return (word[i >> 1] >> (16 * (i & 1))) & 0xFFFFu; }
};

TF_HOST_DEVICE PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// The call that serves columns 8 * chunk .. 8 * chunk + 7 of a row.
TF_HOST_DEVICE PhiloxWords philox_elementwise(uint64_t seed, int64_t row, int64_t chunk) {
  const uint64_t r = static_cast<uint64_t>(row);
  return philox(static_cast<uint32_t>(chunk), static_cast<uint32_t>(r), static_cast<uint32_t>(r >> 32), 0, seed);
}

// A drop probability as the kernels use it.
struct DropoutRate {
  uint32_t threshold;  // 0 (keep all) .. 65536 (drop all)
  double scale;        // of what is kept

  explicit DropoutRate(double p)
      : threshold(static_cast<uint32_t>(std::nearbyint(p * 65536.0))), scale(p < 1.0 ? 1.0 / (1.0 - p) : 0.0) {}
};

}  // namespace transformer_fast
