// A linear layer and the label-smoothed cross entropy of its logits. The logits are made in chunks of rows; each chunk
// gives its losses and, where a gradient is asked for, is turned into its own and multiplied into the others at once.
// Rows that are ignored are left out.
#include "cross_entropy.h"

#include "../cpu/kernels.h"
#include "tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

namespace transformer_fast {
namespace {

// The losses from `start` on, of logits (rows, vocabulary), contiguous; where asked for, the gradient of their sum is
// written over the logits.
void cross_entropy_rows(const Tensor& logits, const Tensor& target, const Tensor& losses, int64_t start,
                        double smoothing, bool gradient) {
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const int64_t* targets = target.const_data_ptr<int64_t>() + start;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, logits.scalar_type(), "cross_entropy_rows", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    kernels().of<T>().cross_entropy_rows({logits.mutable_data_ptr<T>(), targets, losses.mutable_data_ptr<A>() + start,
                                          rows, vocabulary, static_cast<A>(smoothing), gradient});
  });
}

// How many targets count. One outside the vocabulary raises.
int64_t count_targets(const Tensor& target, int64_t ignore_index, int64_t vocabulary) {
  const int64_t* targets = target.const_data_ptr<int64_t>();
  int64_t count = 0;
  for (int64_t r = 0; r < target.numel(); ++r) {
    if (targets[r] == ignore_index) continue;
    TORCH_CHECK_INDEX(targets[r] >= 0 && targets[r] < vocabulary, "linear_cross_entropy: target ", r, " of ",
                      target.numel(), " is ", targets[r], ", but the vocabulary has ", vocabulary,
                      " rows: expected 0 <= target < ", vocabulary, ", or ignore_index");
    ++count;
  }
  return count;
}

// result = scale * a @ b, or that added to it; result may be wider.
void accumulate(Tensor result, const Tensor& a, const Tensor& b, double scale, bool add) {
  if (result.scalar_type() == a.scalar_type()) {
    at::addmm_out(result, result, a, b, add ? 1 : 0, scale);
  } else {
    if (!add) result.zero_();
    result.add_(at::mm(a, b), scale);
  }
}

// linear_cross_entropy() where every target counts.
CrossEntropyResult of_counted(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                              double smoothing, bool mean, const std::array<bool, 3>& gradients,
                              int64_t chunk_elements) {
  const int64_t rows = x.size(0), vocabulary = weight.size(0);
  const at::ScalarType wide = arithmetic_type(x);
  const int64_t most = std::max<int64_t>(64, chunk_elements / std::max<int64_t>(1, vocabulary));
  // Half precision is divided by the count at the end only, and until then of a sensible size.
  const double last = mean && rows > 0 ? 1.0 / rows : 1.0, scale = x.scalar_type() == at::kHalf ? 1.0 : last;
  const Tensor losses = at::empty({rows}, x.options().dtype(wide));
  const bool any = gradients[0] || gradients[1] || gradients[2], whole = rows <= most;
  CrossEntropyResult result;
  if (any) result.scale = at::scalar_tensor(last / scale, losses.options());
  auto& [grad_x, grad_weight, grad_bias] = result.gradients;
  if (gradients[0]) grad_x = at::empty(x.sizes(), x.options());
  if (gradients[1]) grad_weight = at::empty(weight.sizes(), whole ? weight.options() : losses.options());
  if (gradients[2]) grad_bias = at::zeros({vocabulary}, losses.options());

  const Tensor weight_t = weight.t(), buffer = at::empty({std::min(rows, most), vocabulary}, x.options());
  for (int64_t start = 0; start < rows; start += most) {
    const int64_t count = std::min(most, rows - start);
    const Tensor chunk = whole ? x : x.narrow(0, start, count);
    Tensor logits = whole ? buffer : buffer.narrow(0, 0, count);
    bias ? at::addmm_out(logits, *bias, chunk, weight_t) : at::mm_out(logits, chunk, weight_t);
    cross_entropy_rows(logits, target, losses, start, smoothing, any);
    if (gradients[0]) accumulate(grad_x.narrow(0, start, count), logits, weight, scale, false);
    if (gradients[1]) accumulate(grad_weight, logits.t(), chunk, scale, start > 0);
    if (gradients[2]) grad_bias.add_(logits.sum(0, /*keepdim=*/false, wide), scale);
  }
  if (gradients[1] && rows == 0) grad_weight.zero_();
  result.loss = mean ? losses.mean() : losses.sum();
  return result;
}

using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// An op returns tensors: where there is no gradient, an empty one.
FiveTensors linear_cross_entropy_op(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                    const Tensor& target, double smoothing, int64_t ignore_index, bool mean,
                                    bool gradients, int64_t chunk_elements) {
  const auto result = linear_cross_entropy(x, weight, bias, target, smoothing, ignore_index, mean,
                                           {gradients, gradients, gradients && bias}, chunk_elements);
  const auto& [grad_x, grad_weight, grad_bias] = result.gradients;
  const auto or_empty = [](const Tensor& gradient, const at::TensorOptions& options) {
    return gradient.defined() ? gradient.to(options) : at::empty({0}, options);
  };
  const auto wide = result.loss.options();
  return {result.loss, or_empty(grad_x, x.options()), or_empty(grad_weight, wide), or_empty(grad_bias, wide),
          gradients ? result.scale : at::ones({}, wide)};
}

}  // namespace

CrossEntropyResult linear_cross_entropy(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                        const Tensor& target_, double smoothing, int64_t ignore_index, bool mean,
                                        const std::array<bool, 3>& gradients, int64_t chunk_elements) {
  const Tensor target = target_.contiguous();
  const int64_t rows = target.numel(), count = count_targets(target, ignore_index, weight.size(0));
  if (count == rows) return of_counted(x, weight, bias, target, smoothing, mean, gradients, chunk_elements);
  const Tensor counted = target.ne(ignore_index).nonzero().squeeze(1);
  auto result = of_counted(x.index_select(0, counted), weight, bias, target.index_select(0, counted), smoothing, mean,
                           gradients, chunk_elements);
  Tensor& grad_x = result.gradients[0];
  if (gradients[0]) grad_x = at::zeros(x.sizes(), x.options()).index_copy_(0, counted, grad_x);
  return result;
}

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, float smoothing, int ignore_index, "
      "bool mean, bool gradients, int chunk_elements) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) { m.impl("linear_cross_entropy", linear_cross_entropy_op); }

}  // namespace transformer_fast
