// The functions of generic.h with AVX-512's instructions.
#pragma once

#include "generic.h"

namespace transformer_fast {
namespace {

inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) { return _mm512_fmadd_pd(a, b, c); }

inline CounterVector multiply_low_words(CounterVector v, uint32_t constant) {
  return reinterpret_cast<CounterVector>(_mm512_mul_epu32(reinterpret_cast<__m512i>(v), _mm512_set1_epi64(constant)));
}

inline IntegerVector<float> add_products_of_halves(IntegerVector<float> sums, IntegerVector<float> a,
                                                   IntegerVector<float> b) {
  return sums + reinterpret_cast<IntegerVector<float>>(
                    _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

// The compiler would convert half a vector at a time.
inline Vector<float> load(const c10::BFloat16* p) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

inline Vector<float> load(const c10::Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void store(c10::Half* p, Vector<float> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline uint32_t mask_of_first(int64_t count) { return (1u << count) - 1; }

inline Vector<float> load_few(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(mask_of_first(count), p); }

inline Vector<double> load_few(const double* p, int64_t count) {
  return _mm512_maskz_loadu_pd(mask_of_first(count), p);
}

template <typename T>
  requires(sizeof(T) == 2)
inline Vector<float> load_few(const T* p, int64_t count) {
  T lanes[kLanes<float>];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_maskz_loadu_epi16(mask_of_first(count), p));
  return load(lanes);
}

inline void store_few(float* p, Vector<float> v, int64_t count) { _mm512_mask_storeu_ps(p, mask_of_first(count), v); }

inline void store_few(double* p, Vector<double> v, int64_t count) { _mm512_mask_storeu_pd(p, mask_of_first(count), v); }

template <typename T>
  requires(sizeof(T) == 2)
inline void store_few(T* p, Vector<float> v, int64_t count) {
  T lanes[kLanes<float>];
  store(lanes, v);
  _mm256_mask_storeu_epi16(p, mask_of_first(count), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes)));
}

// Mask of `count` elements of 16 bits, or of all 32.
inline __mmask32 mask_of_first_bits(int64_t count) {
  return static_cast<__mmask32>(count >= 32 ? ~uint32_t{0} : (uint64_t{1} << count) - 1);
}

inline Vector<float> load_bits(const c10::BFloat16* p, int64_t count) {
  return reinterpret_cast<Vector<float>>(_mm512_maskz_loadu_epi16(mask_of_first_bits(count), p));
}

// Load from memory outside the caches, where two accesses to a line are faster than one.
inline Vector<float> load_far(const float* p, Full<float>) {
  return reinterpret_cast<Vector<float>>(
      _mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_loadu_pd(reinterpret_cast<const double*>(p))),
                         _mm256_loadu_pd(reinterpret_cast<const double*>(p + 8)), 1));
}

// GCC would go through memory.
template <typename V>
  requires(sizeof(V) == kVectorBytes)
inline Halves<V> halves_of(const V& v) {
  using Half = typename Halves<V>::Half;
  return {reinterpret_cast<Half>(_mm512_castpd512_pd256(reinterpret_cast<__m512d>(v))),
          reinterpret_cast<Half>(_mm512_extractf64x4_pd(reinterpret_cast<__m512d>(v), 1))};
}

}  // namespace
}  // namespace transformer_fast
