// LayerNorm, Norm and RMSNorm, optionally of residual + dropout(x), backward.
//
// With g = dy * weight and h = (x - mean) * rstd, all norms have dx = rstd * (g - average(g) - h * slope).
//   layer: slope = sum(g h) / d
//   std:   slope = sum(g h) / sqrt(sum(h h) * (d - 1)), which holds for any eps; 0 for a constant row, where h = 0
//   rms:   the slope of layer; without mean and average(g)
//
// Weight gradients are summed in chunks of rows, whose number depends on the shape only, or column by column in a
// separate pass. In both cases the result has the same bits on any number of threads.

#include "../parallel.h"
#include "../partials.h"
#include "common.h"

#include <algorithm>
#include <cmath>

namespace transformer_fast {
namespace {

constexpr int kRowsAtOnce = 4;          // rows that are summed together in three cases:
constexpr int64_t kCached = 1048576;    // the matrix has at most this many bytes,
constexpr int64_t kShort = 64;          // or a row has at most this many columns,
constexpr int64_t kLong = 4096;         // or at least this many; else reading row by row is faster
constexpr int64_t kColumns = 512;       // columns whose weight gradients fit the first-level cache
constexpr int64_t kFewestColumns = 64;  // minimum number of columns per thread in a pass by columns

// True if the weight gradients are summed by columns, by reading the rows a second time. Sums of small chunks would
// need much memory compared with the rows, and a matrix that fits the cache is cheap to read again.
bool sum_by_columns(int64_t rows, int64_t d) {
  const int64_t chunk = chunk_rows(rows, d);
  return chunk < rows && (chunk < 8 || (chunk < 32 && rows * d <= 1 << 20));
}

// Factors of at most kRowsAtOnce rows: dx = rstd * (g - average - (x - mean) * rstd * slope).
template <typename A>
struct RowGradients {
  Four<A> average, slope;
};

// kCentred: true for LayerNorm and Norm; false for RMSNorm, which has no mean, no average and no bias.
template <typename T, bool kCentred>
struct Backward {
  using A = Accumulate<T>;
  NormBackwardParams<T> p;
  const A* weight;  // may be absent
  int64_t d = p.d;
  Dropout dropout{p.dropout};

  // x - mean for a vector of a row; 0 in lanes past `count`.
  template <typename Count>
  static Vector<A> centred(const T* x, Count count, A mean) {
    if constexpr (kCentred) return load(x, count, mean) - mean;
    return load(x, count);
  }

  A mean_of(int64_t r) const { return kCentred ? p.mean[r] : 0; }

  // Computes the factors of kRows rows from `first` on; adds the rows' weight gradients to dw and db, if given.
  template <bool kStd, int kRows>
  __attribute__((flatten)) RowGradients<A> row_gradients(int64_t first, A* dw, A* db) const {
    const A* const scale = weight;
    const T *dy_rows[kRows], *x_rows[kRows];
    A means[kRows], rstds[kRows];
    for (int i = 0; i < kRows; ++i) {
      const int64_t r = first + i;
      dy_rows[i] = p.dy.row(r), x_rows[i] = p.x.row(r), means[i] = mean_of(r), rstds[i] = p.rstd[r];
    }
    Vector<A> g_sums[kRowsAtOnce] = {}, gh_sums[kRowsAtOnce] = {}, hh_sums[kRowsAtOnce] = {};
    with_flags(scale, dw, [&](auto has_weight, auto has_sums) {
      for_columns<A>(0, d, [&](int64_t c, auto count, int) {
        Vector<A> w, dw_sum, db_sum;
        if constexpr (has_weight) w = load(scale + c, count);
        if constexpr (has_sums) dw_sum = load(dw + c, count);
        if constexpr (has_sums && kCentred) db_sum = load(db + c, count);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const auto y = load(dy_rows[i] + c, count);
          const auto h = centred(x_rows[i] + c, count, means[i]) * rstds[i];
          auto g = y;
          if constexpr (has_weight) g *= w;
          if constexpr (kCentred) g_sums[i] += g;
          gh_sums[i] = fma(g, h, gh_sums[i]);
          if constexpr (kStd) hh_sums[i] = fma(h, h, hh_sums[i]);
          if constexpr (has_sums) dw_sum = fma(y, h, dw_sum);
          if constexpr (has_sums && kCentred) db_sum += y;
        }
        if constexpr (has_sums) store(dw + c, dw_sum, count);
        if constexpr (has_sums && kCentred) store(db + c, db_sum, count);
      });
    });
    const auto totals = [](const auto& sums) {
      if constexpr (kRows == 1) return Four<A>{lanes_added(sums[0])};
      return four_lanes_added<A>(sums[0], sums[1], sums[2], sums[3]);
    };
    const A part = 1 / static_cast<A>(d);
    Four<A> slope = totals(gh_sums);
    if constexpr (kStd) {
      const Four<A> hh = totals(hh_sums);
      for (int i = 0; i < kRows; ++i) slope[i] = hh[i] > 0 ? slope[i] / std::sqrt(hh[i] * (d - 1)) : 0;
    } else {
      slope *= part;
    }
    Four<A> average{};
    if constexpr (kCentred) average = totals(g_sums) * part;
    return {average, slope};
  }

  // Writes the gradients of x and, with dropout, of the residual. Members are copied to locals, because the compiler
  // must assume that stores change members.
  template <bool kDrop>
  __attribute__((flatten)) void write_rows(int64_t first, int64_t last, const RowGradients<A>& sums,
                                           RandomBits& random) const {
    const RowView<const T> from = p.dy, at = p.x, summed = p.grad_summed;
    const RowView<T> to = p.grad_x, also_to = p.grad_residual;
    const A* const scale = weight;
    const Dropout mask = dropout;
    const int64_t columns = d;
    for (int64_t r = first; r < last; ++r) {
      const T *const dy_row = from.row(r), *const x_row = at.row(r);
      const T* const summed_row = summed ? summed.row(r) : nullptr;
      T *const to_x = to.row(r), *const to_residual = kDrop ? also_to.row(r) : nullptr;
      const A mean_r = mean_of(r), rstd_r = p.rstd[r];
      const A shift = sums.average[r - first] * rstd_r, tilt = sums.slope[r - first] * rstd_r * rstd_r;
      const auto write_columns = [&](int64_t start, int64_t end) {
        const uint16_t* bits = nullptr;
        if constexpr (kDrop) bits = random.of(r, start, end - start);
        with_flags(scale, summed_row, [&](auto has_weight, auto has_summed) {
          for_columns<A>(start, end, [&](int64_t c, auto count, int) {
            auto gradient = load(dy_row + c, count) * rstd_r;
            if constexpr (has_weight) gradient *= load(scale + c, count);
            if constexpr (kCentred)
              gradient -= fma(load(x_row + c, count) - mean_r, tilt, shift);
            else
              gradient = fma(load(x_row + c, count), -tilt, gradient);
            if constexpr (has_summed) gradient += load(summed_row + c, count);
            if constexpr (kDrop) {
              store(to_residual + c, gradient, count);
              gradient = mask.template apply<A>(gradient, bits + c - start);
            }
            store(to_x + c, gradient, count);
          });
        });
      };
      if constexpr (!kDrop) {
        write_columns(0, columns);
      } else {
        for (int64_t start = 0; start < columns; start += kChunkColumns)
          write_columns(start, std::min(columns, start + kChunkColumns));
      }
    }
  }

  // Adds the weight gradients of some columns and kRows rows to dw and db.
  template <int kRows>
  __attribute__((flatten)) void add_weights(int64_t r, int64_t first, int64_t last, A* dw, A* db) const {
    const T *dy_rows[kRows], *x_rows[kRows];
    A means[kRows], rstds[kRows];
    for (int i = 0; i < kRows; ++i)
      dy_rows[i] = p.dy.row(r + i), x_rows[i] = p.x.row(r + i), means[i] = mean_of(r + i), rstds[i] = p.rstd[r + i];
    for_columns<A>(first, last, [&](int64_t c, auto count, int) {
      Vector<A> dw_sum = load(dw + c, count), db_sum{};
      if constexpr (kCentred) db_sum = load(db + c, count);
      for (int i = 0; i < kRows; ++i) {
        const auto y = load(dy_rows[i] + c, count);
        dw_sum = fma(y, centred(x_rows[i] + c, count, means[i]) * rstds[i], dw_sum);
        if constexpr (kCentred) db_sum += y;
      }
      store(dw + c, dw_sum, count);
      if constexpr (kCentred) store(db + c, db_sum, count);
    });
  }

  // Sets dw and db of some columns from the rows `begin` up to `end`.
  void sum_weights(int64_t begin, int64_t end, int64_t first, int64_t last, A* dw, A* db) const {
    std::fill(dw + first, dw + last, A(0));
    if constexpr (kCentred) std::fill(db + first, db + last, A(0));
    int64_t r = begin;
    for (; r + kRowsAtOnce <= end; r += kRowsAtOnce) add_weights<kRowsAtOnce>(r, first, last, dw, db);
    for (; r < end; ++r) add_weights<1>(r, first, last, dw, db);
  }

  // Computes the gradients of the rows `begin` up to `end`, and adds their weight gradients to dw and db, if given.
  void chunk(int64_t begin, int64_t end, bool together, A* dw, A* db, RandomBits& random, Pages& x_pages,
             Pages& residual_pages) const {
    const auto rows = [&](int64_t first, auto count) {
      constexpr int kRows = count;
      x_pages.prefault(p.grad_x.row(first + kRows));
      residual_pages.prefault(p.grad_residual.row(first + kRows));
      const RowGradients<A> sums = [&] {
        if constexpr (kCentred)
          if (p.kind == NormKind::kStd) return row_gradients<true, kRows>(first, dw, db);
        return row_gradients<false, kRows>(first, dw, db);
      }();
      p.grad_residual ? write_rows<true>(first, first + kRows, sums, random)
                      : write_rows<false>(first, first + kRows, sums, random);
    };
    if (dw) std::fill_n(dw, d, A(0));
    if (kCentred && dw) std::fill_n(db, d, A(0));
    int64_t r = begin;
    if (together)
      for (; r + kRowsAtOnce <= end; r += kRowsAtOnce) rows(r, std::integral_constant<int, kRowsAtOnce>());
    for (; r < end; ++r) rows(r, std::integral_constant<int, 1>());
  }

  // The chunks from `begin` up to `end` of `size` rows each, `rows` in all. Every chunk has d elements of dw and db.
  void chunks(int64_t begin, int64_t end, int64_t size, int64_t rows, A* dw, A* db) const {
    const int64_t first = begin * size, last = std::min(rows, end * size);
    const bool together = d <= kShort || d >= kLong || rows * d * static_cast<int64_t>(sizeof(T)) <= kCached;
    RandomBits random(dropout, d, last);
    Pages x_pages = pages_of(p.grad_x, first, last), residual_pages = pages_of(p.grad_residual, first, last);
    for (int64_t k = begin, r = first; k < end; ++k, r += size) {
      A *const own_dw = dw ? dw + k * d : nullptr, *const own_db = db ? db + k * d : nullptr;
      const int64_t next = std::min(rows, r + size);
      if (p.grad_x)
        chunk(r, next, together, own_dw, own_db, random, x_pages, residual_pages);
      else if (dw)
        sum_weights(r, next, 0, d, own_dw, own_db);
    }
  }
};

template <typename T, bool kCentred>
void backward_of(const NormBackwardParams<T>& p) {
  using A = Accumulate<T>;
  const int64_t rows = p.rows, d = p.d;
  const WideParameters<T> parameters(p.weight, {}, d);
  const Backward<T, kCentred> backward{p, parameters.weight};
  const int64_t per_chunk = chunk_rows(rows, d), chunks = (rows + per_chunk - 1) / per_chunk;
  const bool by_columns = sum_by_columns(rows, d);
  const int64_t sums = by_columns ? 1 : chunks;
  const bool needs_sums = p.grad_weight || p.grad_bias;  // which are made together
  const Buffer<A> partials(needs_sums ? (kCentred ? 2 : 1) * sums * d : 0);
  A *const dw = partials.data(), *const db = kCentred ? dw + (needs_sums ? sums * d : 0) : nullptr;
  const bool with_rows = needs_sums && !by_columns;
  parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    backward.chunks(begin, end, per_chunk, rows, with_rows ? dw : nullptr, with_rows ? db : nullptr);
  });
  if (by_columns && needs_sums)
    parallel_for(0, (d + kFewestColumns - 1) / kFewestColumns, 1, [&](int64_t begin, int64_t end) {
      const int64_t last = std::min(d, end * kFewestColumns);
      for (int64_t first = begin * kFewestColumns; first < last; first += kColumns)
        backward.sum_weights(0, rows, first, std::min(last, first + kColumns), dw, db);
    });
  const auto finish = [&](const A* from, void* to) {
    if (to && p.narrow_weights)
      sum_partials(from, sums, d, static_cast<T*>(to));
    else if (to)
      sum_partials(from, sums, d, static_cast<A*>(to));
  };
  finish(dw, p.grad_weight);
  finish(db, p.grad_bias);
}

}  // namespace

template <typename T>
void norm_backward(const NormBackwardParams<T>& p) {
  p.kind == NormKind::kRms ? backward_of<T, false>(p) : backward_of<T, true>(p);
}

TRANSFORMER_FAST_FOR_EACH_TYPE(void, norm_backward, NormBackwardParams)

}  // namespace transformer_fast
