// Operations that depend on the vector unit, in plain vector code. Files of a vector unit may overload the templates.
#pragma once

#include "vector_types.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace transformer_fast {
namespace {

// a * b + c, rounded once.
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline double fma(double a, double b, double c) { return std::fma(a, b, c); }

template <typename V>
inline V fma(V a, V b, V c) {
  for (size_t lane = 0; lane < sizeof(V) / sizeof(c[0]); ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
}

// The low 32 bits of every lane times a 32-bit constant.
template <typename V>
inline V multiply_low_words(V v, uint32_t constant) {
  return (v & 0xffffffff) * constant;
}

// In every 32-bit lane, the two products of its 16-bit halves are added to the sum.
template <typename V>
inline V add_products_of_halves(V sums, V a, V b) {
  return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}

// The low byte of every 32-bit lane.
template <typename V>
inline ByteVector low_bytes(V v) {
  return __builtin_convertvector(v, ByteVector);
}

inline Vector<float> load(const float* p) {
  Vector<float> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Vector<double> load(const double* p) {
  Vector<double> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename T>
inline Vector<float> load(const T* p) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    ShortVector<float> bits;
    std::memcpy(&bits, p, sizeof(bits));
    return reinterpret_cast<Vector<float>>(__builtin_convertvector(bits, IntegerVector<float>) << 16);
  } else {
    Vector<float> v;
    for (int64_t i = 0; i < kLanes<float>; ++i) v[i] = static_cast<float>(p[i]);
    return v;
  }
}

inline void store(float* p, Vector<float> v) { std::memcpy(p, &v, sizeof(v)); }

inline void store(double* p, Vector<double> v) { std::memcpy(p, &v, sizeof(v)); }

inline void store(c10::BFloat16* p, Vector<float> v) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits rounded = v == v ? nearest_even : Bits{} + 0x7fc0;  // adding could carry a NaN into infinity
  const ShortVector<float> result = __builtin_convertvector(rounded, ShortVector<float>);
  std::memcpy(p, &result, sizeof(result));
}

template <typename T>
inline void store(T* p, Vector<float> v) {
  for (int64_t i = 0; i < kLanes<float>; ++i) p[i] = static_cast<T>(v[i]);
}

// All ones in the first `count` lanes, else zero.
template <typename A>
inline IntegerVector<A> first_lanes(int64_t count) {
  IntegerVector<A> lane;
  for (int64_t i = 0; i < kLanes<A>; ++i) lane[i] = i;
  return lane < static_cast<IntegerLane<A>>(count);
}

// Copies at most eight elements, without a call.
template <typename T>
inline void copy_few(const T* from, T* to, int64_t count) {
  if (count & 8) return void(std::memcpy(to, from, 8 * sizeof(T)));
  if (count & 4) std::memcpy(to, from, 4 * sizeof(T)), from += 4, to += 4;
  if (count & 2) std::memcpy(to, from, 2 * sizeof(T)), from += 2, to += 2;
  if (count & 1) std::memcpy(to, from, sizeof(T));
}

// `count` lanes, at most all, the others zero.
template <typename T>
inline Vector<Accumulate<T>> load_few(const T* p, int64_t count) {
  T lanes[kLanes<Accumulate<T>>] = {};
  copy_few(p, lanes, count);
  return load(lanes);
}

template <typename T>
inline void store_few(T* p, Vector<Accumulate<T>> v, int64_t count) {
  T lanes[kLanes<Accumulate<T>>];
  store(lanes, v);
  copy_few<T>(lanes, p, count);
}

// The bits of `count` elements of 16 bits, at most two a lane; the others zero.
template <typename T>
inline Vector<float> load_bits(const T* p, int64_t count) {
  Vector<float> bits{};
  std::memcpy(&bits, p, std::min<int64_t>(count * sizeof(*p), sizeof(bits)));
  return bits;
}

template <typename V>
struct Halves {
  typedef std::remove_reference_t<decltype(V{}[0])> Lane;
  typedef Lane Half __attribute__((vector_size(sizeof(V) / 2)));
  Half low, high;
};

template <typename V>
inline Halves<V> halves_of(const V& v) {
  Halves<V> halves;
  std::memcpy(&halves.low, &v, sizeof(halves.low));
  std::memcpy(&halves.high, reinterpret_cast<const char*>(&v) + sizeof(halves.low), sizeof(halves.high));
  return halves;
}

}  // namespace
}  // namespace transformer_fast
