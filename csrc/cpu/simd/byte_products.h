// Products of bytes, summed exactly: four inputs of a row times four weights of an output are one 32-bit lane.
//
// A way to multiply says how the inputs lie in memory, in planes of one 32-bit word for four inputs, and what a lane of
// weights becomes before several rows are multiplied with it. No sum in between is shorter than 32 bits, so nothing is
// ever saturated. (AVX2's vpmaddubsw adds products of bytes in 16 bits: it is not used.)
#pragma once

#include "vec.h"

#if defined(__AVX512F__)
#include <cpuid.h>
#endif

namespace transformer_fast {
namespace {

using Int32Vector = IntegerVector<float>;
typedef int16_t Int16Vector __attribute__((vector_size(kVectorBytes)));

// On any vector unit: bytes become 16-bit elements, whose products are summed in pairs. The even inputs of four are one
// word, the odd ones another.
struct WidenedBytes {
  static constexpr int kPlanes = 2;
  static constexpr int32_t kOffset = 0;  // that is added to each input

  struct Weights {
    Int32Vector even, odd;
  };

  static Weights weights(Int32Vector bytes) {
    const Int16Vector pairs = reinterpret_cast<Int16Vector>(bytes);
    return {reinterpret_cast<Int32Vector>(pairs << 8 >> 8), reinterpret_cast<Int32Vector>(pairs >> 8)};
  }

  static void planes(Int32Vector bytes, Int32Vector (&to)[kPlanes]) {
    const Weights split = weights(bytes);
    to[0] = split.even, to[1] = split.odd;
  }

  // x: the first plane at four inputs of a row; the second is `plane` words behind it.
  static Int32Vector add(Int32Vector sums, const int32_t* x, int64_t plane, const Weights& w) {
    sums += multiply_pairs(Int32Vector{} + x[0], w.even);
    return sums + multiply_pairs(Int32Vector{} + x[plane], w.odd);
  }
};

#if defined(__AVX512F__)
// AVX-512's VNNI, whose instruction takes inputs without a sign: 128 is added to each, and 128 times the sum of the
// weights taken from the result. Written as assembly because not every processor with AVX-512 has it.
struct VnniBytes {
  static constexpr int kPlanes = 1;
  static constexpr int32_t kOffset = 128;

  using Weights = Int32Vector;

  static Weights weights(Int32Vector bytes) { return bytes; }

  static void planes(Int32Vector bytes, Int32Vector (&to)[kPlanes]) {
    to[0] = bytes ^ static_cast<int32_t>(0x80808080);
  }

  static Int32Vector add(Int32Vector sums, const int32_t* x, int64_t, Weights w) {
    const Int32Vector inputs = Int32Vector{} + x[0];
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(inputs), "v"(w));
    return sums;
  }

  static bool is_there() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
  }
};
#endif

}  // namespace
}  // namespace transformer_fast
