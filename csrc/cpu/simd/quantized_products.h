// Products of bytes, four per lane: an input row times the weights of an output.
//
// A struct is one way to multiply. The inputs of a product lie in planes, one 32-bit word in each for a group of four
// bytes of a row. `stored` is how a vector of the weights' words is kept, and `weights` what it becomes for a plane
// before several rows are multiplied with it. A product takes `kRows` rows at once; a `Session` is alive during the
// multiplication.
#pragma once

#include "vec.h"

#if defined(__AVX512F__)
#include <cpuid.h>
#endif
#if defined(__AVX512BF16__) && defined(__linux__)
#define TRANSFORMER_FAST_TILES
#include "tiles.h"
#endif

namespace transformer_fast {
namespace {

using Int32Vector = IntegerVector<float>;
typedef int16_t Int16Vector __attribute__((vector_size(kVectorBytes)));

// Number of groups per read of weights; weights for tiles are padded to it.
#if defined(TRANSFORMER_FAST_TILES)
constexpr int64_t kGroupsAtOnce = kTileGroups;
#else
constexpr int64_t kGroupsAtOnce = 1;
#endif

// Operands of products in vectors, row by row.
struct VectorProducts {
  static constexpr int64_t kRows = 1;
  struct Session {
    explicit Session(int64_t) {}
  };
};

// Bytes, four per lane, summed exactly: all intermediate sums have 32 bits, so nothing saturates. (AVX2's vpmaddubsw
// adds products of bytes in 16 bits: it is not used.) `offset` is added to each input.
template <int32_t offset>
struct ByteProducts : VectorProducts {
  // weight_sums: sum of the weights per output.
  static Int32Vector begin(Int32Vector weight_sums) { return weight_sums * -offset; }
};

// On any vector unit, by 16-bit products that are summed in pairs: one word holds the even inputs of four bytes,
// another word the odd inputs. 16 bits hold two weights as w = even + 256 odd, which is cheap to split. The product
// x_even * w has the excess 256 x_even * odd. The plane of the odd inputs, x_odd - 256 x_even, removes the excess.
// After each group the sums equal those of the bytes' products.
struct WidenedBytes : ByteProducts<0> {
  static constexpr int kPlanes = 2;

  static Int32Vector stored(Int32Vector bytes) {
    const Int16Vector pairs = reinterpret_cast<Int16Vector>(bytes);
    return reinterpret_cast<Int32Vector>(even(pairs) + (pairs >> 8 << 8));
  }

  static Int32Vector weights(Int32Vector words, int plane) {
    return plane == 0 ? words : reinterpret_cast<Int32Vector>((reinterpret_cast<Int16Vector>(words) + 128) >> 8);
  }

  static void planes(Int32Vector bytes, Int32Vector (&to)[kPlanes]) {
    const Int16Vector pairs = reinterpret_cast<Int16Vector>(bytes);
    to[0] = reinterpret_cast<Int32Vector>(even(pairs));
    to[1] = reinterpret_cast<Int32Vector>((pairs >> 8) - (even(pairs) << 8));
  }

  static Int32Vector add(Int32Vector sums, int32_t x, Int32Vector w) {
    return add_products_of_halves(sums, Int32Vector{} + x, w);
  }

 private:
  static Int16Vector even(Int16Vector pairs) { return pairs << 8 >> 8; }
};

#if defined(__AVX512F__)
// AVX-512 VNNI takes unsigned inputs: 128 is added to each input, and 128 times the sum of the weights is subtracted
// from the result. Written as assembly because not every processor with AVX-512 has VNNI.
struct VnniBytes : ByteProducts<128> {
  static constexpr int kPlanes = 1;

  static Int32Vector stored(Int32Vector bytes) { return bytes; }
  static Int32Vector weights(Int32Vector bytes, int) { return bytes; }

  static void planes(Int32Vector bytes, Int32Vector (&to)[kPlanes]) {
    to[0] = bytes ^ static_cast<int32_t>(0x80808080);
  }

  static Int32Vector add(Int32Vector sums, int32_t x, Int32Vector w) {
    const Int32Vector inputs = Int32Vector{} + x;
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(inputs), "v"(w));
    return sums;
  }

  static bool is_there() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
  }
};
#endif

#if defined(TRANSFORMER_FAST_TILES)
// AMX takes signed bytes, so it needs no offset.
struct TileProducts {
  using Session = TileSession;
  static constexpr int kPlanes = 1;
  static constexpr int64_t kRows = kTileRows;

  static Int32Vector stored(Int32Vector words) { return words; }
  static void planes(Int32Vector words, Int32Vector (&to)[kPlanes]) { to[0] = words; }
};
#endif

}  // namespace
}  // namespace transformer_fast
