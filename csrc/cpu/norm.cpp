// LayerNorm and Norm over the last dimension, optionally of residual + dropout(x): forward, and the ops.
//
//   layer: y = (x - mean) / sqrt(var + eps) * weight + bias     (variance over d)
//   std:   y = (x - mean) / (std + eps) * weight + bias         (variance over d - 1)
//
// A row fits in a cache near the core, so the statistics take two plain passes over it: as accurate as Welford's
// method and free of its divisions.

#include "norm_common.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

namespace transformer_fast {
namespace {

constexpr int64_t kGrain = 16384;  // elements below which a second thread costs more than it brings
constexpr int64_t kAdded = 1024;   // elements of narrow rows to which the residual is added before their norm

// summed = residual + dropout(x), one row.
template <typename T>
__attribute__((flatten)) void add_row(const T* x, const T* residual, T* summed, int64_t row, int64_t d, bool drop,
                                      const Dropout& dropout, RowDraws& row_draws) {
  using A = Accumulate<T>;
  for (int64_t start = 0; start < d; start += kDrawColumns) {
    const int64_t end = std::min(d, start + kDrawColumns);
    const uint16_t* const draws = drop ? row_draws.of(row, start, end - start) : nullptr;
    for_columns<A>(start, end, [&](int64_t c, auto count, int) {
      auto v = load(x + c, count);
      if (drop) v = dropout.apply<A>(v, draws + c - start);
      store(summed + c, load(residual + c, count) + v, count);
    });
  }
}

template <int kVectors, typename T, typename W, typename A = Accumulate<T>>
void normalize_row(const T* x, const W* weight, const W* bias, T* out, int64_t d, A eps, bool std, A& mean, A& rstd) {
  // Sums start from the first element: large offsets cancel, and a constant row has exactly itself as mean.
  const A first = static_cast<A>(x[0]);
  Vector<A> sums[slots_of(kVectors)] = {};
  for_columns<A, kVectors>(0, d, [&](int64_t c, auto count, int slot) { sums[slot] += load(x + c, count, first) - first; });
  mean = first + sum(sums) / d;

  Vector<A> squares[slots_of(kVectors)] = {};
  for_columns<A, kVectors>(0, d, [&](int64_t c, auto count, int slot) {
    const auto centred = load(x + c, count, mean) - mean;
    squares[slot] += centred * centred;
  });
  const A total = sum(squares);
  rstd = std ? 1 / (std::sqrt(total / (d - 1)) + eps) : 1 / std::sqrt(total / d + eps);

  for_columns<A, kVectors>(0, d, [&](int64_t c, auto count, int) {
    auto v = (load(x + c, count) - mean) * rstd;
    if (weight) v *= load(weight + c, count);
    if (bias) v += load(bias + c, count);
    store(out + c, v, count);
  });
}

// The same of rows [begin, end): as one long row where nothing tells them apart.
template <typename T>
void add_rows(Matrix<T> x, Matrix<T> residual, Matrix<T> summed, int64_t begin, int64_t end, int64_t d, bool drop,
              const Dropout& dropout, RowDraws& draws) {
  if (!drop && x.stride == d && residual.stride == d) {
    add_row<T>(x.row(begin), residual.row(begin), summed.row(begin), begin, (end - begin) * d, drop, dropout, draws);
  } else {
    for (int64_t r = begin; r < end; ++r)
      add_row<T>(x.row(r), residual.row(r), summed.row(r), r, d, drop, dropout, draws);
  }
}

template <int kVectors, typename T, typename W, typename A = Accumulate<T>>
void forward_rows(Matrix<T> x, Matrix<T> residual, const W* weight, const W* bias, Matrix<T> out, Matrix<T> summed,
                  A* mean, A* rstd, int64_t rows, int64_t d, double eps, bool std, bool drop, Dropout dropout) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / d), [&](int64_t begin, int64_t end) {
    Pages out_pages = out.pages(begin, end), summed_pages = summed.pages(begin, end);
    RowDraws draws(dropout, d, end);
    int64_t added = residual ? begin : end;  // rows before it are in `summed`, a cache's worth ahead of their norm
    for (int64_t r = begin; r < end; ++r) {
      out_pages.reach(out.row(r + 1));
      if (r == added) {
        added = std::min(end, r + std::max<int64_t>(1, kAdded / d));
        summed_pages.reach(summed.row(added));
        add_rows<T>(x, residual, summed, r, added, d, drop, dropout, draws);
      }
      A mean_r, rstd_r;
      normalize_row<kVectors>((residual ? summed : x).row(r), weight, bias, out.row(r), d, static_cast<A>(eps), std, mean_r,
                          rstd_r);
      if (mean) {
        mean[r] = mean_r;
        rstd[r] = rstd_r;
      }
    }
  });
}

}  // namespace

NormResult norm_forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool std, double dropout_p, const OptionalTensor& seed,
                        void* mean, void* rstd) {
  const Tensor x_rows = as_rows(x);
  const OptionalTensor residual_rows = as_rows(residual);
  const int64_t rows = x_rows.size(0), d = x_rows.size(1);
  NormResult result{at::cpu::empty(x.sizes(), x.options()), {}};
  if (residual) result.summed = at::cpu::empty(x.sizes(), x.options());
  const Weights weights(weight, bias, x.scalar_type(), statistics_type(x));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "layer_norm", [&] {
    using A = Accumulate<scalar_t>;
    using M = Matrix<scalar_t>;
    const auto run = [&](auto weight_type) {
      using W = decltype(weight_type);
      with_vectors<A>(d, [&](auto vectors) {
        forward_rows<vectors>(M(x_rows), M(residual_rows), pointer<W>(weights.weight), pointer<W>(weights.bias),
                              M(result.out, d), M(result.summed, d), static_cast<A*>(mean), static_cast<A*>(rstd), rows,
                              d, eps, std, dropout_p > 0, dropout_of(dropout_p, seed));
      });
    };
    weights.type == x.scalar_type() ? run(scalar_t{}) : run(A{});
  });
  return result;
}

namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// An op returns tensors: where there is nothing, an empty one.
Tensor or_empty(const Tensor& tensor, const at::TensorOptions& options) {
  return tensor.defined() ? tensor : at::empty({0}, options);
}

FourTensors layer_norm(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps, bool std, double dropout_p, const OptionalTensor& seed) {
  const auto options = x.options().dtype(statistics_type(x));
  const int64_t rows = x.numel() / x.size(-1);
  const Tensor mean = at::empty({rows}, options), rstd = at::empty({rows}, options);
  const auto [out, summed] = norm_forward(x, residual, weight, bias, eps, std, dropout_p, seed, mean.mutable_data_ptr(),
                                          rstd.mutable_data_ptr());
  return {out, or_empty(summed, x.options()), mean, rstd};
}

FourTensors layer_norm_backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                                const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd, double /* eps */,
                                bool std, double dropout_p, const OptionalTensor& seed, bool /* has_residual */,
                                bool has_bias) {
  const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  const auto gradients = norm_backward(grad_out, grad_summed, x, weight, means.const_data_ptr(), rstds.const_data_ptr(),
                                       std, dropout_p, seed, {true, weight.has_value(), has_bias});
  const auto weight_options = x.options().dtype(weight ? weight->scalar_type() : x.scalar_type());
  return {gradients.x, or_empty(gradients.residual, x.options()), or_empty(gradients.weight, weight_options),
          or_empty(gradients.bias, weight_options).to(weight_options)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool std, float dropout_p, "
      "Tensor? seed) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor grad_out, Tensor? grad_summed, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
      "float eps, bool std, float dropout_p, Tensor? seed, bool has_residual, bool has_bias) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("layer_norm", layer_norm);
  m.impl("layer_norm_backward", layer_norm_backward);
}

}  // namespace transformer_fast
