// The functions of generic.h with AVX2, FMA and F16C instructions.
#pragma once

#include "generic.h"

namespace transformer_fast {
namespace {

inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) { return _mm256_fmadd_pd(a, b, c); }

inline CounterVector multiply_low_words(CounterVector v, uint32_t constant) {
  return reinterpret_cast<CounterVector>(_mm256_mul_epu32(reinterpret_cast<__m256i>(v), _mm256_set1_epi64x(constant)));
}

inline IntegerVector<float> add_products_of_halves(IntegerVector<float> sums, IntegerVector<float> a,
                                                   IntegerVector<float> b) {
  const __m256i products = _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b));
  asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));  // a compiler adds products first, which needs more registers
  return sums;
}

// A compiler would convert lane by lane.
inline ByteVector low_bytes(IntegerVector<float> v) {
  const __m256i halves = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(v), _mm256_set1_epi32(0x0c080400));
  const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  ByteVector result;
  _mm_storel_epi64(reinterpret_cast<__m128i*>(&result), bytes);
  return result;
}

inline Vector<float> load(const c10::Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline void store(c10::Half* p, Vector<float> v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline Vector<float> load_few(const float* p, int64_t count) {
  return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(first_lanes<float>(count)));
}

inline Vector<double> load_few(const double* p, int64_t count) {
  return _mm256_maskload_pd(p, reinterpret_cast<__m256i>(first_lanes<double>(count)));
}

inline void store_few(float* p, Vector<float> v, int64_t count) {
  _mm256_maskstore_ps(p, reinterpret_cast<__m256i>(first_lanes<float>(count)), v);
}

inline void store_few(double* p, Vector<double> v, int64_t count) {
  _mm256_maskstore_pd(p, reinterpret_cast<__m256i>(first_lanes<double>(count)), v);
}

// Loads the bits of at most eight 16-bit elements, combined in registers: a wide load after narrow stores would stall.
template <typename T>
inline __m128i load_short(const T* p, int64_t count) {
  if (count == 8) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  uint64_t whole = 0;
  uint32_t two = 0;
  uint16_t one = 0;
  if (count & 4) std::memcpy(&whole, p, sizeof(whole));
  if (count & 2) std::memcpy(&two, p + (count & 4), sizeof(two));
  if (count & 1) std::memcpy(&one, p + (count & 6), sizeof(one));
  const uint64_t rest = two | static_cast<uint64_t>(one) << (count & 2 ? 32 : 0);
  return count & 4 ? _mm_set_epi64x(rest, whole) : _mm_set_epi64x(0, rest);
}

inline Vector<float> load_few(const c10::Half* p, int64_t count) { return _mm256_cvtph_ps(load_short(p, count)); }

inline Vector<float> load_few(const c10::BFloat16* p, int64_t count) {
  return reinterpret_cast<Vector<float>>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_short(p, count)), 16));
}

template <typename T>
  requires(sizeof(T) == 2)
inline void store_few(T* p, Vector<float> v, int64_t count) {
  T lanes[kLanes<float>];
  store(lanes, v);
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes));
  if (count == 8) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bits);
  uint64_t rest = _mm_cvtsi128_si64(bits);
  if (count & 4) {
    std::memcpy(p, &rest, 8);
    p += 4;
    rest = _mm_extract_epi64(bits, 1);
  }
  if (count & 2) {
    std::memcpy(p, &rest, 4);
    p += 2;
    rest >>= 32;
  }
  if (count & 1) std::memcpy(p, &rest, 2);
}

}  // namespace
}  // namespace transformer_fast
