// The functions that every CPU kernel is made of, each against plain arithmetic: a program, built by
// tests/ops/test_portable.py for a processor without AVX2 and by tools/arm_check.py for aarch64. Needs no libtorch.
#include "cpu/simd/exp.h"
#include "cpu/simd/operands.h"
#include "cpu/simd/philox_dropout.h"
#include "cpu/simd/quantized_products.h"

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

namespace transformer_fast {
namespace {

std::mt19937_64 generator(20260101);

void check(bool right, const char* what) {
  if (right) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (a != a && b != b);
}

template <typename A>
void check_exponential(A lowest) {
  std::uniform_real_distribution<A> any(lowest, 1);
  for (int i = 0; i < 100000; ++i) {
    Vector<A> x;
    for (int64_t lane = 0; lane < kLanes<A>; ++lane) x[lane] = any(generator);
    const Vector<A> found = exponential(x);
    for (int64_t lane = 0; lane < kLanes<A>; ++lane) {
      const A expected = static_cast<A>(std::exp(static_cast<double>(x[lane])));
      const A error = std::abs(found[lane] - expected) / expected;
      check(error <= 2 * std::numeric_limits<A>::epsilon(), "exp within two units in the last place");
    }
  }
  check(exponential(broadcast(-std::numeric_limits<A>::infinity()))[0] <= std::numeric_limits<A>::min(), "exp(-inf)");
}

// Every number of 16 bits to float; and any float to 16 bits, against c10's own scalar conversion.
template <typename T>
void check_conversion() {
  constexpr int64_t lanes = kLanes<float>;
  for (uint32_t first = 0; first < 65536; first += lanes) {
    uint16_t bits[lanes];
    std::iota(bits, bits + lanes, static_cast<uint16_t>(first));
    T elements[lanes];
    std::memcpy(elements, bits, sizeof(bits));
    const Vector<float> found = load(elements);
    for (int64_t i = 0; i < lanes; ++i) check(same(found[i], static_cast<float>(elements[i])), "16 bits to float");
  }
  for (int i = 0; i < 200000; ++i) {
    Vector<float> v;
    for (int64_t lane = 0; lane < lanes; ++lane) v[lane] = float_of(static_cast<uint32_t>(generator()));
    if (i % 2 != 0)  // near 1, where Half neither overflows nor vanishes
      for (int64_t lane = 0; lane < lanes; ++lane) v[lane] = 1 + static_cast<uint32_t>(generator()) * 0x1p-33f;
    T found[lanes];
    store(found, v);
    for (int64_t lane = 0; lane < lanes; ++lane)
      check(same(static_cast<float>(found[lane]), static_cast<float>(static_cast<T>(v[lane]))), "float to 16 bits");
  }
}

// The bits of a row, wide or narrow, against philox.h itself.
void check_random_bits() {
  DropoutParams params;
  params.p = 0.25, params.seed = (int64_t{1} << 41) + 7;
  const Dropout dropout(params);
  const auto expected = [&](int64_t row, int64_t c) { return philox_elementwise(params.seed, row, c / 8).bits(c % 8); };
  for (const int64_t d : {1, 3, 8, 24, 40, 64, 130, 1000, 2500}) {
    const int64_t first = (int64_t{1} << 33) + 5;
    RandomBits random(dropout, d, first + 20);
    for (int64_t row = first; row < first + 20; ++row)
      for (int64_t column = 0; column < d; column += kChunkColumns) {
        const int64_t count = std::min(kChunkColumns, d - column);
        const uint16_t* const found = random.of(row, column, count);
        for (int64_t c = 0; c < count; ++c) check(found[c] == expected(row, column + c), "bits of a row");
      }
    if (d * 20 > kChunkColumns) continue;
    const uint16_t* const found = random.side_by_side(first, first + 20);
    for (int64_t i = 0; i < 20 * d; ++i) check(found[i] == expected(first + i / d, i % d), "bits of rows side by side");
  }
}

template <typename A>
void check_lanes() {
  constexpr int64_t lanes = kLanes<A>;
  Vector<A> rows[lanes];
  for (int64_t r = 0; r < lanes; ++r)
    for (int64_t c = 0; c < lanes; ++c) rows[r][c] = r * lanes + c;
  const Vector<A> slots[4] = {rows[0], rows[1], rows[2], rows[3]};
  check(sum(slots) == 4 * lanes * (4 * lanes - 1) / 2, "the sum of four vectors");
  for (int64_t r = 0; r < 4; ++r)
    check(four_lanes_added<A>(slots[0], slots[1], slots[2], slots[3])[r] == lane_sum<A>(slots[r]), "four sums");
  transpose<A>(rows);
  for (int64_t r = 0; r < lanes; ++r)
    for (int64_t c = 0; c < lanes; ++c) check(rows[r][c] == c * lanes + r, "a square transposed");
}

template <typename T>
void check_part_of_a_vector() {
  constexpr int64_t lanes = kLanes<Accumulate<T>>;
  T source[lanes], target[lanes];
  for (int64_t i = 0; i < lanes; ++i) source[i] = static_cast<T>(static_cast<float>(i + 1));
  for (int64_t count = 1; count < lanes; ++count) {
    std::fill(target, target + lanes, static_cast<T>(-1.0f));
    const auto v = load(source, count, Accumulate<T>(5));
    store(target, v, count);
    for (int64_t i = 0; i < lanes; ++i) {
      check(v[i] == (i < count ? i + 1 : 5), "lanes past the last column");
      check(static_cast<float>(target[i]) == (i < count ? i + 1 : -1), "elements past the last column");
    }
  }
}

// Sums of products of four bytes a lane, the greatest among them.
template <typename Products>
void check_byte_products() {
  std::uniform_int_distribution<int> any(-127, 127), one_in_eight(0, 7);
  for (int i = 0; i < 10000; ++i) {
    int8_t x[4], w[4 * kLanes<float>];
    const auto byte = [&] { return static_cast<int8_t>(one_in_eight(generator) ? any(generator) : -127); };
    std::generate(std::begin(x), std::end(x), byte);
    std::generate(std::begin(w), std::end(w), byte);
    int32_t word;
    std::memcpy(&word, x, sizeof(word));
    Int32Vector weights, planes[Products::kPlanes];
    std::memcpy(&weights, w, sizeof(weights));
    Products::planes(Int32Vector{} + word, planes);
    const int32_t offset = -Products::begin(Int32Vector{} + 1)[0];
    Int32Vector found = Int32Vector{} + i;
    for (int p = 0; p < Products::kPlanes; ++p)
      found = Products::add(found, planes[p][0], Products::weights(Products::stored(weights), p));
    for (int64_t lane = 0; lane < kLanes<float>; ++lane) {
      int32_t expected = i;
      for (int k = 0; k < 4; ++k) expected += (x[k] + offset) * w[4 * lane + k];
      check(found[lane] == expected, "products of bytes");
    }
  }
}

}  // namespace
}  // namespace transformer_fast

int main() {
  using namespace transformer_fast;
  check_exponential<float>(-87);
  check_exponential<double>(-708);
  check_conversion<c10::Half>();
  check_conversion<c10::BFloat16>();
  check_random_bits();
  check_lanes<float>();
  check_lanes<double>();
  check_byte_products<WidenedBytes>();
#if defined(__AVX512F__)
  if (VnniBytes::is_there()) check_byte_products<VnniBytes>();
#endif
  check_part_of_a_vector<float>();
  check_part_of_a_vector<double>();
  check_part_of_a_vector<c10::Half>();
  check_part_of_a_vector<c10::BFloat16>();
  std::printf("right with vectors of %d bytes\n", static_cast<int>(kVectorBytes));
}
