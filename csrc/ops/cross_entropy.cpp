// A linear layer and the label-smoothed cross entropy of its logits: the op of torch.ops.transformer_fast, from schema
// to kernel. transformer_fast/ops/cross_entropy.py documents the arguments. Below it, an eager call for
// logits that exist.
//
// The logits are made in chunks of rows. Each chunk gives its losses. If a gradient is requested, the gradient of the
// logits overwrites the chunk and is multiplied into the other gradients at once. Ignored rows are left out.
#include "../cpu/kernels.h"
#include "linear.h"
#include "op.h"
#include "python_hooks.h"
#include "tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>

namespace transformer_fast {
namespace cross_entropy_op {
namespace {

using eager::needs_gradient, eager::Needs, eager::requires_grad;
using torch::autograd::variable_list;

// The loss; the gradients of x, weight and bias, undefined if not requested; and the scale of the gradients. The
// gradient of bias, and the gradient of weight if it was summed over chunks, are in the type of the arithmetic.
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// x (..., d), weight (vocabulary, d), bias (vocabulary,), target (...).
void check_loss(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                double label_smoothing, const c10::SymInt&, bool, const std::array<bool, 3>&, const c10::SymInt&) {
  constexpr Checks check{"linear_cross_entropy"};
  check("x", x).floating().rank_at_least(1, "(..., d)");
  check("weight", weight).type_of(x).on_device_of(x).rank(2, "(vocabulary, d)");
  check("weight", weight).sizes({weight.sym_size(0), x.sym_size(-1)});
  check("bias", bias).type_of(x).on_device_of(x).sizes({weight.sym_size(0)});
  check("target", target).type({at::kLong}).on_device_of(x).sizes(x.sym_sizes().slice(0, x.dim() - 1));
  check.probability("label_smoothing", label_smoothing);
}

// Computes the losses from `start` on, of logits (rows, vocabulary), contiguous. If requested, the gradient of their
// sum overwrites the logits.
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

// Number of targets that are not ignored. Raises for a target outside the vocabulary.
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

// result = scale * a @ b, or result += scale * a @ b; result may have a wider type.
void accumulate(Tensor result, const Tensor& a, const Tensor& b, double scale, bool add) {
  const Tensor b_t = b.t();
  if (!add && onednn_is_faster(a, b_t)) {
    at::mul_out(result, a.is_contiguous() ? onednn_linear(a, b_t, {}) : linear_grad_weight(a.t(), b),
                at::scalar_tensor(scale, a.options()));
  } else if (result.scalar_type() == a.scalar_type()) {
    at::addmm_out(result, result, a, b, add ? 1 : 0, scale);
  } else {
    if (!add) result.zero_();
    result.add_(at::mm(a, b), scale);
  }
}

// compute() for a batch without ignored targets.
FiveTensors of_counted(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                       double smoothing, bool mean, const std::array<bool, 3>& gradients, int64_t chunk_elements) {
  const int64_t rows = x.size(0), vocabulary = weight.size(0);
  const at::ScalarType wide = arithmetic_type(x);
  const int64_t most = std::max<int64_t>(64, chunk_elements / std::max<int64_t>(1, vocabulary));
  // Half-precision gradients are divided by the count only at the end, so that they do not underflow.
  const double last = mean && rows > 0 ? 1.0 / rows : 1.0, scale = x.scalar_type() == at::kHalf ? 1.0 : last;
  const Tensor losses = at::cpu::empty({rows}, x.options().dtype(wide));
  const bool any = gradients[0] || gradients[1] || gradients[2], full = rows <= most;
  Tensor scale_tensor, grad_x, grad_weight, grad_bias;
  if (any) scale_tensor = at::scalar_tensor(last / scale, losses.options());
  if (gradients[0]) grad_x = at::cpu::empty(x.sizes(), x.options());
  if (gradients[1]) grad_weight = at::cpu::empty(weight.sizes(), full ? weight.options() : losses.options());
  if (gradients[2]) grad_bias = at::zeros({vocabulary}, losses.options());

  const Tensor weight_t = weight.t();
  const bool by_onednn = onednn_is_faster(full ? x : x.narrow(0, 0, most), weight);
  const Tensor buffer = at::cpu::empty({by_onednn ? 0 : std::min(rows, most), vocabulary}, x.options());
  for (int64_t start = 0; start < rows; start += most) {
    const int64_t count = std::min(most, rows - start);
    const Tensor chunk = full ? x : x.narrow(0, start, count);
    Tensor logits = by_onednn ? onednn_linear(chunk, weight, bias) : full ? buffer : buffer.narrow(0, 0, count);
    if (!by_onednn) bias ? at::addmm_out(logits, *bias, chunk, weight_t) : at::mm_out(logits, chunk, weight_t);
    cross_entropy_rows(logits, target, losses, start, smoothing, any);
    if (gradients[0]) accumulate(full ? grad_x : grad_x.narrow(0, start, count), logits, weight, scale, false);
    if (gradients[1]) accumulate(grad_weight, logits.t(), chunk, scale, start > 0);
    if (gradients[2]) grad_bias.add_(logits.sum(0, /*keepdim=*/false, wide), scale);
  }
  if (gradients[1] && rows == 0) grad_weight.zero_();
  return {mean ? losses.mean() : losses.sum(), grad_x, grad_weight, grad_bias, scale_tensor};
}

// x as rows (rows, d), and target (rows,).
Tensor as_rows(const Tensor& x) {
  return x.dim() == 2 ? x : x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}
Tensor flat(const Tensor& target) { return target.dim() == 1 ? target : target.reshape(-1); }

// x (rows, d), weight (vocabulary, d), bias (vocabulary,), target (rows,) int64. The loss is the sum over the rows
// whose target is not ignore_index, or their mean. Logits in memory at a time: `chunk_elements`, at least those of 64
// rows.
FiveTensors compute(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target_,
                    double smoothing, int64_t ignore_index, bool mean, const std::array<bool, 3>& gradients,
                    int64_t chunk_elements) {
  const Tensor target = target_.contiguous();
  const int64_t rows = target.numel(), count = count_targets(target, ignore_index, weight.size(0));
  if (count == rows) return of_counted(x, weight, bias, target, smoothing, mean, gradients, chunk_elements);
  const Tensor counted = target.ne(ignore_index).nonzero().squeeze(1);
  auto results = of_counted(x.index_select(0, counted), weight, bias, target.index_select(0, counted), smoothing, mean,
                            gradients, chunk_elements);
  Tensor& grad_x = std::get<1>(results);
  if (gradients[0]) grad_x = at::zeros(x.sizes(), x.options()).index_copy_(0, counted, grad_x);
  return results;
}

FiveTensors forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                    double smoothing, c10::SymInt ignore_index, bool mean, std::array<bool, 3> gradients,
                    c10::SymInt chunk_elements) {
  const int64_t ignored = ignore_index.guard_int(__FILE__, __LINE__),
                chunk = chunk_elements.guard_int(__FILE__, __LINE__);
  const Tensor rows = as_rows(x), targets = flat(target);
  auto [loss, grad_x, grad_weight, grad_bias, scale] =
      runs_on_triton(x) ? std::tuple_cat(python_hooks().launch_cross_entropy(rows, weight, bias, targets, smoothing,
                                                                             ignored, mean, gradients, chunk))
                        : compute(rows, weight, bias, targets, smoothing, ignored, mean, gradients, chunk);
  const auto or_empty = [](const Tensor& gradient, const at::TensorOptions& options) {
    return gradient.defined() ? gradient.to(options) : at::empty({0}, options);
  };
  const auto wide = loss.options();
  if (gradients[0]) grad_x = grad_x.view(x.sizes());
  return {loss, or_empty(grad_x, x.options()), or_empty(grad_weight, wide), or_empty(grad_bias, wide),
          scale.defined() ? scale : at::ones({}, wide)};
}

FiveTensors forward_meta(const Tensor& x, const Tensor& weight, const OptionalTensor&, const Tensor&, double,
                         c10::SymInt, bool, std::array<bool, 3> gradients, c10::SymInt) {
  const at::ScalarType wide = arithmetic_type(x);
  const auto gradient = [](bool requested, const Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType type) {
    return requested ? meta_tensor(like, sizes, type) : meta_tensor(like, {0}, type);
  };
  return {meta_tensor(x, {}, wide), gradient(gradients[0], x, x.sym_sizes(), x.scalar_type()),
          gradient(gradients[1], weight, weight.sym_sizes(), wide),
          gradient(gradients[2], weight, {weight.sym_size(0)}, wide), meta_tensor(x, {}, wide)};
}

// The scale of saved gradients in a backward, and whether that is the last use of the tensors that only the node has.
struct Scale {
  Scale(const variable_list& grads, const Tensor& saved)
      : tensor(grads[0] * saved), ends(!torch::autograd::get_current_graph_task_keep_graph() &&
                                       eager::is_plain_eager(grads, /*any_device=*/true)),
        is_one(ends && tensor.is_cpu() && tensor.item<double>() == 1) {}

  // `alone`: true if only the node has the gradient, which is then scaled in place if the graph is not kept.
  Tensor of(const Tensor& gradient, bool alone) const {
    if (!ends || !alone) return gradient * tensor;
    return is_one ? gradient : gradient.mul_(tensor);
  }

  Tensor tensor;
  bool ends, is_one;
};

struct LinearCrossEntropy {
  static constexpr const char* kName = "linear_cross_entropy";
  static constexpr bool kSavesCopies = true;
  enum : size_t { kGradients, kScale = 3, kSaved };  // the gradients of the inputs that need one, and a scale

  struct Options {
    std::array<bool, 3> returned;  // gradients that the caller has too
  };

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    const Scale scale(grads, saved[kScale]);
    variable_list gradients(3);
    for (size_t i = 0; i < 3; ++i) {
      const Tensor& gradient = saved[kGradients + i];
      if (needs[i] && gradient.defined()) gradients[i] = scale.of(gradient, !options.returned[i]);
    }
    return gradients;  // autograd casts them as the inputs
  }
};

// `direct`: true if the kernel may be called without the dispatcher. `gradients`: gradients requested in addition to
// those that autograd needs; a compiled graph, which autograd does not record, requests all. Only these are returned.
FiveTensors recorded(bool direct, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& target, double smoothing, c10::SymInt ignore_index, bool mean,
                     std::array<bool, 3> gradients, c10::SymInt chunk_elements) {
  const bool records = needs_gradient(x, weight, bias);
  const std::array<bool, 3> needs = {gradients[0] || (records && requires_grad(x)),
                                     gradients[1] || (records && requires_grad(weight)),
                                     gradients[2] || (records && requires_grad(bias))};
  FiveTensors results;
  auto& [loss, grad_x, grad_weight, grad_bias, scale] = results;
  if (direct) {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = compute(as_rows(x), weight, bias, flat(target), smoothing, ignore_index.expect_int(), mean, needs,
                      chunk_elements.expect_int());
    if (needs[0]) grad_x = grad_x.view(x.sizes());
  } else {
    results = below_autograd<"linear_cross_entropy", forward>(false, x, weight, bias, target, smoothing, ignore_index,
                                                              mean, needs, chunk_elements);
  }
  if (records)
    eager::record<LinearCrossEntropy>({loss}, {grad_x, grad_weight, grad_bias, scale}, {gradients}, x, weight, bias);
  const std::array<Tensor*, 3> made = {&grad_x, &grad_weight, &grad_bias};
  for (size_t i = 0; i < made.size(); ++i)
    if (!direct && needs[i] && !gradients[i]) *made[i] = made[i]->new_empty_symint({0});
  return results;
}

// Cast as F.linear does.
template <c10::DeviceType device>
FiveTensors forward_autocast(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                             double smoothing, c10::SymInt ignore_index, bool mean, std::array<bool, 3> gradients,
                             c10::SymInt chunk_elements) {
  const NoAutocast<device> no_autocast;
  return op<"linear_cross_entropy", forward>()(autocast<device>(x), autocast<device>(weight), autocast<device>(bias),
                                               target, smoothing, ignore_index, mean, gradients, chunk_elements);
}

// Logits copied at a time, few enough to stay in a cache.
constexpr int64_t kCopied = 1 << 20;

// The losses of logits (rows, vocabulary) with targets in the vocabulary, in the type of the arithmetic, and the gradient
// of their sum, undefined if not requested. The kernel overwrites copies of the logits.
std::tuple<Tensor, Tensor> of_logits(const Tensor& logits, const Tensor& target, double smoothing, bool gradient) {
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const int64_t most = std::max<int64_t>(64, kCopied / vocabulary);
  const Tensor losses = at::empty({rows}, logits.options().dtype(arithmetic_type(logits)));
  const Tensor copies = at::empty({gradient ? rows : std::min(rows, most), vocabulary}, logits.options());
  for (int64_t start = 0; start < rows; start += most) {
    const int64_t count = std::min(most, rows - start);
    const Tensor chunk = copies.narrow(0, gradient ? start : 0, count);
    chunk.copy_(logits.narrow(0, start, count));
    cross_entropy_rows(chunk, target, losses, start, smoothing, gradient);
  }
  return {losses, gradient ? copies : Tensor()};
}

struct CrossEntropy {
  static constexpr const char* kName = "cross_entropy";
  static constexpr bool kSavesCopies = true;
  enum : size_t { kGradient, kScale, kSaved };
  struct Options {};

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options&, const Needs&) {
    return {Scale(grads, saved[kScale]).of(saved[kGradient], /*alone=*/true)};
  }
};

void check_logits(const Tensor& logits, const Tensor& target, double label_smoothing, int64_t, bool) {
  constexpr Checks check{"cross_entropy"};
  check("logits", logits).floating().rank(2, "(rows, vocabulary)").require(logits.numel() > 0, "of at least one row");
  check("target", target).type({at::kLong}).on_device_of(logits).sizes({logits.sym_size(0)});
  check.probability("label_smoothing", label_smoothing);
}

// The mean or the sum of the cross entropy of logits (rows, vocabulary) with target (rows,) int64, plain CPU tensors.
// Rows whose target is ignore_index are left out. Undefined if another target is outside the vocabulary.
Tensor loss_of_logits(bool, const Tensor& logits, const Tensor& target_, double smoothing, int64_t ignore_index,
                      bool mean) {
  const bool records = needs_gradient(logits);
  Tensor loss, gradient, scale;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor target = target_.contiguous();
    const int64_t rows = target.numel(), vocabulary = logits.size(1), *targets = target.const_data_ptr<int64_t>();
    const auto outside = [&](int64_t t) { return t != ignore_index && (t < 0 || t >= vocabulary); };
    if (std::any_of(targets, targets + rows, outside)) return {};
    const int64_t count = count_targets(target, ignore_index, vocabulary);
    const Tensor ignored = count < rows ? target.eq(ignore_index) : Tensor();
    Tensor losses;
    std::tie(losses, gradient) =
        of_logits(logits, ignored.defined() ? target.masked_fill(ignored, 0) : target, smoothing, records);
    if (ignored.defined()) {
      losses.masked_fill_(ignored, 0);
      if (records) gradient.index_fill_(0, ignored.nonzero().squeeze(1), 0);
    }
    loss = losses.sum();
    scale = at::scalar_tensor(mean && count > 0 ? 1.0 / count : 1.0, loss.options());
    if (mean) loss.div_(count);
  }
  if (records) eager::record<CrossEntropy>({loss}, {gradient, scale}, {}, logits);
  return loss;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  // Gradients of x, weight and bias, (0,) if not requested. The caller must multiply all gradients by `scale`, a number.
  define_op<"linear_cross_entropy", check_loss, forward, forward_meta, recorded,
            eager::DoorOptions{.casts = eager::kAllOfIt}>(
      m,
      "(Tensor x, Tensor weight, Tensor? bias, Tensor target, float label_smoothing, SymInt ignore_index, bool mean, "
      "bool[3] gradients, SymInt chunk_elements) -> "
      "(Tensor loss, Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor scale)");
  eager::define_door<"cross_entropy", check_logits, loss_of_logits, eager::DoorOptions{.casts = eager::kAllOfIt}>(
      "(Tensor logits, Tensor target, float label_smoothing, int ignore_index, bool mean)");
}
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCPU, m) { m.impl("linear_cross_entropy", forward_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCUDA, m) { m.impl("linear_cross_entropy", forward_autocast<at::kCUDA>); }

}  // namespace cross_entropy_op
}  // namespace transformer_fast
