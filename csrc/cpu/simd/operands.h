// Rows of a tensor, and tiles of scores, as operands of the products of micro_gemm.h.
#pragma once

#include "micro_gemm.h"

#include <cmath>
#include <utility>

namespace transformer_fast {
namespace {

// One step of the transposition: swaps the off-diagonal blocks, kHalf lanes wide, of every block 2 * kHalf wide of the first
// kRows rows.
template <typename A, int kHalf, int kRows, std::size_t... kLane>
inline void swap_blocks(Vector<A>* rows, std::index_sequence<kLane...>) {
  constexpr int lanes = kLanes<A>;
  for (int r = 0; r < kRows; ++r) {
    if (r & kHalf) continue;
    const Vector<A> a = rows[r], b = rows[r + kHalf];
    rows[r] = __builtin_shuffle(a, b, IntegerVector<A>{(kLane & kHalf ? kLane - kHalf + lanes : kLane)...});
    rows[r + kHalf] = __builtin_shuffle(a, b, IntegerVector<A>{(kLane & kHalf ? kLane + lanes : kLane + kHalf)...});
  }
}

// Transposes a square of kLanes vectors in registers.
template <typename A, int kHalf = kLanes<A> / 2>
inline void transpose(Vector<A>* rows) {
  swap_blocks<A, kHalf, kLanes<A>>(rows, std::make_index_sequence<kLanes<A>>{});
  if constexpr (kHalf > 1) transpose<A, kHalf / 2>(rows);
}

// The sum of the lanes of vector j of kLanes, in lane j. The vectors are overwritten.
template <typename A, int kHalf = kLanes<A> / 2>
inline Vector<A> lanes_of_each_added(Vector<A>* vectors) {
  swap_blocks<A, kHalf, 2 * kHalf>(vectors, std::make_index_sequence<kLanes<A>>{});
  for (int v = 0; v < kHalf; ++v) vectors[v] += vectors[v + kHalf];
  if constexpr (kHalf > 1) return lanes_of_each_added<A, kHalf / 2>(vectors);
  return vectors[0];
}

template <typename A>
inline A lane_sum(Vector<A> v) {
  const Vector<A> slots[4] = {v};
  return sum(slots);
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Calls store(column, row, v) for each column and each vector of rows: lane i of v is the value of row + i in that
// column. row_at(row, column, count) returns `count` neighbouring columns of a row; missing rows are zero.
template <typename A, typename RowAt, typename Store>
inline void transpose_rows(int64_t rows, int64_t columns, RowAt row_at, Store store) {
  constexpr int64_t lanes = kLanes<A>;
  for (int64_t r = 0; r < rows; r += lanes)
    for (int64_t c = 0; c < columns; c += lanes) {
      Vector<A> square[lanes];
      if (r + lanes <= rows && c + lanes <= columns) {  // the compiler then knows every count
        for (int64_t i = 0; i < lanes; ++i) square[i] = row_at(r + i, c, lanes);
        transpose<A>(square);
        for (int64_t i = 0; i < lanes; ++i) store(c + i, r, square[i]);
        continue;
      }
      for (int64_t i = 0; i < lanes; ++i)
        square[i] = r + i < rows ? row_at(r + i, c, std::min(lanes, columns - c)) : Vector<A>{};
      transpose<A>(square);
      for (int64_t i = 0; i < std::min(lanes, columns - c); ++i) store(c + i, r, square[i]);
    }
}

// Memory of a buffer, for operands.
template <typename T>
inline Operand<T>* operands(Accumulate<T>* buffer) {
  return reinterpret_cast<Operand<T>*>(buffer);
}

// Prefetches all rows that are read next; without this, reads would wait for a few rows at a time.
template <typename T>
inline void fetch_rows(const T* rows, int64_t stride, int64_t count, int64_t columns) {
  constexpr int64_t of_line = 64 / sizeof(T);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t d = 0; d < columns; d += of_line) __builtin_prefetch(rows + r * stride + d);
}

// (queries, D) of a tensor as (D, queries): the right operand of a product whose vectors run along the queries.
template <typename T>
inline Rows<Operand<T>> load_lanes(const T* source, int64_t stride, int64_t queries, int64_t D, Operand<T>* lanes) {
  using A = Accumulate<T>;
  using E = Operand<T>;
  const int64_t padded = round_up(queries, kLanes<A>);
  fetch_rows(source, stride, queries, D);
  const auto row_at = [&](int64_t i, int64_t d, int64_t count) {
    if constexpr (kPaired<T>)
      return load_bits(source + i * stride + 2 * d, std::min(2 * count, D - 2 * d));
    else
      return load_some(source + i * stride + d, count);
  };
  transpose_rows<A>(queries, (D + kSteps<E> - 1) / kSteps<E>, row_at,
                    [&](int64_t d, int64_t i, Vector<A> v) { store(reinterpret_cast<A*>(lanes) + d * padded + i, v); });
  return {lanes, padded, true};
}

// A tile's rows as the right operand of a product over the rows: in place if the layout allows.
template <typename T>
inline Rows<Operand<T>> load_rows(const T* source, int64_t stride, int64_t rows, int64_t columns, Operand<T>* scratch) {
  using A = Accumulate<T>;
  constexpr int64_t lanes = kLanes<A>;
  const int64_t padded = round_up(columns, lanes);
  Vector<A> poison{};  // 0, or NaN if an element is not finite
  if constexpr (kPaired<T>) {
    for (int64_t r = 0; r < rows; r += 2)
      for (int64_t c = 0; c < columns; c += 2 * lanes) {
        const int64_t count = std::min(2 * lanes, columns - c);
        const T* row = source + r * stride + c;
        const Vector<A> upper = load_bits(row, count), lower = load_bits(row + stride, r + 1 < rows ? count : 0);
        const Vector<A> pairs[2] = {halves_interleaved(upper, lower, 0), halves_interleaved(upper, lower, 16)};
        for (int64_t n = 0; n * lanes < count; ++n) {
          poison = add_product(poison, Pair{}, pairs[n]);
          store(reinterpret_cast<A*>(scratch + r / 2 * padded + c + n * lanes), pairs[n]);
        }
      }
    return {scratch, padded, lane_sum<A>(poison) == 0};
  } else {
    // Rows with a large stride would conflict in the cache in each pass of a product.
    const bool in_place = std::is_same_v<T, A> && stride == columns && columns == padded;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < padded; c += lanes) {
        const Vector<A> v = load_some(source + r * stride + c, std::min(lanes, columns - c));
        poison = fma(v, A(0), poison);
        if (!in_place) store(scratch + r * padded + c, v);
      }
    const bool finite = lane_sum<A>(poison) == 0;
    if constexpr (std::is_same_v<T, A>)
      if (in_place) return {source, stride, finite};
    return {scratch, padded, finite};
  }
}

// A tile's rows as the left operand of a product over D: in place if possible. Rows in place are all prefetched,
// because the product itself would wait for a few at a time.
template <typename T>
inline Matrix<Operand<T>> load_factors(const T* source, int64_t stride, int64_t rows, int64_t D, Operand<T>* scratch) {
  using A = Accumulate<T>;
  if constexpr (std::is_same_v<T, A>) {
    fetch_rows(source, stride, rows, D);
    return {source, stride};
  } else if constexpr (kPaired<T>) {
    if (D % 2 == 0 && stride % 2 == 0) {
      fetch_rows(source, stride, rows, D);
      return {reinterpret_cast<const Pair*>(source), stride / 2};
    }
    const int64_t pairs = (D + 1) / 2;
    for (int64_t r = 0; r < rows; ++r) {
      scratch[r * pairs + pairs - 1] = Pair{};
      std::memcpy(scratch + r * pairs, source + r * stride, D * sizeof(T));
    }
    return {scratch, pairs};
  } else {
    const Rows<A> converted = load_rows(source, stride, rows, D, scratch);
    return {converted.data, converted.stride};
  }
}

// store_some for results: faster for bfloat16, but may flush subnormal numbers to zero.
template <typename T>
inline void store_result(T* p, Vector<Accumulate<T>> v, int64_t count) {
  if constexpr (kPaired<T>)
    store_half_bits(p, packed_halves(v, decltype(v){}), count);
  else
    store_some(p, v, count);
}

// target = row * factor, where a row lies in whole vectors. bfloat16 goes by whole cache lines.
template <typename T, typename A>
inline void store_row(const A* row, A factor, int64_t columns, T* target) {
  int64_t d = 0;
  if constexpr (kPaired<T>)
    for (; d + 2 * kLanes<A> <= columns; d += 2 * kLanes<A>)
      store(reinterpret_cast<A*>(target + d),
            packed_halves(load(row + d) * factor, load(row + d + kLanes<A>) * factor));
  for (; d < columns; d += kLanes<A>)
    store_result(target + d, load(row + d) * factor, std::min(kLanes<A>, columns - d));
}

// Scales `count` rows, `width` apart.
template <typename T, typename A>
inline void store_rows(const A* rows, int64_t width, int64_t count, A factor, int64_t columns, T* target,
                       int64_t stride) {
  for (int64_t i = 0; i < count; ++i) store_row(rows + i * width, factor, columns, target + i * stride);
}

// Pairs of keys j and j + 1, stored in the row of key j, as the left operand of a product over the keys.
template <typename E, typename A>
inline Matrix<E> pairs_over_keys(const A* tile, int64_t lanes) {
  return {reinterpret_cast<const E*>(tile), 1, kSteps<E> * lanes};
}

// A tile of scores, (keys, lanes) with `lanes` queries, as left operand over the keys. Pairs are packed in place.
template <typename E, typename A>
inline Matrix<E> over_keys(A* tile, int64_t keys, int64_t lanes) {
  if constexpr (std::is_same_v<E, Pair>) {
    for (int64_t j = 0; j < keys; j += 2)
      for (int64_t lane = 0; lane < lanes; lane += kLanes<A>) {
        A* row = tile + j * lanes + lane;
        store(row, packed_pairs(load(row), j + 1 < keys ? load(row + lanes) : Vector<A>{}));
      }
  }
  return pairs_over_keys<E>(tile, lanes);
}

// An odd last query is paired with a row of zeros, but this memory may hold NaN.
template <typename A>
inline void clear_partner(A* pairs, int64_t queries) {
  reinterpret_cast<Pair*>(pairs)[queries / 2].element[1] = 0;
}

// A tile of scores as left operand over the queries. Pairs are packed into `packed`, which may be the tile.
template <typename E, typename A>
inline Matrix<E> over_queries(const A* tile, int64_t keys, int64_t queries, int64_t lanes, A* packed) {
  if constexpr (std::is_same_v<E, Pair>) {
    for (int64_t j = 0; j < keys; ++j) {
      const A* row = tile + j * lanes;
      for (int64_t lane = 0; lane < lanes; lane += 2 * kLanes<A>) {
        const bool whole = lane + kLanes<A> < lanes;
        const Vector<A> upper = whole ? load(row + lane + kLanes<A>) : Vector<A>{};
        store(packed + j * lanes + lane / 2, packed_halves(load(row + lane), upper));
      }
      if (queries % 2 != 0) clear_partner(packed + j * lanes, queries);
    }
    return {reinterpret_cast<const Pair*>(packed), lanes, 1};
  } else {
    return {tile, lanes, 1};
  }
}

// Puts 0 in place of every NaN and Inf among `count` elements.
template <typename E>
inline void zero_non_finite(const E* source, int64_t count, E* target) {
  std::transform(source, source + count, target, [](E element) {
    if constexpr (std::is_same_v<E, Pair>) {
      for (auto& half : element.element)
        if (!std::isfinite(static_cast<float>(half))) half = 0;
      return element;
    } else {
      return std::isfinite(element) ? element : E(0);
    }
  });
}

}  // namespace
}  // namespace transformer_fast
