// Small matrix products for tiles that live in the cache: C = A B with the vectors along the columns of C and B.
//
// One element of A is broadcast at a time, so A may have any strides: row-major and transposed cost the same, and
// nothing is packed. On tiles of 64 this is faster than a library call, which packs first.
//
// An element of A or B is a float or double, or a Pair: two bfloat16 that follow each other along the depth, as the
// VDPBF16PS instruction multiplies them. Sums are float or double. operands.h makes operands of a tensor's rows.
#pragma once

#include "vec.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace transformer_fast {
namespace {

// 6 x 4 sums, 4 vectors of B and a broadcast fill 32 registers, 6 x 2 sums the 16 of AVX2.
constexpr int kPanelVectors = kVectorRegisters == 32 ? 4 : 2;
constexpr int kPanelRows = 6;

// Steps of the depth that one element covers.
template <typename E>
constexpr int64_t kSteps = std::is_same_v<E, Pair> ? 2 : 1;

// Type of a tensor's elements in a product.
template <typename T>
using Operand = std::conditional_t<kPaired<T>, Pair, Accumulate<T>>;

// sums + a * b, lane by lane; a and b hold elements of type E.
template <typename E, typename V>
inline V add_products(V sums, V a, V b) {
  if constexpr (std::is_same_v<E, Pair>)
    return add_pairs(sums, a, b);
  else
    return fma(a, b, sums);
}

template <typename E, typename V>
inline V add_product(V sums, E factor, V row) {
  if constexpr (std::is_same_v<E, Pair>)
    return add_pairs(sums, row, broadcast_pair(factor));
  else
    return fma(row, factor, sums);
}

// Element (row, column) is data[row * row_stride + column * column_stride].
template <typename E>
struct Matrix {
  const E* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  Matrix transposed() const { return {data, column_stride, row_stride}; }
};

// The rows of a tile of B: contiguous, padded with zeros to whole vectors. `finite`: no NaN or Inf in it.
template <typename E>
struct Rows {
  const E* data;
  int64_t stride;
  bool finite;
};

// Use of a product: added to c, or assigned to c, plain, or times a factor and optionally masked.
struct Added {};

struct Put {
  template <typename V, typename A>
  V operator()(V product, const A*) const {
    return product;
  }
};

template <typename A>
struct Scaled {
  A factor;

  Vector<A> operator()(Vector<A> product, const A*) const { return product * factor; }
};

// `c` holds addends. Where an addend is -inf, the result is -inf, even if the product is NaN.
template <typename A>
struct Masked {
  A factor;

  Vector<A> operator()(Vector<A> product, const A* c) const {
    const Vector<A> addend = load(c);
    return addend == -std::numeric_limits<A>::infinity() ? addend : fma(product, factor, addend);
  }
};

template <int kRows, int kVectors, typename E, typename End>
inline void multiply_panel(int64_t depth, const E* a, int64_t a_row, int64_t a_column, const E* b, int64_t b_stride,
                           End end, Accumulate<E>* c, int64_t c_stride) {
  using A = Accumulate<E>;
  constexpr int64_t lanes = kLanes<A>;
  constexpr bool kAdd = std::is_same_v<End, Added>;
  // A panel of one vector has too few sums to keep the units busy, and one long sum loses more digits than two short
  // ones.
  constexpr int kParts = kVectors == 1 ? 2 : 1;
  Vector<A> sums[kParts][kRows][kVectors];
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n)
      for (int part = 0; part < kParts; ++part) sums[part][m][n] = Vector<A>{};
  const auto add_step = [&](int64_t k, int part) {
    Vector<A> row[kVectors];
    for (int n = 0; n < kVectors; ++n) row[n] = load(b + k * b_stride + n * lanes);
    for (int m = 0; m < kRows; ++m) {
      const E element = a[m * a_row + k * a_column];
      for (int n = 0; n < kVectors; ++n) sums[part][m][n] = add_product(sums[part][m][n], element, row[n]);
    }
  };
  int64_t k = 0;
  for (; k + kParts <= depth; k += kParts)
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) add_step(k + part, part);
  for (; k < depth; ++k) add_step(k, 0);
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      A* target = c + m * c_stride + n * lanes;
      Vector<A> sum = sums[0][m][n];
      if constexpr (kParts == 2) sum += sums[1][m][n];
      // Not into the sums of c, whose digits each step would round: a gradient is the sum of many tiles.
      if constexpr (kAdd)
        store(target, load(target) + sum);
      else
        store(target, end(sum, target));
    }
}

template <int kRows, int kVectors, typename E, typename End>
inline void multiply_last_rows(int64_t rows, int64_t depth, const E* a, int64_t a_row, int64_t a_column, const E* b,
                               int64_t b_stride, End end, Accumulate<E>* c, int64_t c_stride) {
  if constexpr (kRows > 0) {
    if (rows == kRows)
      multiply_panel<kRows, kVectors>(depth, a, a_row, a_column, b, b_stride, end, c, c_stride);
    else
      multiply_last_rows<kRows - 1, kVectors>(rows, depth, a, a_row, a_column, b, b_stride, end, c, c_stride);
  }
}

template <int kVectors, typename E, typename End>
void multiply_columns(int64_t rows, int64_t vectors, int64_t depth, Matrix<E> a, const E* b, int64_t b_stride, End end,
                      Accumulate<E>* c, int64_t c_stride) {
  constexpr int64_t columns = kVectors * kLanes<Accumulate<E>>;
  for (; vectors >= kVectors; vectors -= kVectors, b += columns, c += columns) {
    int64_t m = 0;
    for (; m + kPanelRows <= rows; m += kPanelRows)
      multiply_panel<kPanelRows, kVectors>(depth, a.data + m * a.row_stride, a.row_stride, a.column_stride, b, b_stride,
                                           end, c + m * c_stride, c_stride);
    multiply_last_rows<kPanelRows - 1, kVectors>(rows - m, depth, a.data + m * a.row_stride, a.row_stride,
                                                 a.column_stride, b, b_stride, end, c + m * c_stride, c_stride);
  }
  if constexpr (kVectors > 1)
    if (vectors > 0) multiply_columns<kVectors - 1>(rows, vectors, depth, a, b, b_stride, end, c, c_stride);
}

// An element of A that is exactly 0 skips its row of B, so that a blocked key's NaN or Inf does not enter as 0 * NaN.
// The sums are equal to multiply_panel's bit for bit, so such a key has no effect: a panel of one vector has two sums.
template <typename E>
void multiply_add_skipping_zeros(int64_t rows, int64_t columns, int64_t depth, Matrix<E> a, Rows<E> b, Accumulate<E>* c,
                                 int64_t c_stride) {
  using A = Accumulate<E>;
  const auto part = [](const E& element, int64_t step) {
    if constexpr (std::is_same_v<E, Pair>)
      return static_cast<A>(element.element[step]);
    else
      return element;
  };
  constexpr int64_t lanes = kLanes<A>;
  const int64_t first_split = columns / lanes % kPanelVectors == 1 ? columns - lanes : columns;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t first = 0; first < columns; first += lanes) {
      const bool splits = first >= first_split;
      A sums[2][lanes] = {};
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t step = 0; step < kSteps<E>; ++step) {
          const A factor = part(a.data[m * a.row_stride + k * a.column_stride], step);
          if (factor == 0) continue;
          A* const own = sums[splits ? k % 2 : 0];
          for (int64_t n = 0; n < lanes; ++n)
            own[n] = fma(factor, part(b.data[k * b.stride + first + n], step), own[n]);
        }
      for (int64_t n = 0; n < lanes; ++n) c[m * c_stride + first + n] += splits ? sums[0][n] + sums[1][n] : sums[0][n];
    }
}

// c (rows, columns) = end(a (rows, depth) b (depth, columns)); `columns` and the rows of b and c are whole vectors, a
// and b are padded with zeros to whole elements of the depth.
template <typename E, typename End>
void multiply(int64_t rows, int64_t columns, int64_t depth, Matrix<E> a, Rows<E> b, End end, Accumulate<E>* c,
              int64_t c_stride) {
  multiply_columns<kPanelVectors>(rows, columns / kLanes<Accumulate<E>>, (depth + kSteps<E> - 1) / kSteps<E>, a, b.data,
                                  b.stride, end, c, c_stride);
}

// c += a b, or c = a b if c is `fresh`; a zero in `a` adds no term if b is not finite.
template <typename E>
void multiply_add(int64_t rows, int64_t columns, int64_t depth, Matrix<E> a, Rows<E> b, bool fresh, Accumulate<E>* c,
                  int64_t c_stride) {
  const int64_t vectors = columns / kLanes<Accumulate<E>>, elements = (depth + kSteps<E> - 1) / kSteps<E>;
  if (!b.finite) {
    for (int64_t m = 0; fresh && m < rows; ++m) std::fill(c + m * c_stride, c + m * c_stride + columns, 0);
    multiply_add_skipping_zeros(rows, columns, elements, a, b, c, c_stride);
  } else if (fresh) {
    multiply_columns<kPanelVectors>(rows, vectors, elements, a, b.data, b.stride, Put{}, c, c_stride);
  } else {
    multiply_columns<kPanelVectors>(rows, vectors, elements, a, b.data, b.stride, Added{}, c, c_stride);
  }
}

}  // namespace
}  // namespace transformer_fast
