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

// summed = residual + dropout(x), some elements of it; each vector is passed to sum(vector, count, slot).
template <typename T, typename Sum>
void add(const T* x, const T* residual, T* summed, int64_t elements, const uint16_t* draws, const Dropout& dropout,
         const Sum& sum) {
  using A = Accumulate<T>;
  with_flag(draws, [&](auto drop) {
    for_columns<A>(0, elements, [&, dropout = dropout](int64_t c, auto count, int slot) {
      auto v = load(x + c, count);
      if constexpr (drop) v = dropout.template apply<A>(v, draws + c);
      v += load(residual + c, count);
      store(summed + c, v, count);
      sum(v, count, slot);
    });
  });
}

// summed = residual + dropout(x), of which the rows are asked for; or, without a residual, x alone.
template <typename T>
struct Addition {
  Matrix<T> x, residual, summed;
  int64_t d;
  bool drop;
  Dropout dropout;

  // One row, in stretches of which the draws are held.
  template <typename Sum>
  void row(int64_t r, RowDraws& draws, const Sum& sum) const {
    const int64_t most = drop ? kDrawColumns : d;
    for (int64_t start = 0; start < d; start += most) {
      const int64_t columns = std::min(most, d - start);
      add(x.row(r) + start, residual.row(r) + start, summed.row(r) + start, columns,
          drop ? draws.of(r, start, columns) : nullptr, dropout, sum);
    }
  }

  // One row, whose mean it returns.
  __attribute__((flatten)) T row_and_mean(int64_t r, RowDraws& draws) const {
    const T first = drop ? residual.row(r)[0] : x.row(r)[0] + residual.row(r)[0];
    Vector<T> sums[4] = {};
    row(r, draws, [&](auto v, auto count, int slot) { sums[slot] += filled<T>(v, count, first) - first; });
    return first + sum(sums) / d;
  }

  // The rows from `first` up to `last`: as one where they are neighbours and so are their draws.
  __attribute__((flatten)) void rows(int64_t first, int64_t last, RowDraws& draws) const {
    const auto no_sum = [](auto, auto, int) {};
    if (x.stride == d && residual.stride == d && (!drop || d <= kNarrow<Accumulate<T>>)) {
      add(x.row(first), residual.row(first), summed.row(first), (last - first) * d,
          drop ? draws.side_by_side(first, last) : nullptr, dropout, no_sum);
    } else {
      for (int64_t r = first; r < last; ++r) row(r, draws, no_sum);
    }
  }
};

// Sums start from the first element: large offsets cancel, and a constant row has exactly itself as mean.
template <int kVectors, typename T, typename A = Accumulate<T>>
A row_mean(const T* x, int64_t d) {
  const A first = static_cast<A>(x[0]);
  Vector<A> sums[slots_of(kVectors)] = {};
  for_columns<A, kVectors>(
      0, d, [&](int64_t c, auto count, int slot) { sums[slot] += load(x + c, count, first) - first; });
  return first + sum(sums) / d;
}

// Of one row with the given mean: its norm, and rstd as the result. The lines to be written are asked for while the
// squares are summed, those `ahead`, which come next, while the norm is written.
template <int kVectors, typename T, typename W, typename A = Accumulate<T>>
A normalize_row(const T* x, const W* weight, const W* bias, T* out, const T* ahead, int64_t d, A eps, bool std,
                A mean) {
  Vector<A> squares[slots_of(kVectors)] = {};
  for_columns<A, kVectors>(0, d, [&](int64_t c, auto count, int slot) {
    __builtin_prefetch(out + c, 1);
    const auto centred = load(x + c, count, mean) - mean;
    squares[slot] += centred * centred;
  });
  const A total = sum(squares);
  const A rstd = std ? 1 / (std::sqrt(total / (d - 1)) + eps) : 1 / std::sqrt(total / d + eps);

  with_flags(weight, bias, [&](auto has_weight, auto has_bias) {
    for_columns<A, kVectors>(0, d, [&](int64_t c, auto count, int) {
      auto v = (load(x + c, count) - mean) * rstd;
      if constexpr (has_weight && has_bias)
        v = v * load(weight + c, count) + load(bias + c, count);
      else if constexpr (has_weight)
        v *= load(weight + c, count);
      else if constexpr (has_bias)
        v += load(bias + c, count);
      store(out + c, v, count);
      __builtin_prefetch(ahead + c, 1);
    });
  });
  return rstd;
}

template <int kVectors, typename T, typename W, typename A = Accumulate<T>>
void forward_rows(const Addition<T>& added, const W* weight, const W* bias, Matrix<T> out, A* mean, A* rstd,
                  int64_t rows, double eps, bool std) {
  // A wide row is summed as it is added. What is narrow, or rounded as it is stored, is added a cache's worth ahead.
  constexpr bool kAddsAndSums = kVectors == 0 && std::is_same_v<T, A>;
  const int64_t d = added.d, block = std::max<int64_t>(1, kDrawColumns / d);
  const Matrix<T> x = added.residual ? added.summed : added.x;
  const bool asks_ahead = added.residual && d * sizeof(T) < kPageBytes;  // more would push out the lines in use
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / d), [&](int64_t begin, int64_t end) {
    Pages out_pages = out.pages(begin, end), summed_pages = added.summed.pages(begin, end);
    RowDraws draws(added.dropout, d, end);
    for (int64_t first = begin, last; first < end; first = last) {
      last = std::min(end, first + block);
      out_pages.reach(out.row(last));
      if (added.residual) {
        summed_pages.reach(added.summed.row(last));
        if constexpr (!kAddsAndSums) added.rows(first, last, draws);
      }
      for (int64_t r = first; r < last; ++r) {
        A mean_r;
        if constexpr (kAddsAndSums)
          mean_r = added.residual ? added.row_and_mean(r, draws) : row_mean<kVectors>(x.row(r), d);
        else
          mean_r = row_mean<kVectors>(x.row(r), d);
        const T* const ahead = asks_ahead ? x.row(r + 1) : out.row(r);
        const A rstd_r = normalize_row<kVectors>(x.row(r), weight, bias, out.row(r), ahead, d, static_cast<A>(eps), std,
                                                 mean_r);
        if (mean) mean[r] = mean_r, rstd[r] = rstd_r;
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
      const Addition<scalar_t> added{M(x_rows), M(residual_rows), M(result.summed, d), d, dropout_p > 0,
                                     dropout_of(dropout_p, seed)};
      with_vectors<A>(d, [&](auto vectors) {
        forward_rows<vectors>(added, pointer<W>(weights.weight), pointer<W>(weights.bias), M(result.out, d),
                              static_cast<A*>(mean), static_cast<A*>(rstd), rows, eps, std);
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
