// Vectors of the machine's width in GCC's and Clang's own vector types, for loops over the columns of a row.
//
// Arithmetic is in the accumulation type (float for every 16- and 32-bit type, double for double); `load` and `store`
// convert. Operators, comparisons and `mask ? a : b` come with the vector types. Everything is inline and in an
// anonymous namespace, so that files compiled for different machines never share a function.
//
// A product and a sum are rounded once in fma(), and twice everywhere else: -ffp-contract=off forbids the compiler to
// fuse them, because it would fuse in one loop and not in another that must give the same bits.

#pragma once

#include "select.h"

#include <cstdint>
#include <type_traits>

namespace transformer_fast {
namespace {

// fma with one scalar factor, or one scalar addend.
inline Vector<float> fma(Vector<float> a, float b, Vector<float> c) { return fma(a, broadcast(b), c); }
inline Vector<double> fma(Vector<double> a, double b, Vector<double> c) { return fma(a, broadcast(b), c); }
inline Vector<float> fma(Vector<float> a, Vector<float> b, float c) { return fma(a, b, broadcast(c)); }
inline Vector<double> fma(Vector<double> a, Vector<double> b, double c) { return fma(a, b, broadcast(c)); }
inline Vector<float> fma(Vector<float> a, float b, float c) { return fma(a, broadcast(b), broadcast(c)); }
inline Vector<double> fma(Vector<double> a, double b, double c) { return fma(a, broadcast(b), broadcast(c)); }

// load_few() and store_few() for loops that mostly process whole vectors.
template <typename T>
inline Vector<Accumulate<T>> load_some(const T* p, int64_t count) {
  return count == kLanes<Accumulate<T>> ? load(p) : load_few(p, count);
}

template <typename T>
inline void store_some(T* p, Vector<Accumulate<T>> v, int64_t count) {
  count == kLanes<Accumulate<T>> ? store(p, v) : store_few(p, v, count);
}

template <typename T>
inline Vector<Accumulate<T>> load(const T* p, Full<Accumulate<T>>, Accumulate<T> = 0) {
  return load(p);
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

// load() of data that is likely in no cache.
template <typename T, typename Count>
inline Vector<Accumulate<T>> load_far(const T* p, Count count) {
  return load(p, count);
}

template <typename T>
inline void store(T* p, Vector<Accumulate<T>> v, Full<Accumulate<T>>) {
  store(p, v);
}

template <typename T>
inline void store(T* p, Vector<Accumulate<T>> v, int64_t count) {
  store_few(p, v, count);
}

// Calls body(column, count, slot) over the columns [begin, end). `slot` (0..3) tells neighbours apart, so that a
// reduction keeps four sums and does not wait for the latency of one. GCC may call a long body for every vector: where
// that costs, the function around the loop is __attribute__((flatten)).
template <typename A, typename Body>
inline void for_columns(int64_t begin, int64_t end, Body&& body) {
  constexpr int64_t lanes = kLanes<A>;
  int64_t c = begin;
  for (; c + 4 * lanes <= end; c += 4 * lanes) {
    body(c, Full<A>{}, 0);
    body(c + lanes, Full<A>{}, 1);
    body(c + 2 * lanes, Full<A>{}, 2);
    body(c + 3 * lanes, Full<A>{}, 3);
  }
  for (; c + lanes <= end; c += lanes) body(c, Full<A>{}, 0);
  if (c < end) body(c, end - c, 0);
}

// Calls body(flag) or body(flag, flag) with constant flags, because a test inside a loop is slower than one loop per
// value.
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
  const auto halves = halves_of(v);
  return halves.low + halves.high;
}

template <typename V>
inline auto lanes_added(V v) {
  if constexpr (sizeof(V) == 2 * sizeof(v[0])) {
    return v[0] + v[1];
  } else {
    return lanes_added(halves_added(v));
  }
}

// The sum of all lanes of all slots.
template <typename V, size_t kSlots>
inline auto sum(const V (&slots)[kSlots]) {
  if constexpr (kSlots == 1) return lanes_added(slots[0]);
  if constexpr (kSlots == 2) return lanes_added(slots[0] + slots[1]);
  if constexpr (kSlots == 3) return lanes_added((slots[0] + slots[1]) + slots[2]);
  if constexpr (kSlots == 4) return lanes_added((slots[0] + slots[1]) + (slots[2] + slots[3]));
}

// Four numbers, for instance one per row of four rows.
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

}  // namespace
}  // namespace transformer_fast
