// LayerNorm, Norm and RMSNorm, alone or of residual + dropout(x): the op of torch.ops.transformer_fast, from schema to
// kernel. transformer_fast/ops/norm.py documents the arguments.
#include "norm.h"

#include "../cpu/kernels.h"
#include "op.h"
#include "python_hooks.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <string_view>
#include <tuple>

namespace transformer_fast {
namespace {

// (rows, d) with unit stride along the columns: a view if the strides allow it, else a copy. Or nothing.
Tensor as_rows(const Tensor& x) {
  if (!x.defined()) return x;
  const int64_t d = x.size(-1);
  const Tensor dense = d == 1 || x.stride(-1) == 1 ? x : x.contiguous();
  return dense.dim() == 2 ? dense : dense.reshape({x.numel() / d, d});
}

template <typename T>
RowView<const T> rows_of(const Tensor& x) {
  return x.defined() ? RowView<const T>{x.const_data_ptr<T>(), x.stride(0)} : RowView<const T>{};
}

// Rows of a contiguous result, or nothing.
template <typename T>
RowView<T> result_rows(const Tensor& result, int64_t d) {
  return {result.defined() ? result.mutable_data_ptr<T>() : nullptr, d};
}

}  // namespace

NormKind norm_kind(std::string_view name) {
  if (name == "layer") return NormKind::kLayer;
  if (name == "std") return NormKind::kStd;
  TORCH_CHECK_VALUE(name == "rms", "layer_norm: kind must be \"layer\", \"std\" or \"rms\", got \"", name, "\"");
  return NormKind::kRms;
}

NormResult norm_forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, NormKind kind, double dropout_p,
                        const OptionalTensor& seed, void* mean, void* rstd) {
  NormResult result{at::cpu::empty(x.sizes(), x.options()), {}};
  if (residual) result.summed = at::cpu::empty(x.sizes(), x.options());
  const Tensor x_rows = as_rows(x), residual_rows = as_rows(eager::or_undefined(residual));
  const int64_t rows = x_rows.size(0), d = x_rows.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "layer_norm", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    const ParameterTensor<T> weights(weight), biases(bias);
    kernels().of<T>().norm_forward({rows_of<T>(x_rows), rows_of<T>(residual_rows), result_rows<T>(result.summed, d),
                                    result_rows<T>(result.out, d), weights.parameter(), biases.parameter(),
                                    static_cast<A*>(mean), static_cast<A*>(rstd), rows, d, static_cast<A>(eps), kind,
                                    dropout_params(dropout_p, seed)});
  });
  return result;
}

namespace norm_op {
namespace {

using eager::needs_gradient, eager::Needs, eager::or_none, eager::or_undefined;
using torch::autograd::variable_list;

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Required gradients: of x and the residual, of the weight (if there is a weight), of the bias. Other gradients are
// undefined. Without dropout the gradient of the residual is undefined too, because it equals that of x.
FourTensors gradients(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                      const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd, NormKind kind,
                      double dropout_p, const OptionalTensor& seed, const std::array<bool, 3>& needs) {
  const Tensor dy_rows = as_rows(grad_out), x_rows = as_rows(x), grad_summed_rows = as_rows(or_undefined(grad_summed));
  const int64_t rows = x_rows.size(0), d = x_rows.size(1);
  const bool narrow_weights = weight && weight->scalar_type() == x.scalar_type();
  const auto weight_options = x.options().dtype(narrow_weights ? x.scalar_type() : arithmetic_type(x));
  Tensor grad_x, grad_residual, grad_weight, grad_bias;
  if (needs[0]) grad_x = at::cpu::empty(x.sizes(), x.options());
  if (needs[0] && dropout_p > 0) grad_residual = at::cpu::empty(x.sizes(), x.options());
  if (needs[1]) grad_weight = at::cpu::empty({d}, weight_options);
  if (needs[2]) grad_bias = at::cpu::empty({d}, weight_options);
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "layer_norm_backward", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    const ParameterTensor<T> weights(weight);
    kernels().of<T>().norm_backward({rows_of<T>(dy_rows), rows_of<T>(x_rows), rows_of<T>(grad_summed_rows),
                                     weights.parameter(), mean.const_data_ptr<A>(), rstd.const_data_ptr<A>(),
                                     result_rows<T>(grad_x, d), result_rows<T>(grad_residual, d), pointer(grad_weight),
                                     pointer(grad_bias), narrow_weights, rows, d, kind,
                                     dropout_params(dropout_p, seed)});
  });
  return {grad_x, grad_residual, needs[1] ? in_type(grad_weight, weight->scalar_type()) : grad_weight, grad_bias};
}

constexpr Checks kChecks{"layer_norm"}, kBackwardChecks{"layer_norm_backward"};

// The op's mean is an empty tensor for a kind without a mean.
bool has_mean(std::string_view kind) { return kind != "rms"; }

// The number of rows of x, whose last dimension has columns.
c10::SymInt rows_in(const Tensor& x) {
  c10::SymInt rows = 1;
  for (const c10::SymInt& size : x.sym_sizes().slice(0, x.dim() - 1)) rows = rows * size;
  return rows;
}

// Checks of both ops.
void check_rows(const Checks& check, const Tensor& x, const OptionalTensor& weight, std::string_view kind,
                double dropout_p, const OptionalTensor& seed) {
  const int64_t least = norm_kind(kind) == NormKind::kStd ? 2 : 1;
  const Argument rows = check("x", x).floating().rank_at_least(1, "(..., d)");
  const c10::SymInt& d = x.sym_sizes().back();
  rows.require(holds(d.sym_ge(least)), "(..., d) with d of at least ", least, " for kind \"", kind, "\"");
  check("weight", weight).floating().on_device_of(x).sizes({d});
  check.dropout(x, dropout_p, seed, "dropout_p", /*on_host=*/true);
}

void check_forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                   const OptionalTensor& bias, double, std::string_view kind, double dropout_p,
                   const OptionalTensor& seed) {
  check_rows(kChecks, x, weight, kind, dropout_p, seed);
  kChecks("residual", residual).floating().on_device_of(x).sizes(x.sym_sizes());
  kChecks("bias", bias).floating().on_device_of(x).sizes({x.sym_size(-1)});
  kChecks("bias", bias).require(!bias || has_mean(kind), "None for kind \"", kind, "\"");
  kChecks.require(dropout_p == 0 || residual,
                  "residual must be a tensor with dropout, which drops elements of x in "
                  "residual + dropout(x); dropout_p is ",
                  dropout_p);
}

void check_backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                    const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd, std::string_view kind,
                    double dropout_p, const OptionalTensor& seed, bool has_bias) {
  check_rows(kBackwardChecks, x, weight, kind, dropout_p, seed);
  const c10::SymInt rows = rows_in(x);
  kBackwardChecks("grad_out", grad_out).like(x);
  kBackwardChecks("grad_summed", grad_summed).like(x);
  for (const auto& [name, statistics] : {std::pair("mean", mean), std::pair("rstd", rstd)})
    kBackwardChecks(name, statistics).type({arithmetic_type(x)}).on_device_of(x);
  kBackwardChecks("mean", mean).sizes({has_mean(kind) ? rows : c10::SymInt(0)});
  kBackwardChecks("rstd", rstd).sizes({rows});
  kBackwardChecks.require(!has_bias || has_mean(kind), "has_bias must be False for kind \"", kind, "\"");
}

// An op returns tensors; an empty tensor stands for a missing result.
Tensor or_empty(const Tensor& tensor, const at::TensorOptions& options) {
  return tensor.defined() ? tensor : at::empty({0}, options);
}

// True if x must get the type of the residual, which that of the results is. With dropout, the Triton kernels read x of
// 16 bits beside a float32 residual as it is.
bool differs(const Tensor& x, const OptionalTensor& residual, double dropout_p) {
  if (!residual || x.scalar_type() == residual->scalar_type()) return false;
  const bool widens = dropout_p > 0 && x.element_size() == 2 && residual->scalar_type() == at::kFloat;
  return !(widens && runs_on_triton(x));
}

// The results of the op; undefined where missing. Without `statistics` the CPU kernels keep no mean and no rstd.
FourTensors compute(const Tensor& values, const OptionalTensor& residual, const OptionalTensor& weight,
                    const OptionalTensor& bias, double eps, std::string_view kind, double dropout_p,
                    const OptionalTensor& seed, bool statistics) {
  const Tensor x = differs(values, residual, dropout_p) ? values.to(residual->scalar_type()) : values;
  if (runs_on_triton(x))
    return std::tuple_cat(
        python_hooks().launch_norm(x, residual, weight, bias, eps, std::string(kind), dropout_p, seed));
  Tensor mean, rstd;
  if (statistics) {
    const auto options = x.options().dtype(arithmetic_type(x));
    const int64_t rows = x.numel() / x.size(-1);
    mean = at::empty({has_mean(kind) ? rows : 0}, options), rstd = at::empty({rows}, options);
  }
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
  const auto [out, summed] =
      norm_forward(x, residual, weight, bias, eps, norm_kind(kind), dropout_p, seed, pointer(mean), pointer(rstd));
  return {out, summed, mean, rstd};
}

FourTensors forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                    const OptionalTensor& bias, double eps, std::string_view kind, double dropout_p,
                    const OptionalTensor& seed) {
  const auto [out, summed, mean, rstd] =
      compute(x, residual, weight, bias, eps, kind, dropout_p, seed, /*statistics=*/true);
  const auto options = out.options();
  return {out, or_empty(summed, options), or_empty(mean, options.dtype(arithmetic_type(out))), rstd};
}

FourTensors forward_meta(const Tensor& values, const OptionalTensor& residual, const OptionalTensor&,
                         const OptionalTensor&, double, std::string_view kind, double, const OptionalTensor&) {
  const Tensor& x = residual ? *residual : values;
  const c10::SymInt rows = rows_in(x);
  const auto statistics = [&](const c10::SymInt& count) { return meta_tensor(x, {count}, arithmetic_type(x)); };
  return {meta_tensor(x, x.sym_sizes()), residual ? meta_tensor(x, x.sym_sizes()) : meta_tensor(x, {0}),
          statistics(has_mean(kind) ? rows : c10::SymInt(0)), statistics(rows)};
}

FourTensors backward(const Tensor& grad_out, const OptionalTensor& grad_summed, const Tensor& x,
                     const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd, std::string_view kind,
                     double dropout_p, const OptionalTensor& seed, bool has_bias) {
  const FourTensors results =
      runs_on_triton(x) ? std::tuple_cat(python_hooks().launch_norm_backward(grad_out, grad_summed, x, weight, mean,
                                                                             rstd, std::string(kind), dropout_p, seed,
                                                                             has_bias, x.scalar_type()))
                        : gradients(grad_out, grad_summed, x, weight, mean.contiguous(), rstd.contiguous(),
                                    norm_kind(kind), dropout_p, seed, {true, weight.has_value(), has_bias});
  const auto& [grad_x, grad_residual, grad_weight, grad_bias] = results;
  const auto weight_options = x.options().dtype(weight ? weight->scalar_type() : x.scalar_type());
  return {grad_x, or_empty(grad_residual, x.options()), or_empty(grad_weight, weight_options),
          or_empty(grad_bias, weight_options).to(weight_options)};
}

FourTensors backward_meta(const Tensor&, const OptionalTensor&, const Tensor& x, const OptionalTensor& weight,
                          const Tensor&, const Tensor&, std::string_view, double dropout_p, const OptionalTensor&,
                          bool has_bias) {
  const auto rows = [&](bool requested) { return requested ? meta_tensor(x, x.sym_sizes()) : meta_tensor(x, {0}); };
  const auto parameter = [&](bool requested) {
    return meta_tensor(weight ? *weight : x, {requested ? x.sym_size(-1) : c10::SymInt(0)});
  };
  return {rows(true), rows(dropout_p > 0), parameter(weight.has_value()), parameter(has_bias)};
}

// The autograd node.
struct LayerNorm {
  static constexpr const char* kName = "layer_norm";
  enum : size_t { kX, kWeight, kMean, kRstd, kSeed, kSaved };  // what is saved
  static constexpr size_t kValues = kMean;

  struct Options {
    std::string kind;
    double dropout_p;
    bool has_residual, has_bias, by_triton;
    at::ScalarType x;  // the type of x as the kernel read it; that of the rows that were normed may be another
  };

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    const bool by_triton = options.by_triton;
    const bool direct = eager::is_plain_eager(grads, by_triton) && eager::is_plain_eager(saved, by_triton);
    const KernelsOfForward same(by_triton);
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor &x = saved[kX], &mean = saved[kMean], &rstd = saved[kRstd];
    const OptionalTensor weight = or_none(saved[kWeight]);
    const OptionalTensor seed = or_none(saved[kSeed]);
    const OptionalTensor grad_summed = grads.size() > 1 ? or_none(grads[1]) : std::nullopt;
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(x);  // only the sum was used
    FourTensors results;
    if (!direct)
      results =
          op<"layer_norm_backward", norm_op::backward>()(grad_out, grad_summed, x, weight, mean, rstd, options.kind,
                                                         options.dropout_p, seed_beside(x, seed), options.has_bias);
    else if (!by_triton)
      results = gradients(grad_out, grad_summed, x, weight, mean, rstd, norm_kind(options.kind), options.dropout_p,
                          seed, {needs[0] || needs[1], needs[2], needs[3]});
    else
      results =
          std::tuple_cat(python_hooks().launch_norm_backward(grad_out, grad_summed, x, weight, mean, rstd, options.kind,
                                                             options.dropout_p, seed, options.has_bias, options.x));
    const auto& [grad_x, grad_residual, grad_weight, grad_bias] = results;  // autograd casts them as the inputs
    return {grad_x,
            !options.has_residual   ? Tensor()
            : options.dropout_p > 0 ? grad_residual
                                    : grad_x,
            weight ? grad_weight : Tensor(), options.has_bias ? grad_bias : Tensor()};
  }
};

// `direct`: true if the kernel may be called without the dispatcher. Missing results are then undefined.
FourTensors recorded(bool direct, const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                     const OptionalTensor& bias, double eps, std::string_view kind, double dropout_p,
                     const OptionalTensor& seed) {
  const bool records = needs_gradient(x, residual, weight, bias);
  FourTensors results;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = direct ? compute(x, residual, weight, bias, eps, kind, dropout_p, seed, /*statistics=*/records)
                     : op<"layer_norm", forward>()(x, residual, weight, bias, eps, kind, dropout_p, seed);
  }
  if (!records) return results;
  const auto& [out, summed, mean, rstd] = results;
  eager::record<LayerNorm>(residual ? variable_list{out, summed} : variable_list{out},
                           {residual ? summed : x, or_undefined(weight), mean, rstd, or_undefined(seed)},
                           {std::string(kind), dropout_p, residual.has_value(), bias.has_value(), runs_on_triton(x),
                            differs(x, residual, dropout_p) ? residual->scalar_type() : x.scalar_type()},
                           x, residual, weight, bias);
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  define_op<"layer_norm", check_forward, forward, forward_meta, recorded, eager::DoorOptions{.results = 2}>(
      m,
      "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, str kind, float dropout_p, Tensor? seed) "
      "-> (Tensor out, Tensor summed, Tensor mean, Tensor rstd)");
  define_backward<"layer_norm_backward", check_backward, backward, backward_meta>(
      m,
      "(Tensor grad_out, Tensor? grad_summed, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, str kind, "
      "float dropout_p, Tensor? seed, bool has_bias) "
      "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)");
}

}  // namespace norm_op
}  // namespace transformer_fast
