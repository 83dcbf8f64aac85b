// Products of bfloat16 by AVX-512's VDPBF16PS, which takes pairs, two elements per lane; and functions that make and
// store pairs. Other vector units define none of this; kPaired is then false for all types.
#pragma once

#include "avx512.h"

namespace transformer_fast {
namespace {

template <>
constexpr bool kPaired<c10::BFloat16> = true;

// sums + a * b, lane by lane, both products of a lane.
inline Vector<float> add_pairs(Vector<float> sums, Vector<float> a, Vector<float> b) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

inline Vector<float> broadcast_pair(Pair pair) {
  int32_t bits;
  std::memcpy(&bits, &pair, sizeof(bits));
  return reinterpret_cast<Vector<float>>(_mm512_set1_epi32(bits));
}

// Loads one pair per lane, bit for bit.
inline Vector<float> load(const Pair* p) { return load(reinterpret_cast<const float*>(p)); }

inline void store_bits(c10::BFloat16* p, Vector<float> bits, int64_t count) {
  _mm512_mask_storeu_epi16(p, mask_of_first_bits(count), reinterpret_cast<__m512i>(bits));
}

// 32 bfloat16: the lanes of `low`, then those of `high`, rounded to nearest even.
inline Vector<float> packed_halves(Vector<float> low, Vector<float> high) {
  return reinterpret_cast<Vector<float>>(_mm512_cvtne2ps_pbh(high, low));
}

// Stores the first `count` of the halves, at most 16.
inline void store_half_bits(c10::BFloat16* p, Vector<float> halves, int64_t count) {
  const __m256i low = _mm512_castsi512_si256(reinterpret_cast<__m512i>(halves));
  if (count == 16) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), low);
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(mask_of_first(count)), low);
}

typedef uint16_t HalvesVector __attribute__((vector_size(64)));

// 16 pairs of 16-bit elements: element i of `a` beside element i of `b`, for i = first .. first + 15.
inline Vector<float> halves_interleaved(Vector<float> a, Vector<float> b, uint16_t first) {
  HalvesVector order;
  for (uint16_t i = 0; i < 32; ++i) order[i] = first + i / 2 + (i % 2) * 32;
  return reinterpret_cast<Vector<float>>(_mm512_permutex2var_epi16(
      reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(b)));
}

// Lane i of `low` and lane i of `high`, rounded, as one pair of bfloat16.
inline Vector<float> packed_pairs(Vector<float> low, Vector<float> high) {
  const Vector<float> packed = packed_halves(low, high);
  HalvesVector order;
  for (uint16_t i = 0; i < 32; ++i) order[i] = i / 2 + (i % 2) * 16;
  return reinterpret_cast<Vector<float>>(
      _mm512_permutexvar_epi16(reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(packed)));
}

}  // namespace
}  // namespace transformer_fast
