// LayerNorm and Norm, optionally of residual + dropout(x), backward.
//
// With g = dy * weight and h = (x - mean) * rstd, both norms have dx = rstd * (g - average(g) - h * slope).
//   layer: slope = sum(g h) / d
//   std:   slope = sum(g h) / sqrt(sum(h h) * (d - 1)), which holds for any eps; 0 for a constant row, where h = 0
//
// Weight gradients are summed in a fixed number of chunks of rows that depends on the shape alone, or column by column
// in a pass of their own: either way the result is the same, bit by bit, on any number of threads.

#include "norm_common.h"
#include "partials.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_cpu_dispatch.h>

#include <algorithm>
#include <cmath>

namespace transformer_fast {
namespace {

constexpr int kRowsAtOnce = 4;          // whose sums are taken together, where that is faster:
constexpr int64_t kCached = 1048576;    // where the matrix is at most so many bytes,
constexpr int64_t kShort = 64;          // or a row at most so many columns,
constexpr int64_t kLong = 4096;         // or at least so many; else the memory is faster one row after another
constexpr int64_t kColumns = 512;       // whose weight gradients stay in the first-level cache in a pass by columns
constexpr int64_t kFewestColumns = 64;  // for a thread in such a pass

// Whether the weight gradients are summed by columns, in a second reading of the rows. Sums of small chunks are much
// memory beside the rows; a matrix that stays in the cache is read again at little cost.
bool sum_by_columns(int64_t rows, int64_t d) {
  const int64_t chunk = chunk_rows(rows, d);
  return chunk < rows && (chunk < 8 || (chunk < 32 && rows * d <= 1 << 20));
}

template <typename A>
A* result_pointer(const Tensor& x) {
  return x.defined() ? x.mutable_data_ptr<A>() : nullptr;
}

// As used, for each of at most kRowsAtOnce rows: dx = rstd * (g - average - (x - mean) * rstd * slope).
template <typename A>
struct RowGradients {
  Four<A> average, slope;
};

template <typename T, typename W>
struct Backward {
  using A = Accumulate<T>;
  Matrix<T> dy, x, grad_summed;     // in; grad_summed may be absent
  const W* weight;                  // in; may be absent
  const A *mean, *rstd;             // in
  Matrix<T> grad_x, grad_residual;  // out; absent if not asked for; grad_residual differs with dropout only
  int64_t d;
  bool std;
  Dropout dropout;

  // Of kRows rows from `first` on; where dw and db are given, their part of the weight gradients is added to them.
  template <bool kStd, int kRows, int kVectors>
  __attribute__((flatten)) RowGradients<A> row_gradients(int64_t first, A* dw, A* db) const {
    const W* const scale = weight;
    const T *dy_rows[kRows], *x_rows[kRows];
    A means[kRows], rstds[kRows];
    for (int i = 0; i < kRows; ++i) {
      const int64_t r = first + i;
      dy_rows[i] = dy.row(r), x_rows[i] = x.row(r), means[i] = mean[r], rstds[i] = rstd[r];
    }
    Vector<A> g_sums[kRowsAtOnce] = {}, gh_sums[kRowsAtOnce] = {}, hh_sums[kRowsAtOnce] = {};
    with_flags(scale, dw, [&](auto has_weight, auto has_sums) {
      for_columns<A, kVectors>(0, d, [&](int64_t c, auto count, int) {
        Vector<A> w, dw_sum, db_sum;
        if constexpr (has_weight) w = load(scale + c, count);
        if constexpr (has_sums) dw_sum = load(dw + c, count), db_sum = load(db + c, count);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const auto y = load(dy_rows[i] + c, count);
          const auto h = (load(x_rows[i] + c, count, means[i]) - means[i]) * rstds[i];
          auto g = y;
          if constexpr (has_weight) g *= w;
          g_sums[i] += g;
          gh_sums[i] += g * h;
          if constexpr (kStd) hh_sums[i] += h * h;
          if constexpr (has_sums) dw_sum += y * h, db_sum += y;
        }
        if constexpr (has_sums) store(dw + c, dw_sum, count), store(db + c, db_sum, count);
      });
    });
    const auto totals = [](const auto& sums) {
      if constexpr (kRows == 1) return Four<A>{lanes_added(sums[0])};
      return four_sums<A>(sums);
    };
    const A part = 1 / static_cast<A>(d);
    Four<A> slope = totals(gh_sums);
    if constexpr (kStd) {
      const Four<A> hh = totals(hh_sums);
      for (int i = 0; i < kRows; ++i) slope[i] = hh[i] > 0 ? slope[i] / std::sqrt(hh[i] * (d - 1)) : 0;
    } else {
      slope *= part;
    }
    return {totals(g_sums) * part, slope};
  }

  // Their gradients of x and, where something was dropped, of the residual. Members are copied: the stores might change
  // them, for all that the compiler knows.
  template <bool kDrop, int kVectors>
  __attribute__((flatten)) void write_rows(int64_t first, int64_t last, const RowGradients<A>& sums,
                                           RowDraws& row_draws) const {
    const Matrix<T> from = dy, at = x, summed = grad_summed, to = grad_x, also_to = grad_residual;
    const W* const scale = weight;
    const Dropout mask = dropout;
    const int64_t columns = d;
    for (int64_t r = first; r < last; ++r) {
      const T *const dy_row = from.row(r), *const x_row = at.row(r);
      const T* const summed_row = summed ? summed.row(r) : nullptr;
      T *const to_x = to.row(r), *const to_residual = kDrop ? also_to.row(r) : nullptr;
      const A mean_r = mean[r], rstd_r = rstd[r];
      const A shift = sums.average[r - first] * rstd_r, tilt = sums.slope[r - first] * rstd_r * rstd_r;
      const auto stretch = [&](int64_t start, int64_t end) {
        const uint16_t* draws = nullptr;
        if constexpr (kDrop) draws = row_draws.of(r, start, end - start);
        with_flags(scale, summed_row, [&](auto has_weight, auto has_summed) {
          for_columns<A, kVectors>(start, end, [&](int64_t c, auto count, int) {
            auto gradient = load(dy_row + c, count) * rstd_r;
            if constexpr (has_weight) gradient *= load(scale + c, count);
            gradient -= shift + (load(x_row + c, count) - mean_r) * tilt;
            if constexpr (has_summed) gradient += load(summed_row + c, count);
            if constexpr (kDrop) {
              store(to_residual + c, gradient, count);
              gradient = mask.template apply<A>(gradient, draws + c - start);
            }
            store(to_x + c, gradient, count);
          });
        });
      };
      if constexpr (kVectors > 0 || !kDrop) {
        stretch(0, columns);
      } else {
        for (int64_t start = 0; start < columns; start += kDrawColumns)
          stretch(start, std::min(columns, start + kDrawColumns));
      }
    }
  }

  // The weight gradients of some columns, kRows rows' part of them, added to dw and db.
  template <int kRows>
  __attribute__((flatten)) void add_weights(int64_t r, int64_t first, int64_t last, A* dw, A* db) const {
    const T *dy_rows[kRows], *x_rows[kRows];
    A means[kRows], rstds[kRows];
    for (int i = 0; i < kRows; ++i)
      dy_rows[i] = dy.row(r + i), x_rows[i] = x.row(r + i), means[i] = mean[r + i], rstds[i] = rstd[r + i];
    for_columns<A>(first, last, [&](int64_t c, auto count, int) {
      Vector<A> dw_sum = load(dw + c, count), db_sum = load(db + c, count);
      for (int i = 0; i < kRows; ++i) {
        const auto y = load(dy_rows[i] + c, count);
        dw_sum += y * ((load(x_rows[i] + c, count) - means[i]) * rstds[i]);
        db_sum += y;
      }
      store(dw + c, dw_sum, count);
      store(db + c, db_sum, count);
    });
  }

  // The same of the rows from `begin` up to `end`, and of them alone.
  void sum_weights(int64_t begin, int64_t end, int64_t first, int64_t last, A* dw, A* db) const {
    std::fill(dw + first, dw + last, A(0));
    std::fill(db + first, db + last, A(0));
    int64_t r = begin;
    for (; r + kRowsAtOnce <= end; r += kRowsAtOnce) add_weights<kRowsAtOnce>(r, first, last, dw, db);
    for (; r < end; ++r) add_weights<1>(r, first, last, dw, db);
  }

  // The gradients of the rows from `begin` up to `end` and, where dw and db are given, their part of the weights'.
  template <int kVectors>
  void chunk(int64_t begin, int64_t end, bool together, A* dw, A* db, RowDraws& draws, Pages& x_pages,
             Pages& residual_pages) const {
    const auto rows = [&](int64_t first, auto count) {
      constexpr int kRows = count;
      x_pages.reach(grad_x.row(first + kRows));
      residual_pages.reach(grad_residual.row(first + kRows));
      const RowGradients<A> sums = std ? row_gradients<true, kRows, kVectors>(first, dw, db)
                                       : row_gradients<false, kRows, kVectors>(first, dw, db);
      grad_residual ? write_rows<true, kVectors>(first, first + kRows, sums, draws)
                    : write_rows<false, kVectors>(first, first + kRows, sums, draws);
    };
    if (dw) std::fill_n(dw, d, A(0)), std::fill_n(db, d, A(0));
    int64_t r = begin;
    if (together)
      for (; r + kRowsAtOnce <= end; r += kRowsAtOnce) rows(r, std::integral_constant<int, kRowsAtOnce>());
    for (; r < end; ++r) rows(r, std::integral_constant<int, 1>());
  }

  // The chunks from `begin` up to `end` of `size` rows each, `rows` in all. Every chunk has d elements of dw and db.
  template <int kVectors>
  void chunks(int64_t begin, int64_t end, int64_t size, int64_t rows, A* dw, A* db) const {
    const int64_t first = begin * size, last = std::min(rows, end * size);
    const bool together = d <= kShort || d >= kLong || rows * d * static_cast<int64_t>(sizeof(T)) <= kCached;
    RowDraws draws(dropout, d, last);
    Pages x_pages = grad_x.pages(first, last), residual_pages = grad_residual.pages(first, last);
    for (int64_t k = begin, r = first; k < end; ++k, r += size) {
      A *const own_dw = dw ? dw + k * d : nullptr, *const own_db = db ? db + k * d : nullptr;
      const int64_t next = std::min(rows, r + size);
      if (grad_x)
        chunk<kVectors>(r, next, together, own_dw, own_db, draws, x_pages, residual_pages);
      else if (dw)
        sum_weights(r, next, 0, d, own_dw, own_db);
    }
  }
};

}  // namespace

NormGradients norm_backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                            const OptionalTensor& weight, const void* mean, const void* rstd, bool std,
                            double dropout_p, const OptionalTensor& seed, NormNeeds needs) {
  const Tensor dy_rows = as_rows(grad_out), x_rows = as_rows(x);
  const OptionalTensor grad_summed_rows = as_rows(grad_summed);
  const int64_t rows = x_rows.size(0), d = x_rows.size(1);
  NormGradients gradients;
  if (needs.rows) gradients.x = at::cpu::empty(x.sizes(), x.options());
  if (needs.rows && dropout_p > 0) gradients.residual = at::cpu::empty(x.sizes(), x.options());
  const Weights weights(weight, {}, x.scalar_type(), arithmetic_type(x));
  const auto partial_options = x.options().dtype(arithmetic_type(x));
  const int64_t per_chunk = chunk_rows(rows, d), chunks = (rows + per_chunk - 1) / per_chunk;
  const bool by_columns = sum_by_columns(rows, d);
  const int64_t sums = by_columns ? 1 : chunks;
  const bool needs_sums = needs.weight || needs.bias;  // which are made together
  const Tensor weight_partials = needs_sums ? at::cpu::empty({sums * d}, partial_options) : Tensor();
  const Tensor bias_partials = needs_sums ? at::cpu::empty({sums * d}, partial_options) : Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "layer_norm_backward", [&] {
    using A = Accumulate<scalar_t>;
    using M = Matrix<scalar_t>;
    const auto run = [&](auto weight_type) {
      using W = decltype(weight_type);
      const Backward<scalar_t, W> backward{
          M(dy_rows), M(x_rows), M(grad_summed_rows), pointer<W>(weights.weight),
          static_cast<const A*>(mean), static_cast<const A*>(rstd), M(gradients.x, d), M(gradients.residual, d),
          d, std, dropout_of(dropout_p, seed)};
      A *dw = result_pointer<A>(weight_partials), *db = result_pointer<A>(bias_partials);
      with_vectors<A>(d, [&](auto vectors) {
        at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
          backward.template chunks<vectors>(begin, end, per_chunk, rows, by_columns ? nullptr : dw,
                                            by_columns ? nullptr : db);
        });
      });
      if (by_columns && needs_sums)
        at::parallel_for(0, (d + kFewestColumns - 1) / kFewestColumns, 1, [&](int64_t begin, int64_t end) {
          const int64_t last = std::min(d, end * kFewestColumns);
          for (int64_t first = begin * kFewestColumns; first < last; first += kColumns)
            backward.sum_weights(0, rows, first, std::min(last, first + kColumns), dw, db);
        });
      if (needs.weight) gradients.weight = sum_partials<W, A>(weight_partials, sums, d, weights.type);
      if (needs.bias) gradients.bias = sum_partials<W, A>(bias_partials, sums, d, weights.type);
    };
    weights.type == x.scalar_type() ? run(scalar_t{}) : run(A{});
  });
  if (needs.weight) gradients.weight = in_type(gradients.weight, weight->scalar_type());
  return gradients;
}

}  // namespace transformer_fast
