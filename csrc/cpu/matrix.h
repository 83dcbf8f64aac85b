// Small matrix products for tiles that live in the cache: C = A B with the vectors along the columns of C and B.
//
// One element of A is broadcast at a time, so A may have any strides: row-major and transposed cost the same, and
// nothing is packed. On tiles of 64 this is faster than a library call, which packs first.
#pragma once

#include "vec.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace transformer_fast {
namespace {

#if defined(__AVX512F__)
constexpr int kPanelVectors = 4;  // 6 x 4 sums, 4 vectors of B and a broadcast fill 32 registers
#else
constexpr int kPanelVectors = 2;  // and 6 x 2 sums the 16 of AVX2
#endif
constexpr int kPanelRows = 6;

// Element (row, column) is data[row * row_stride + column * column_stride].
template <typename A>
struct Matrix {
  const A* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  Matrix transposed() const { return {data, column_stride, row_stride}; }
};

// The rows of a tile of B: contiguous, padded with zeros to whole vectors. `finite`: no NaN or Inf in it.
template <typename A>
struct Rows {
  const A* data;
  int64_t stride;
  bool finite;
};

template <bool kAdd, int kRows, int kVectors, typename A>
inline void multiply_panel(int64_t depth, const A* a, int64_t a_row, int64_t a_column, const A* b, int64_t b_stride,
                           A* c, int64_t c_stride) {
  constexpr int64_t lanes = kLanes<A>;
  Vector<A> sums[kRows][kVectors];
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kVectors; ++n) sums[m][n] = kAdd ? widen(c + m * c_stride + n * lanes) : Vector<A>{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector<A> row[kVectors];
    for (int n = 0; n < kVectors; ++n) row[n] = widen(b + k * b_stride + n * lanes);
    for (int m = 0; m < kRows; ++m) {
      const A factor = a[m * a_row + k * a_column];
      for (int n = 0; n < kVectors; ++n) sums[m][n] += factor * row[n];
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kVectors; ++n) narrow(c + m * c_stride + n * lanes, sums[m][n]);
}

template <bool kAdd, int kRows, int kVectors, typename A>
inline void multiply_last_rows(int64_t rows, int64_t depth, const A* a, int64_t a_row, int64_t a_column, const A* b,
                               int64_t b_stride, A* c, int64_t c_stride) {
  if constexpr (kRows > 0) {
    if (rows == kRows)
      multiply_panel<kAdd, kRows, kVectors>(depth, a, a_row, a_column, b, b_stride, c, c_stride);
    else
      multiply_last_rows<kAdd, kRows - 1, kVectors>(rows, depth, a, a_row, a_column, b, b_stride, c, c_stride);
  }
}

template <bool kAdd, int kVectors, typename A>
void multiply_columns(int64_t rows, int64_t vectors, int64_t depth, Matrix<A> a, const A* b, int64_t b_stride, A* c,
                      int64_t c_stride) {
  for (; vectors >= kVectors; vectors -= kVectors, b += kVectors * kLanes<A>, c += kVectors * kLanes<A>) {
    int64_t m = 0;
    for (; m + kPanelRows <= rows; m += kPanelRows)
      multiply_panel<kAdd, kPanelRows, kVectors>(depth, a.data + m * a.row_stride, a.row_stride, a.column_stride, b,
                                                 b_stride, c + m * c_stride, c_stride);
    multiply_last_rows<kAdd, kPanelRows - 1, kVectors>(rows - m, depth, a.data + m * a.row_stride, a.row_stride,
                                                       a.column_stride, b, b_stride, c + m * c_stride, c_stride);
  }
  if constexpr (kVectors > 1)
    if (vectors > 0) multiply_columns<kAdd, kVectors - 1>(rows, vectors, depth, a, b, b_stride, c, c_stride);
}

// Where A is exactly 0, B is not read into the sum: a blocked key's NaN or Inf must not pass as 0 * NaN.
template <typename A>
void multiply_add_skipping_zeros(int64_t rows, int64_t columns, int64_t depth, Matrix<A> a, Rows<A> b, A* c,
                                 int64_t c_stride) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t k = 0; k < depth; ++k) {
      const A factor = a.data[m * a.row_stride + k * a.column_stride];
      if (factor == 0) continue;
      for (int64_t n = 0; n < columns; ++n) c[m * c_stride + n] += factor * b.data[k * b.stride + n];
    }
}

// c (rows, columns) = a (rows, depth) b (depth, columns); `columns` and the rows of b and c are whole vectors.
template <typename A>
void multiply(int64_t rows, int64_t columns, int64_t depth, Matrix<A> a, Rows<A> b, A* c, int64_t c_stride) {
  multiply_columns<false, kPanelVectors>(rows, columns / kLanes<A>, depth, a, b.data, b.stride, c, c_stride);
}

// c += a b; a zero in `a` is no term at all when b is not finite.
template <typename A>
void multiply_add(int64_t rows, int64_t columns, int64_t depth, Matrix<A> a, Rows<A> b, A* c, int64_t c_stride) {
  if (b.finite)
    multiply_columns<true, kPanelVectors>(rows, columns / kLanes<A>, depth, a, b.data, b.stride, c, c_stride);
  else
    multiply_add_skipping_zeros(rows, columns, depth, a, b, c, c_stride);
}

// One step of the transposition: swaps the off-diagonal blocks, kHalf lanes wide, of every block 2 * kHalf wide.
template <typename A, int kHalf, std::size_t... kLane>
inline void swap_blocks(Vector<A>* rows, std::index_sequence<kLane...>) {
  constexpr int lanes = kLanes<A>;
  for (int r = 0; r < lanes; ++r) {
    if (r & kHalf) continue;
    const Vector<A> a = rows[r], b = rows[r + kHalf];
    rows[r] = __builtin_shuffle(a, b, IntegerVector<A>{(kLane & kHalf ? kLane - kHalf + lanes : kLane)...});
    rows[r + kHalf] = __builtin_shuffle(a, b, IntegerVector<A>{(kLane & kHalf ? kLane + lanes : kLane + kHalf)...});
  }
}

// Transposes a square of kLanes vectors in registers.
template <typename A, int kHalf = kLanes<A> / 2>
inline void transpose(Vector<A>* rows) {
  swap_blocks<A, kHalf>(rows, std::make_index_sequence<kLanes<A>>{});
  if constexpr (kHalf > 1) transpose<A, kHalf / 2>(rows);
}

template <typename A>
inline A lane_sum(Vector<A> v) {
  const Vector<A> slots[4] = {v};
  return sum<A>(slots);
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// out[column * out_stride + row] = row_at(row, column, count) for all columns and for rows rounded up to whole vectors;
// row_at gives `count` lanes of a row, and is not called for rows that do not exist: those become zero.
template <typename A, typename RowAt>
inline void transpose_rows(int64_t rows, int64_t columns, RowAt row_at, A* out, int64_t out_stride) {
  constexpr int64_t lanes = kLanes<A>;
  for (int64_t r = 0; r < rows; r += lanes)
    for (int64_t c = 0; c < columns; c += lanes) {
      Vector<A> square[lanes];
      for (int64_t i = 0; i < lanes; ++i)
        square[i] = r + i < rows ? row_at(r + i, c, std::min(lanes, columns - c)) : Vector<A>{};
      transpose<A>(square);
      for (int64_t i = 0; i < std::min(lanes, columns - c); ++i) narrow(out + (c + i) * out_stride + r, square[i]);
    }
}

// `count` lanes, the others zero, in a loop that mostly meets whole vectors.
template <typename T>
inline Vector<Accumulate<T>> load_some(const T* p, int64_t count) {
  if (count == kLanes<Accumulate<T>>) return widen(p);
  T lanes[kLanes<Accumulate<T>>] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return widen(lanes);
}

template <typename T>
inline void store_some(T* p, Vector<Accumulate<T>> v, int64_t count) {
  if (count == kLanes<Accumulate<T>>) return narrow(p, v);
  T lanes[kLanes<Accumulate<T>>];
  narrow(lanes, v);
  std::memcpy(p, lanes, count * sizeof(T));
}

// Rows of a tensor as a tile of B: in place where they already lie so, else converted and padded into `scratch`.
template <typename T>
inline Rows<Accumulate<T>> load_rows(const T* source, int64_t stride, int64_t rows, int64_t columns,
                                     Accumulate<T>* scratch) {
  using A = Accumulate<T>;
  constexpr int64_t lanes = kLanes<A>;
  const int64_t padded = round_up(columns, lanes);
  // Far-apart rows would fight over the same cache lines each time a product passes over them.
  const bool in_place = std::is_same_v<T, A> && stride == columns && columns == padded;
  Vector<A> poison{};
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < padded; c += lanes) {
      const Vector<A> v = load_some(source + r * stride + c, std::min(lanes, columns - c));
      poison += v * A(0);
      if (!in_place) narrow(scratch + r * padded + c, v);
    }
  const bool finite = lane_sum<A>(poison) == 0;
  if constexpr (std::is_same_v<T, A>)
    if (in_place) return {source, stride, finite};
  return {scratch, padded, finite};
}

}  // namespace
}  // namespace transformer_fast
