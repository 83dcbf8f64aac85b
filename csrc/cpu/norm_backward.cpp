// LayerNorm and Norm, optionally of residual + dropout(x), backward.
//
// With g = dy * weight and h = (x - mean) * rstd, both norms have dx = rstd * (g - average(g) - h * slope).
//   layer: slope = sum(g h) / d
//   std:   slope = sum(g h) / sqrt(sum(h h) * (d - 1)), which holds for any eps; 0 for a constant row, where h = 0
//
// Weight gradients are summed in a fixed number of chunks of rows that depends on the shape alone: the result is the
// same, bit by bit, on any number of threads.

#include "norm_common.h"
#include "partials.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_cpu_dispatch.h>

#include <algorithm>
#include <cmath>

namespace transformer_fast {
namespace {

template <typename A>
A* result_pointer(const Tensor& x) {
  return x.defined() ? x.mutable_data_ptr<A>() : nullptr;
}

// As used: dx = rstd * g - shift - (x - mean) * tilt.
template <typename A>
struct RowGradient {
  A shift, tilt;
};

template <bool kStd, typename T, typename W, typename A = Accumulate<T>>
RowGradient<A> row_gradient(const T* dy, const T* x, const W* weight, A mean, A rstd, int64_t d) {
  Vector<A> g_sums[4] = {}, gh_sums[4] = {}, hh_sums[4] = {};
  for_columns<A>(0, d, [&](int64_t c, auto count, int slot) {
    auto g = load(dy + c, count);
    if (weight) g *= load(weight + c, count);
    const auto h = (load(x + c, count, mean) - mean) * rstd;
    g_sums[slot] += g;
    gh_sums[slot] += g * h;
    if constexpr (kStd) hh_sums[slot] += h * h;
  });
  A slope = sum<A>(gh_sums);
  if constexpr (kStd) {
    const A hh = sum<A>(hh_sums);
    slope = hh > 0 ? slope / std::sqrt(hh * (d - 1)) : 0;
  } else {
    slope /= d;
  }
  return {sum<A>(g_sums) / d * rstd, slope * rstd * rstd};
}

template <typename T, typename W>
struct Backward {
  using A = Accumulate<T>;
  Matrix<T> dy, x, grad_summed;     // in; grad_summed may be absent
  const W* weight;                  // in; may be absent
  const A *mean, *rstd;             // in
  Matrix<T> grad_x, grad_residual;  // out; absent if not asked for; grad_residual differs with dropout only
  int64_t d;
  bool std, drop, has_weight_grad, has_bias_grad;
  Dropout dropout;

  // One row's part of the weight gradients, added to dw and db, where the rows need none.
  void weights_of_row(int64_t r, A* dw, A* db) const {
    const T *dy_row = dy.row(r), *x_row = x.row(r);
    const A mean_r = mean[r], rstd_r = rstd[r];
    for_columns<A>(0, d, [&](int64_t c, auto count, int) {
      const auto g = load(dy_row + c, count);
      if (has_weight_grad) store(dw + c, load(dw + c, count) + g * rstd_r * (load(x_row + c, count) - mean_r), count);
      if (has_bias_grad) store(db + c, load(db + c, count) + g, count);
    });
  }

  // One row's gradients, and its part of the weight gradients added to dw and db.
  void row(int64_t r, A* dw, A* db) const {
    if (!grad_x) return weights_of_row(r, dw, db);
    const T *dy_row = dy.row(r), *x_row = x.row(r);
    const A mean_r = mean[r], rstd_r = rstd[r];
    const auto [shift, tilt] = std ? row_gradient<true, T, W>(dy_row, x_row, weight, mean_r, rstd_r, d)
                                   : row_gradient<false, T, W>(dy_row, x_row, weight, mean_r, rstd_r, d);
    uint16_t draws[kDrawRoom];
    for (int64_t start = 0; start < d; start += kDrawColumns) {
      const int64_t end = std::min(d, start + kDrawColumns);
      if (drop) dropout.draw(r, start, end - start, draws);
      for_columns<A>(start, end, [&, shift = shift, tilt = tilt](int64_t c, auto count, int) {
        const auto g = load(dy_row + c, count);
        const auto g_scaled = g * rstd_r;
        const auto centred = load(x_row + c, count) - mean_r;
        auto gradient = (weight ? g_scaled * load(weight + c, count) : g_scaled) - shift - centred * tilt;
        if (grad_summed) gradient += load(grad_summed.row(r) + c, count);
        if (drop) {
          store(grad_residual.row(r) + c, gradient, count);
          gradient = dropout.apply<A>(gradient, draws + c - start);
        }
        store(grad_x.row(r) + c, gradient, count);
        if (has_weight_grad) store(dw + c, load(dw + c, count) + g_scaled * centred, count);
        if (has_bias_grad) store(db + c, load(db + c, count) + g, count);
      });
    }
  }

  void chunk(int64_t begin, int64_t end, A* dw, A* db) const {
    if (has_weight_grad) std::fill_n(dw, d, A(0));
    if (has_bias_grad) std::fill_n(db, d, A(0));
    for (int64_t r = begin; r < end; ++r) row(r, dw, db);
  }
};

}  // namespace

NormGradients norm_backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                            const OptionalTensor& weight, const void* mean, const void* rstd, bool std,
                            double dropout_p, const OptionalTensor& seed, NormNeeds needs) {
  const Tensor dy_rows = as_rows(grad_out), x_rows = as_rows(x);
  const OptionalTensor grad_summed_rows = as_rows(grad_summed);
  const int64_t rows = x_rows.size(0), d = x_rows.size(1);
  const bool drop = dropout_p > 0;
  NormGradients gradients;
  if (needs.rows) gradients.x = at::cpu::empty(x.sizes(), x.options());
  if (needs.rows && drop) gradients.residual = at::cpu::empty(x.sizes(), x.options());
  const Weights weights(weight, {}, x.scalar_type(), statistics_type(x));
  const auto partial_options = x.options().dtype(statistics_type(x));
  const int64_t per_chunk = chunk_rows(rows, d), chunks = (rows + per_chunk - 1) / per_chunk;
  const Tensor weight_partials = needs.weight ? at::cpu::empty({chunks * d}, partial_options) : Tensor();
  const Tensor bias_partials = needs.bias ? at::cpu::empty({chunks * d}, partial_options) : Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "layer_norm_backward", [&] {
    using A = Accumulate<scalar_t>;
    using M = Matrix<scalar_t>;
    const auto run = [&](auto weight_type) {
      using W = decltype(weight_type);
      const Backward<scalar_t, W> backward{
          M(dy_rows), M(x_rows), M(grad_summed_rows), pointer<W>(weights.weight),
          static_cast<const A*>(mean), static_cast<const A*>(rstd), M(gradients.x, d), M(gradients.residual, d),
          d, std, drop, needs.weight, needs.bias, dropout_of(dropout_p, seed)};
      A *dw = result_pointer<A>(weight_partials), *db = result_pointer<A>(bias_partials);
      at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k)
          backward.chunk(k * per_chunk, std::min(rows, (k + 1) * per_chunk), dw ? dw + k * d : dw,
                         db ? db + k * d : db);
      });
      if (needs.weight) gradients.weight = sum_partials<W, A>(weight_partials, chunks, d, weights.type);
      if (needs.bias) gradients.bias = sum_partials<W, A>(bias_partials, chunks, d, weights.type);
    };
    weights.type == x.scalar_type() ? run(scalar_t{}) : run(A{});
  });
  if (needs.weight) gradients.weight = in_type(gradients.weight, weight->scalar_type());
  return gradients;
}

}  // namespace transformer_fast
