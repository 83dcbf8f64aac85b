// Vectors of the machine's width (select.h) as GCC's and Clang's own vector types.
#pragma once

#include "../element.h"

#include <cstdint>
#include <type_traits>

namespace transformer_fast {
namespace {

template <typename A>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(A));

// Outputs in a panel of packed weights (step_linear.cpp).
constexpr int64_t kStepPanel = 2 * kLanes<float>;

// Rows of at most this many columns are narrow: several are handled as one.
template <typename A>
constexpr int64_t kNarrow = 3 * kLanes<A>;

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

typedef int8_t ByteVector __attribute__((vector_size(kLanes<float>)));  // as many lanes as Vector<float>, 8 bits each

// Counters of random numbers, a 32-bit word in the low half of each lane.
typedef uint64_t CounterVector __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kCounters = kVectorBytes / 8;

// Number of lanes that an access touches: all of them, known at compile time, or the few at the end of a row.
template <typename A>
using Full = std::integral_constant<int64_t, kLanes<A>>;

template <typename A>
inline Vector<A> broadcast(A value) {
  return value - Vector<A>{};  // not a sum, because 0 + -0 is 0 and the compiler could not remove the sum
}

// Two elements that follow each other along the depth of a product.
struct Pair {
  c10::BFloat16 element[2];
};

// True if products take elements of type T in pairs (avx512_bf16.h).
template <typename T>
constexpr bool kPaired = false;

}  // namespace
}  // namespace transformer_fast
