// Vectors of bfloat16 as bits, two to a lane, which is how the instructions for products of bfloat16 take them.
#pragma once

#include "vec.h"

namespace transformer_fast {
namespace {

// The bits of `count` bfloat16, at most two a lane; the others zero.
inline Vector<float> load_bits(const c10::BFloat16* p, int64_t count) {
#if defined(__AVX512BW__)
  const uint64_t mask = count >= 32 ? ~uint32_t{0} : (uint64_t{1} << count) - 1;
  return reinterpret_cast<Vector<float>>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), p));
#else
  Vector<float> bits{};
  std::memcpy(&bits, p, std::min<int64_t>(count * sizeof(*p), sizeof(bits)));
  return bits;
#endif
}

#if defined(__AVX512BF16__)
inline void store_bits(c10::BFloat16* p, Vector<float> bits, int64_t count) {
  const uint64_t mask = count >= 32 ? ~uint32_t{0} : (uint64_t{1} << count) - 1;
  _mm512_mask_storeu_epi16(p, static_cast<__mmask32>(mask), reinterpret_cast<__m512i>(bits));
}

// 32 bfloat16: the lanes of `low`, then those of `high`, rounded to nearest even.
inline Vector<float> packed_halves(Vector<float> low, Vector<float> high) {
  return reinterpret_cast<Vector<float>>(_mm512_cvtne2ps_pbh(high, low));
}

// The first `count` of them, at most 16.
inline void store_half_bits(c10::BFloat16* p, Vector<float> halves, int64_t count) {
  const __m256i low = _mm512_castsi512_si256(reinterpret_cast<__m512i>(halves));
  if (count == 16) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), low);
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << count) - 1), low);
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
#endif

}  // namespace
}  // namespace transformer_fast
