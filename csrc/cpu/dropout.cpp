// y = [residual +] dropout([relu] (x [+ bias])) and its backward, elementwise over the (rows, last dimension) view.
// Nothing is stored for the backward: the mask is drawn again from the seed, or read off the output of the ReLU.

#include "draws.h"
#include "pages.h"
#include "partials.h"
#include "types.h"
#include "vec.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

namespace transformer_fast {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 16384;  // elements below which a second thread costs more than it brings

// Narrow rows that are handled as one. Their first column is 0, and what there is for each column they find repeated.
template <typename A>
int64_t rows_as_one(int64_t d) {
  return d <= kNarrow<A> ? kDrawColumns / d : 1;
}

// body(first column, first element, elements, their draws) over stretches of at most kDrawColumns elements, of one row
// or of narrow ones as one, which writes those elements of the result, `to`. Where nothing is dropped, there are no
// draws.
template <typename T, typename Body>
void for_stretches(const Tensor& x, T* to, bool drop, const Dropout& dropout, Body&& body) {
  const int64_t d = x.size(-1), rows = x.numel() / d, block = rows_as_one<Accumulate<T>>(d);
  if (block > 1) {
    at::parallel_for(0, rows, kGrain / d, [&](int64_t begin, int64_t end) __attribute__((flatten)) {
      Pages pages(to + begin * d, to + end * d);
      RowDraws draws(dropout, d, end);
      for_blocks(to, d, begin, end, block, pages, [&](int64_t first, int64_t last) {
        body(0, first * d, (last - first) * d, drop ? draws.side_by_side(first, last) : nullptr);
      });
    });
    return;
  }
  const int64_t stretches = (d + kDrawColumns - 1) / kDrawColumns;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::min(d, kDrawColumns));
  at::parallel_for(0, rows * stretches, grain, [&](int64_t begin, int64_t end) __attribute__((flatten)) {
    int64_t row = begin / stretches, column = begin % stretches * kDrawColumns;
    Pages pages(to + row * d + column, to + end / stretches * d + end % stretches * kDrawColumns);
    RowDraws draws(dropout, d, rows);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t element = row * d + column, elements = std::min(kDrawColumns, d - column);
      pages.reach(to + element + elements);
      body(column, element, elements, drop ? draws.of(row, column, elements) : nullptr);
      column += kDrawColumns;
      if (column >= d) ++row, column = 0;
    }
  });
}

// A bias as for_stretches() finds it: in the type of the arithmetic, repeated for narrow rows.
template <typename A>
Tensor bias_for_stretches(const Tensor& bias, int64_t rows) {
  const Tensor biases = bias.to(c10::CppTypeToScalarType<A>::value).contiguous();
  const int64_t d = biases.numel(), block = std::min(rows, rows_as_one<A>(d));
  if (block == 1) return biases;
  const Tensor repeated = at::cpu::empty({block * d}, biases.options());
  A* to = repeated.mutable_data_ptr<A>();
  for (int64_t r = 0; r < block; ++r) to = std::copy_n(biases.const_data_ptr<A>(), d, to);
  return repeated;
}

Tensor dropout(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual, bool relu, double p,
               const OptionalTensor& seed) {
  const Tensor input = x.contiguous(), added = residual ? residual->contiguous() : Tensor();
  const Tensor out = at::cpu::empty(x.sizes(), x.options());
  if (x.numel() == 0) return out;
  const Dropout dropout = dropout_of(p, seed);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "dropout", [&] {
    using A = Accumulate<scalar_t>;
    const Tensor biases = bias ? bias_for_stretches<A>(*bias, x.numel() / x.size(-1)) : Tensor();
    const A* offsets = bias ? biases.const_data_ptr<A>() : nullptr;
    const scalar_t* from = input.const_data_ptr<scalar_t>();
    const scalar_t* add = residual ? added.const_data_ptr<scalar_t>() : nullptr;
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_stretches(input, to, p > 0, dropout,
                  [&](int64_t column, int64_t first, int64_t elements, const uint16_t* draws) {
                    for_columns<A>(0, elements, [&](int64_t c, auto count, int) {
                      auto v = load(from + first + c, count);
                      if (offsets) v += load(offsets + column + c, count);
                      if (relu) v = v < 0 ? Vector<A>{} : v;  // a NaN passes, as in torch.relu
                      if (draws) v = dropout.apply<A>(v, draws + c);
                      if (add) v += load(add + first + c, count);
                      store(to + first + c, v, count);
                    });
                  });
  });
  return out;
}

// The gradient of some elements, each vector of it passed to sum(first of them, vector, count).
template <typename T, typename Sum>
void gradient_of_stretch(const T* from, const T* positive, T* to, int64_t elements, const Dropout& dropout,
                         const uint16_t* draws, const Sum& sum) {
  using A = Accumulate<T>;
  for_columns<A>(0, elements, [&](int64_t c, auto count, int) {
    auto v = load(from + c, count);
    if (positive)
      v = load(positive + c, count) > 0 ? v * static_cast<A>(dropout.rate.scale) : Vector<A>{};
    else
      v = dropout.apply<A>(v, draws + c);
    store(to + c, v, count);
    sum(c, v, count);
  });
}

// (gradient of x, gradient of the bias in the type of the arithmetic, or (0,) where there is none)
std::tuple<Tensor, Tensor> dropout_backward(const Tensor& grad_out, const OptionalTensor& y, bool relu, double p,
                                            const OptionalTensor& seed, bool has_bias) {
  const Tensor gradient = grad_out.contiguous(), output = relu ? y->contiguous() : Tensor();
  const Tensor out = at::cpu::empty(grad_out.sizes(), grad_out.options());
  const int64_t d = grad_out.size(-1), rows = d > 0 ? grad_out.numel() / d : 0;
  const auto sum_options = grad_out.options().dtype(arithmetic_type(grad_out));
  if (grad_out.numel() == 0) return {out, at::zeros({has_bias ? d : 0}, sum_options)};
  const Dropout dropout = dropout_of(p, seed);
  Tensor grad_bias = has_bias ? Tensor() : at::cpu::empty({0}, sum_options);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad_out.scalar_type(), "dropout_backward", [&] {
    using A = Accumulate<scalar_t>;
    const scalar_t* from = gradient.const_data_ptr<scalar_t>();
    const scalar_t* positive = relu ? output.const_data_ptr<scalar_t>() : nullptr;
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    const auto gradient_of = [&](int64_t first, int64_t elements, const uint16_t* draws, const auto& sum) {
      gradient_of_stretch(from + first, positive ? positive + first : nullptr, to + first, elements, dropout, draws,
                          sum);
    };
    if (!has_bias) {
      for_stretches(gradient, to, !positive, dropout,
                    [&](int64_t, int64_t first, int64_t elements, const uint16_t* draws) {
                      gradient_of(first, elements, draws, [](int64_t, auto, auto) {});
                    });
      return;
    }
    const int64_t per_chunk = chunk_rows(rows, d), chunks = (rows + per_chunk - 1) / per_chunk;
    const int64_t block = std::min(per_chunk, rows_as_one<A>(d));
    const Tensor partials = at::cpu::empty({chunks * block * d}, sum_options);
    A* sums = partials.mutable_data_ptr<A>();
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) __attribute__((flatten)) {
      const int64_t last_row = std::min(rows, end * per_chunk);
      RowDraws draws(dropout, d, last_row);
      Pages pages(to + begin * per_chunk * d, to + last_row * d);
      for (int64_t k = begin; k < end; ++k) {
        A* own = sums + k * block * d;
        std::fill_n(own, block * d, A(0));
        const int64_t own_end = std::min(rows, (k + 1) * per_chunk);
        for_blocks(to, d, k * per_chunk, own_end, block, pages, [&](int64_t first, int64_t last) {
          const int64_t columns = (last - first) * d;
          for (int64_t column = 0; column < columns; column += kDrawColumns) {
            const int64_t elements = std::min(kDrawColumns, columns - column);
            const uint16_t* const drawn = positive    ? nullptr
                                          : block > 1 ? draws.side_by_side(first, last)
                                                      : draws.of(first, column, elements);
            gradient_of(first * d + column, elements, drawn, [own = own + column](int64_t c, auto v, auto count) {
              store(own + c, load(own + c, count) + v, count);
            });
          }
        });
      }
    });
    grad_bias = sum_partials<A, A>(partials, chunks * block, d, partials.scalar_type());
  });
  return {out, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def("dropout(Tensor x, Tensor? bias, Tensor? residual, bool relu, float p, Tensor? seed) -> Tensor");
  m.def(
      "dropout_backward(Tensor grad_out, Tensor? y, bool relu, float p, Tensor? seed, bool has_bias) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("dropout", dropout);
  m.impl("dropout_backward", dropout_backward);
}

}  // namespace transformer_fast
