// Products of tiles of int8 by AMX: sixteen rows of 64 bytes with the weights of sixteen outputs in one instruction.
// Written as assembly because few of the processors with AVX512-BF16 have it; `has_tiles` says whether this one does.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace transformer_fast {
namespace {

constexpr int64_t kTileRows = 16, kTileGroups = 16;  // a group: 32 bits of a row

// Linux enables tile registers per process on request.
inline bool has_tiles() {
  static const bool there = [] {
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kNeeded = kTile | kInt8;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return there;
}

// While it lives, this thread's tiles have rows of 64 bytes: those of weights, 6 and 7, kTileRows of them, the others as
// many as there are.
class TileSession {
 public:
  explicit TileSession(int64_t most_rows) {
    const auto rows = static_cast<uint8_t>(std::min(most_rows, kTileRows));
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) config.rows[tile] = tile < 6 ? rows : kTileRows;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
  ~TileSession() { asm volatile("tilerelease"); }
};

template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// stride: bytes from one row to the next.
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

// sums += rows * weights, in int32.
template <int kSums, int kRows, int kWeights>
inline void multiply_tile() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kWeights));
}

}  // namespace
}  // namespace transformer_fast
