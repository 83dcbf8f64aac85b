// LayerNorm and Norm over the last dimension, optionally of residual + dropout(x), forward and backward.
//
//   layer: y = (x - mean) / sqrt(var + eps) * weight + bias     (variance over d)
//   std:   y = (x - mean) / (std + eps) * weight + bias         (variance over d - 1)
//
// A row fits in a cache near the core, so the statistics take two plain passes over it: as accurate as Welford's
// method and free of its divisions. Weight gradients are summed in a fixed number of chunks of rows that depends on the
// shape alone: the result is the same, bit by bit, on any number of threads.

#include "norm.h"

#include "draws.h"
#include "partials.h"
#include "vec.h"

#include <ATen/ATen.h>
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

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 16384;  // elements below which a second thread costs more than it brings

// (rows, d) with unit stride along the columns; a view wherever the strides allow one.
Tensor as_rows(const Tensor& x) {
  const int64_t d = x.size(-1);
  const Tensor dense = d == 1 || x.stride(-1) == 1 ? x : x.contiguous();
  return dense.dim() == 2 ? dense : dense.reshape({x.numel() / d, d});
}

OptionalTensor as_rows(const OptionalTensor& x) { return x ? OptionalTensor(as_rows(*x)) : OptionalTensor(); }

// Weights are read in the type of the activations or in that of the arithmetic; any other, or two types, is converted.
struct Weights {
  Tensor weight, bias;
  at::ScalarType type;

  Weights(const OptionalTensor& weight_, const OptionalTensor& bias_, at::ScalarType activations,
          at::ScalarType arithmetic)
      : type(arithmetic) {
    const OptionalTensor& given = weight_ ? weight_ : bias_;
    if (given && given->scalar_type() == activations && (!bias_ || bias_->scalar_type() == activations))
      type = activations;
    if (weight_) weight = in_type(*weight_, type).contiguous();
    if (bias_) bias = in_type(*bias_, type).contiguous();
  }
};

template <typename T>
struct Matrix {
  T* data = nullptr;
  int64_t stride = 0;

  Matrix() = default;
  explicit Matrix(const Tensor& x)
      : data(static_cast<T*>(const_cast<void*>(x.const_data_ptr()))), stride(x.stride(0)) {}
  explicit Matrix(const OptionalTensor& x) : Matrix(x ? Matrix(*x) : Matrix()) {}

  // A result, which is contiguous, or nothing.
  Matrix(const Tensor& result, int64_t d)
      : data(result.defined() ? static_cast<T*>(result.mutable_data_ptr()) : nullptr), stride(d) {}

  explicit operator bool() const { return data != nullptr; }
  T* row(int64_t r) const { return data + r * stride; }
};

template <typename A>
const A* pointer(const Tensor& x) {
  return x.defined() ? x.const_data_ptr<A>() : nullptr;
}

template <typename A>
A* result_pointer(const Tensor& x) {
  return x.defined() ? x.mutable_data_ptr<A>() : nullptr;
}

Dropout make_dropout(double p, const OptionalTensor& seed) {
  return p > 0 ? Dropout(p, *seed->const_data_ptr<int64_t>()) : Dropout();
}

int64_t grain_rows(int64_t d) { return std::max<int64_t>(1, kGrain / d); }

// ---------------------------------------------------------------------------------------------------- forward

// summed = residual + dropout(x), one row.
template <typename T>
void add_row(const T* x, const T* residual, T* summed, int64_t row, int64_t d, bool drop, const Dropout& dropout) {
  using A = Accumulate<T>;
  uint16_t draws[kDrawRoom];
  for (int64_t start = 0; start < d; start += kDrawColumns) {
    const int64_t end = std::min(d, start + kDrawColumns);
    if (drop) dropout.draw(row, start, end - start, draws);
    for_columns<A>(start, end, [&](int64_t c, auto count, int) {
      auto v = load(x + c, count);
      if (drop) v = dropout.apply<A>(v, draws + c - start);
      store(summed + c, load(residual + c, count) + v, count);
    });
  }
}

template <typename T, typename W, typename A = Accumulate<T>>
void normalize_row(const T* x, const W* weight, const W* bias, T* out, int64_t d, A eps, bool std, A& mean, A& rstd) {
  // Sums start from the first element: large offsets cancel, and a constant row has exactly itself as mean.
  const A first = static_cast<A>(x[0]);
  Vector<A> sums[4] = {};
  for_columns<A>(0, d, [&](int64_t c, auto count, int slot) { sums[slot] += load(x + c, count, first) - first; });
  mean = first + sum<A>(sums) / d;

  Vector<A> squares[4] = {};
  for_columns<A>(0, d, [&](int64_t c, auto count, int slot) {
    const auto centred = load(x + c, count, mean) - mean;
    squares[slot] += centred * centred;
  });
  const A total = sum<A>(squares);
  rstd = std ? 1 / (std::sqrt(total / (d - 1)) + eps) : 1 / std::sqrt(total / d + eps);

  for_columns<A>(0, d, [&](int64_t c, auto count, int) {
    auto v = (load(x + c, count) - mean) * rstd;
    if (weight) v *= load(weight + c, count);
    if (bias) v += load(bias + c, count);
    store(out + c, v, count);
  });
}

template <typename T, typename W, typename A = Accumulate<T>>
void forward_rows(Matrix<T> x, Matrix<T> residual, const W* weight, const W* bias, Matrix<T> out, Matrix<T> summed,
                  A* mean, A* rstd, int64_t rows, int64_t d, double eps, bool std, bool drop, Dropout dropout) {
  at::parallel_for(0, rows, grain_rows(d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* input = x.row(r);
      if (residual) {
        add_row<T>(input, residual.row(r), summed.row(r), r, d, drop, dropout);
        input = summed.row(r);
      }
      A mean_r, rstd_r;
      normalize_row<T, W>(input, weight, bias, out.row(r), d, static_cast<A>(eps), std, mean_r, rstd_r);
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
      forward_rows<scalar_t, W>(M(x_rows), M(residual_rows), pointer<W>(weights.weight), pointer<W>(weights.bias),
                                M(result.out, d), M(result.summed, d), static_cast<A*>(mean), static_cast<A*>(rstd),
                                rows, d, eps, std, dropout_p > 0, make_dropout(dropout_p, seed));
    };
    weights.type == x.scalar_type() ? run(scalar_t{}) : run(A{});
  });
  return result;
}

namespace {

// --------------------------------------------------------------------------------------------------- backward

// With g = dy * weight and h = (x - mean) * rstd, both norms have dx = rstd * (g - average(g) - h * slope).
//   layer: slope = sum(g h) / d
//   std:   slope = sum(g h) / sqrt(sum(h h) * (d - 1)), which holds for any eps; 0 for a constant row, where h = 0
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
          d, std, drop, needs.weight, needs.bias, make_dropout(dropout_p, seed)};
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
