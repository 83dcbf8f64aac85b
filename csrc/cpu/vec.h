// Vectors of the machine's width in GCC's and Clang's own vector types, for loops over the columns of a row.
//
// Arithmetic is in the accumulation type (float for every 16- and 32-bit type, double for double); `load` and `store`
// convert. Operators, comparisons and `mask ? a : b` come with the vector types. Everything is inline and in an
// anonymous namespace, so that files compiled for different machines never share a function.

#pragma once

#include "vector_types.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace transformer_fast {
namespace {

inline Vector<float> widen(const float* p) {
  Vector<float> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Vector<double> widen(const double* p) {
  Vector<double> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Vector<float> widen(const c10::BFloat16* p) {
#if defined(__AVX512F__)  // the compiler would convert half a vector at a time
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
#else
  ShortVector<float> bits;
  std::memcpy(&bits, p, sizeof(bits));
  return reinterpret_cast<Vector<float>>(__builtin_convertvector(bits, IntegerVector<float>) << 16);
#endif
}

inline Vector<float> widen(const c10::Half* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vector<float> v;
  for (int64_t i = 0; i < kLanes<float>; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}

inline void narrow(float* p, Vector<float> v) { std::memcpy(p, &v, sizeof(v)); }

inline void narrow(double* p, Vector<double> v) { std::memcpy(p, &v, sizeof(v)); }

inline void narrow(c10::BFloat16* p, Vector<float> v) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits rounded = v == v ? nearest_even : Bits{} + 0x7fc0;  // adding could carry a NaN into infinity
  const ShortVector<float> result = __builtin_convertvector(rounded, ShortVector<float>);
  std::memcpy(p, &result, sizeof(result));
}

inline void narrow(c10::Half* p, Vector<float> v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int64_t i = 0; i < kLanes<float>; ++i) p[i] = static_cast<c10::Half>(v[i]);
#endif
}

// At most eight elements, without a call.
template <typename T>
inline void copy_few(const T* from, T* to, int64_t count) {
  if (count & 8) return void(std::memcpy(to, from, 8 * sizeof(T)));
  if (count & 4) std::memcpy(to, from, 4 * sizeof(T)), from += 4, to += 4;
  if (count & 2) std::memcpy(to, from, 2 * sizeof(T)), from += 2, to += 2;
  if (count & 1) std::memcpy(to, from, sizeof(T));
}

// All ones in the first `count` lanes, else zero.
template <typename A>
inline IntegerVector<A> first_lanes(int64_t count) {
  IntegerVector<A> lane;
  for (int64_t i = 0; i < kLanes<A>; ++i) lane[i] = i;
  return lane < static_cast<IntegerLane<A>>(count);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The bits of at most eight 16-bit elements, put together in registers: a load of what was just stored in smaller pieces
// would wait for them.
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

template <typename T>
inline void store_short(T* p, __m128i bits, int64_t count) {
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

inline Vector<float> widen_short(const c10::Half*, __m128i bits) { return _mm256_cvtph_ps(bits); }

inline Vector<float> widen_short(const c10::BFloat16*, __m128i bits) {
  return reinterpret_cast<Vector<float>>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
#endif

// `count` lanes, at most all, the others zero.
template <typename T>
inline Vector<Accumulate<T>> load_few(const T* p, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (std::is_same_v<T, float>) return _mm512_maskz_loadu_ps(mask, p);
  if constexpr (std::is_same_v<T, double>) return _mm512_maskz_loadu_pd(mask, p);
  if constexpr (sizeof(T) == 2) {
    T lanes[kLanes<float>];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_maskz_loadu_epi16(mask, p));
    return widen(lanes);
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(first_lanes<float>(count)));
  if constexpr (std::is_same_v<T, double>)
    return _mm256_maskload_pd(p, reinterpret_cast<__m256i>(first_lanes<double>(count)));
  if constexpr (sizeof(T) == 2) return widen_short(p, load_short(p, count));
#endif
  T lanes[kLanes<Accumulate<T>>] = {};
  copy_few(p, lanes, count);
  return widen(lanes);
}

template <typename T>
inline void store_few(T* p, Vector<Accumulate<T>> v, int64_t count) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    return _mm256_maskstore_ps(p, reinterpret_cast<__m256i>(first_lanes<float>(count)), v);
  if constexpr (std::is_same_v<T, double>)
    return _mm256_maskstore_pd(p, reinterpret_cast<__m256i>(first_lanes<double>(count)), v);
#endif
  T lanes[kLanes<Accumulate<T>>];
  narrow(lanes, v);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(T) == 2)
    return _mm256_mask_storeu_epi16(p, mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes)));
  if constexpr (std::is_same_v<T, float>) return _mm512_mask_storeu_ps(p, mask, v);
  if constexpr (std::is_same_v<T, double>) return _mm512_mask_storeu_pd(p, mask, v);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 2) return store_short(p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes)), count);
#endif
  copy_few<T>(lanes, p, count);
}

// The same in a loop that mostly meets whole vectors.
template <typename T>
inline Vector<Accumulate<T>> load_some(const T* p, int64_t count) {
  return count == kLanes<Accumulate<T>> ? widen(p) : load_few(p, count);
}

template <typename T>
inline void store_some(T* p, Vector<Accumulate<T>> v, int64_t count) {
  count == kLanes<Accumulate<T>> ? narrow(p, v) : store_few(p, v, count);
}

template <typename T>
inline Vector<Accumulate<T>> load(const T* p, Full<Accumulate<T>>, Accumulate<T> = 0) {
  return widen(p);
}

// v with `fill` in the lanes past `count`.
template <typename A>
inline Vector<A> filled(Vector<A> v, Full<A>, A) {
  return v;
}

template <typename A>
inline Vector<A> filled(Vector<A> v, int64_t count, A fill) {
  return first_lanes<A>(count) ? v : broadcast<A>(fill);
}

// Lanes past `count` hold `fill`.
template <typename T>
inline Vector<Accumulate<T>> load(const T* p, int64_t count, Accumulate<T> fill = 0) {
  const auto v = load_few(p, count);
  return fill == 0 ? v : filled<Accumulate<T>>(v, count, fill);
}

// load() of what is likely in memory only: two accesses to a line there are faster than one.
template <typename T, typename Count>
inline Vector<Accumulate<T>> load_far(const T* p, Count count) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Count, Full<float>>)
    return reinterpret_cast<Vector<float>>(
        _mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_loadu_pd(reinterpret_cast<const double*>(p))),
                           _mm256_loadu_pd(reinterpret_cast<const double*>(p + 8)), 1));
#endif
  return load(p, count);
}

template <typename T>
inline void store(T* p, Vector<Accumulate<T>> v, Full<Accumulate<T>>) {
  narrow(p, v);
}

template <typename T>
inline void store(T* p, Vector<Accumulate<T>> v, int64_t count) {
  store_few(p, v, count);
}

// body(column, count, slot) over the columns [begin, end). `slot` (0..3) tells neighbours apart, so that a reduction
// keeps four sums and does not wait for the latency of one. kVectors, unless 0, is how many vectors the columns are,
// the last one perhaps not whole. GCC may call a long body for every vector: where that costs, the function around the
// loop is __attribute__((flatten)).
template <typename A, int kVectors = 0, typename Body>
inline void for_columns(int64_t begin, int64_t end, Body&& body) {
  constexpr int64_t lanes = kLanes<A>;
  int64_t c = begin;
  if constexpr (kVectors > 0) {
    if constexpr (kVectors > 1) body(begin, Full<A>{}, 0);
    if constexpr (kVectors > 2) body(begin + lanes, Full<A>{}, 1);
    static_assert(kVectors <= kFewVectors);
    c = begin + (kVectors - 1) * lanes;
    body(c, end - c, kVectors - 1);
    return;
  }
  for (; c + 4 * lanes <= end; c += 4 * lanes) {
    body(c, Full<A>{}, 0);
    body(c + lanes, Full<A>{}, 1);
    body(c + 2 * lanes, Full<A>{}, 2);
    body(c + 3 * lanes, Full<A>{}, 3);
  }
  for (; c + lanes <= end; c += lanes) body(c, Full<A>{}, 0);
  if (c < end) body(c, end - c, 0);
}

// The types that models are run in. Others do without most of a kernel's special cases.
template <typename T>
constexpr bool kIsCommon = std::is_same_v<T, float> || std::is_same_v<T, c10::BFloat16>;

// body(kVectors) for rows of d columns of T: how many vectors they are, where that is few, else 0.
template <typename T, typename Body>
inline void with_vectors(int64_t d, Body&& body) {
  constexpr int64_t lanes = kLanes<Accumulate<T>>;
  const int64_t vectors = (d + lanes - 1) / lanes;
  if (vectors == 1) return body(std::integral_constant<int, 1>());
  if constexpr (kIsCommon<T>) {
    if (vectors == 2) return body(std::integral_constant<int, 2>());
    if (vectors == 3) return body(std::integral_constant<int, 3>());
  }
  body(std::integral_constant<int, 0>());
}

// body(flag) and body(flag, flag) with each flag a constant: a test in a loop costs more than a loop for each answer.
template <typename Body>
inline void with_flag(bool flag, Body&& body) {
  flag ? body(std::true_type()) : body(std::false_type());
}

template <typename Body>
inline void with_flags(bool first, bool second, Body&& body) {
  with_flag(first, [&](auto a) { with_flag(second, [&](auto b) { body(a, b); }); });
}

template <typename V>
inline auto halves_added(V v) {
  typedef std::remove_reference_t<decltype(v[0])> Lane;
  typedef Lane Half __attribute__((vector_size(sizeof(V) / 2)));
  Half low, high;
#if defined(__AVX512F__)  // which GCC would do by way of memory
  if constexpr (sizeof(V) == 64) {
    low = reinterpret_cast<Half>(_mm512_castpd512_pd256(reinterpret_cast<__m512d>(v)));
    high = reinterpret_cast<Half>(_mm512_extractf64x4_pd(reinterpret_cast<__m512d>(v), 1));
    return low + high;
  }
#endif
  std::memcpy(&low, &v, sizeof(low));
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
  return low + high;
}

template <typename V>
inline auto lanes_added(V v) {
  if constexpr (sizeof(V) == 2 * sizeof(v[0])) {
    return v[0] + v[1];
  } else {
    return lanes_added(halves_added(v));
  }
}

// Of which the last ones may be absent.
template <typename V, size_t kSlots>
inline V slots_added(const V (&slots)[kSlots]) {
  if constexpr (kSlots == 1) return slots[0];
  if constexpr (kSlots == 2) return slots[0] + slots[1];
  if constexpr (kSlots == 3) return (slots[0] + slots[1]) + slots[2];
  if constexpr (kSlots == 4) return (slots[0] + slots[1]) + (slots[2] + slots[3]);
}

template <typename V, size_t kSlots>
inline auto sum(const V (&slots)[kSlots]) {
  return lanes_added(slots_added(slots));
}

// Four numbers, such as one for each of four rows.
template <typename A>
struct FourOf;
template <>
struct FourOf<float> {
  typedef float Type __attribute__((vector_size(16)));
  typedef int32_t Integer __attribute__((vector_size(16)));
};
template <>
struct FourOf<double> {
  typedef double Type __attribute__((vector_size(32)));
  typedef int64_t Integer __attribute__((vector_size(32)));
};

template <typename A>
using Four = typename FourOf<A>::Type;

// lanes_added() of four vectors, in the same order of additions.
template <typename A, typename V>
inline Four<A> four_lanes_added(V a, V b, V c, V d) {
  if constexpr (sizeof(V) > sizeof(Four<A>)) {
    return four_lanes_added<A>(halves_added(a), halves_added(b), halves_added(c), halves_added(d));
  } else {
    typedef typename FourOf<A>::Integer Order;
    const V ab = __builtin_shuffle(a, b, Order{0, 4, 1, 5}) + __builtin_shuffle(a, b, Order{2, 6, 3, 7});
    const V cd = __builtin_shuffle(c, d, Order{0, 4, 1, 5}) + __builtin_shuffle(c, d, Order{2, 6, 3, 7});
    return __builtin_shuffle(ab, cd, Order{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, Order{2, 3, 6, 7});
  }
}

// The sum of the lanes of each.
template <typename A>
inline Four<A> four_sums(const Vector<A> (&v)[4]) {
  return four_lanes_added<A>(v[0], v[1], v[2], v[3]);
}

}  // namespace
}  // namespace transformer_fast
