// y = [residual +] dropout([relu] x) and its backward, elementwise over the (rows, last dimension) view.
// Nothing is stored for the backward: the mask is drawn again from the seed, or read off the output of the ReLU.

#include "draws.h"
#include "vec.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

namespace transformer_fast {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 16384;  // elements below which a second thread costs more than it brings

Dropout make_dropout(double p, const OptionalTensor& seed) {
  return p > 0 ? Dropout(p, *seed->const_data_ptr<int64_t>()) : Dropout();
}

// body(row, first column, first element, elements) over stretches of at most kDrawColumns columns of one row.
template <typename Body>
void for_stretches(const Tensor& x, Body&& body) {
  const int64_t d = x.size(-1), rows = x.numel() / d;
  const int64_t stretches = (d + kDrawColumns - 1) / kDrawColumns;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::min(d, kDrawColumns));
  at::parallel_for(0, rows * stretches, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / stretches, column = i % stretches * kDrawColumns;
      body(row, column, row * d + column, std::min(kDrawColumns, d - column));
    }
  });
}

Tensor dropout(const Tensor& x, const OptionalTensor& residual, bool relu, double p, const OptionalTensor& seed) {
  const Tensor input = x.contiguous(), added = residual ? residual->contiguous() : Tensor();
  const Tensor out = at::cpu::empty(x.sizes(), x.options());
  if (x.numel() == 0) return out;
  const Dropout dropout = make_dropout(p, seed);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "dropout", [&] {
    using A = Accumulate<scalar_t>;
    const scalar_t* from = input.const_data_ptr<scalar_t>();
    const scalar_t* add = residual ? added.const_data_ptr<scalar_t>() : nullptr;
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_stretches(input, [&](int64_t row, int64_t column, int64_t first, int64_t elements) {
      uint16_t draws[kDrawRoom];
      if (p > 0) dropout.draw(row, column, elements, draws);
      for_columns<A>(0, elements, [&](int64_t c, auto count, int) {
        auto v = load(from + first + c, count);
        if (relu) v = v < 0 ? Vector<A>{} : v;  // a NaN passes, as in torch.relu
        if (p > 0) v = dropout.apply<A>(v, draws + c);
        if (add) v += load(add + first + c, count);
        store(to + first + c, v, count);
      });
    });
  });
  return out;
}

Tensor dropout_backward(const Tensor& grad_out, const OptionalTensor& y, bool relu, double p,
                        const OptionalTensor& seed) {
  const Tensor gradient = grad_out.contiguous(), output = relu ? y->contiguous() : Tensor();
  const Tensor out = at::cpu::empty(grad_out.sizes(), grad_out.options());
  if (grad_out.numel() == 0) return out;
  const Dropout dropout = make_dropout(p, seed);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad_out.scalar_type(), "dropout_backward", [&] {
    using A = Accumulate<scalar_t>;
    const scalar_t* from = gradient.const_data_ptr<scalar_t>();
    const scalar_t* positive = relu ? output.const_data_ptr<scalar_t>() : nullptr;
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_stretches(gradient, [&](int64_t row, int64_t column, int64_t first, int64_t elements) {
      uint16_t draws[kDrawRoom];
      if (!relu) dropout.draw(row, column, elements, draws);
      for_columns<A>(0, elements, [&](int64_t c, auto count, int) {
        auto v = load(from + first + c, count);
        if (relu)
          v = load(positive + first + c, count) > 0 ? v * static_cast<A>(dropout.rate.scale) : Vector<A>{};
        else
          v = dropout.apply<A>(v, draws + c);
        store(to + first + c, v, count);
      });
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def("dropout(Tensor x, Tensor? residual, bool relu, float p, Tensor? seed) -> Tensor");
  m.def("dropout_backward(Tensor grad_out, Tensor? y, bool relu, float p, Tensor? seed) -> Tensor");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("dropout", dropout);
  m.impl("dropout_backward", dropout_backward);
}

}  // namespace transformer_fast
