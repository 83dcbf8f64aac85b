// Vectors of the machine's width as types, and their multiply-add.
//
// A product and a sum round once where fma() says so, and twice everywhere else: the compiler is told to fuse nothing
// by itself (-ffp-contract=off), since it would do so in one loop and not in another that must give the same bits.
#pragma once

#include "element.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace transformer_fast {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#else
constexpr int64_t kVectorBytes = 32;
#endif

template <typename A>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(A));

// Outputs in a panel of packed weights (step_linear.cpp).
constexpr int64_t kStepPanel = 2 * kLanes<float>;

// Rows of at most so many vectors are narrow: handled without loops, or many of them as one.
constexpr int kFewVectors = 3;
template <typename A>
constexpr int64_t kNarrow = kFewVectors * kLanes<A>;

constexpr int slots_of(int vectors) { return vectors ? vectors : 4; }  // of a reduction, as for_columns() numbers them

template <typename A>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Integer __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Short __attribute__((vector_size(kVectorBytes / 2)));  // as many lanes, 16 bits each
};
template <>
struct VectorOf<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Integer __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Short __attribute__((vector_size(kVectorBytes / 4)));
};

template <typename A>
using Vector = typename VectorOf<A>::Type;
template <typename A>
using IntegerVector = typename VectorOf<A>::Integer;
template <typename A>
using IntegerLane = std::conditional_t<std::is_same_v<A, double>, int64_t, int32_t>;
template <typename A>
using ShortVector = typename VectorOf<A>::Short;

// How many lanes an access touches: all of them, known at compile time, or the few at the end of a row.
template <typename A>
using Full = std::integral_constant<int64_t, kLanes<A>>;

template <typename A>
inline Vector<A> broadcast(A value) {
  return value - Vector<A>{};  // not a sum: 0 + -0 is 0, so that the compiler could not leave it out
}

// a * b + c, rounded once.
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline double fma(double a, double b, double c) { return std::fma(a, b, c); }

#if defined(__AVX512F__)
inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(__FMA__)
inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) { return _mm256_fmadd_pd(a, b, c); }
#elif defined(__aarch64__)  // by halves: of a loop over the lanes the compiler makes one instruction for each lane
inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
  float32x4_t x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof(a));
  std::memcpy(y, &b, sizeof(b));
  std::memcpy(z, &c, sizeof(c));
  for (int half = 0; half < 2; ++half) z[half] = vfmaq_f32(z[half], x[half], y[half]);
  std::memcpy(&c, z, sizeof(c));
  return c;
}
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
  float64x2_t x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof(a));
  std::memcpy(y, &b, sizeof(b));
  std::memcpy(z, &c, sizeof(c));
  for (int half = 0; half < 2; ++half) z[half] = vfmaq_f64(z[half], x[half], y[half]);
  std::memcpy(&c, z, sizeof(c));
  return c;
}
#else
template <typename A>
inline Vector<A> fma_of_lanes(Vector<A> a, Vector<A> b, Vector<A> c) {
  for (int64_t lane = 0; lane < kLanes<A>; ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
}
inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) { return fma_of_lanes<float>(a, b, c); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
  return fma_of_lanes<double>(a, b, c);
}
#endif

// With a factor, or an addend, that is the same in every lane.
inline Vector<float> fma(Vector<float> a, float b, Vector<float> c) { return fma(a, broadcast(b), c); }
inline Vector<double> fma(Vector<double> a, double b, Vector<double> c) { return fma(a, broadcast(b), c); }
inline Vector<float> fma(Vector<float> a, Vector<float> b, float c) { return fma(a, b, broadcast(c)); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, double c) { return fma(a, b, broadcast(c)); }
inline Vector<float> fma(Vector<float> a, float b, float c) { return fma(a, broadcast(b), broadcast(c)); }
inline Vector<double> fma(Vector<double> a, double b, double c) { return fma(a, broadcast(b), broadcast(c)); }

}  // namespace
}  // namespace transformer_fast
