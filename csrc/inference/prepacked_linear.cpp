// Linear layers with weights in a layout of their own, on the CPU: conversion of tensors to kernel arguments.
#include "prepacked_linear.h"

#include "../cpu/kernels.h"
#include "../ops/operator.h"
#include "../ops/tensors.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <string_view>
#include <utility>
#include <vector>

namespace transformer_fast {
namespace {

template <Name name>
void check_weights(at::TensorList weights) {
  constexpr Checks check{name.text};
  check.require(!weights.empty(), "weights must be one tensor or more");
  for (const Tensor& weight : weights) {
    check("weights", weight).type({at::kFloat}).rank(2, "(out, in) each").require(weight.is_cpu(), "on the CPU");
    check("weights", weight).sizes({weight.sym_size(0), weights[0].sym_size(1)});
  }
}

void check_product(const Checks& check, const Tensor& x, const OptionalTensor& bias, int64_t outputs) {
  check("x", x).type({at::kFloat}).rank_at_least(1, "(..., in)");
  check("x", x).require(x.size(-1) > 0, "of one column or more");
  check.require(outputs >= 0, "outputs must be at least 0, got ", outputs);
  check("bias", bias).type({at::kFloat}).sizes({outputs});
}

// The number of panels of this many outputs.
int64_t panels_of(int64_t outputs) { return (outputs + kernels().linear.panel - 1) / kernels().linear.panel; }

void check_step(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs, bool) {
  constexpr Checks check{"step_linear"};
  check_product(check, x, bias, outputs);
  check("packed", packed).type({at::kFloat}).sizes({panels_of(outputs), x.size(-1), kernels().linear.panel});
  check("packed", packed).require(packed.is_contiguous(), "contiguous");
}

// The activation of this name.
Activation activation_of(const Checks& check, std::string_view name) {
  for (const auto& [known, activation] :
       {std::pair("none", Activation::kNone), std::pair("relu", Activation::kRelu),
        std::pair("gelu", Activation::kGelu), std::pair("gelu_tanh", Activation::kGeluTanh)})
    if (name == known) return activation;
  check.require(false, "activation must be none, relu, gelu or gelu_tanh, got ", name);
  return Activation::kNone;
}

void check_quantized(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs,
                     std::string_view activation) {
  constexpr Checks check{"quantized_linear"};
  check_product(check, x, bias, outputs);
  const int64_t words = kPanelHeader + kernels().linear.int8.groups(x.size(-1));
  activation_of(check, activation);
  check("packed", packed).type({at::kChar}).sizes({panels_of(outputs), words, kernels().linear.panel, 4});
  check("packed", packed).require(packed.is_contiguous(), "contiguous");
}

// Weights (out, in) of linear layers with the same input, stacked along the outputs.
struct StackedWeights {
  std::vector<Tensor> contiguous;
  std::vector<const float*> rows;
  int64_t depth;

  explicit StackedWeights(at::TensorList weights) : depth(weights[0].size(1)) {
    for (const Tensor& weight : weights) {
      contiguous.push_back(weight.contiguous());
      for (int64_t n = 0; n < weight.size(0); ++n)
        rows.push_back(contiguous.back().const_data_ptr<float>() + n * depth);
    }
  }

  int64_t outputs() const { return static_cast<int64_t>(rows.size()); }
  int64_t panels() const { return panels_of(outputs()); }
};

Tensor pack_quantized_weight(at::TensorList weights) {
  const QuantizedKernels& int8 = kernels().linear.int8;
  const StackedWeights given(weights);
  const int64_t words = kPanelHeader + int8.groups(given.depth), group = sizeof(int32_t);
  const auto options = weights[0].options().dtype(at::kChar);
  const Tensor packed = at::cpu::empty({given.panels(), words, kernels().linear.panel, group}, options);
  int8.pack(given.rows.data(), given.outputs(), given.depth, packed.mutable_data_ptr());
  return packed;
}

}  // namespace

Tensor pack_step_weight(at::TensorList weights) {
  const StackedWeights given(weights);
  const Tensor packed = at::cpu::empty({given.panels(), given.depth, kernels().linear.panel}, weights[0].options());
  kernels().linear.pack_step_weight(given.rows.data(), given.outputs(), given.depth, packed.mutable_data_ptr<float>());
  return packed;
}

Tensor step_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs, bool relu) {
  const Tensor input = x.contiguous(), added = bias ? bias->contiguous() : Tensor();
  const int64_t depth = packed.size(1);
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  const Tensor out = at::cpu::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  kernels().linear.step_linear({input.const_data_ptr<float>(), packed.const_data_ptr<float>(),
                                bias ? added.const_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>(),
                                input.numel() / depth, depth, outputs, relu});
  return out;
}

bool has_narrow_linear() { return kernels().linear.narrow.linear != nullptr; }

Tensor pack_narrow_weight(const Tensor& weight) {
  const Tensor given = weight.contiguous();
  const int64_t outputs = given.size(0), depth = given.size(1);
  const auto* const data = given.const_data_ptr<at::BFloat16>();
  std::vector<const at::BFloat16*> rows;
  for (int64_t n = 0; n < outputs; ++n) rows.push_back(data + n * depth);
  const Tensor packed =
      at::cpu::empty({panels_of(outputs), (depth + 1) / 2, kernels().linear.panel}, weight.options().dtype(at::kInt));
  kernels().linear.narrow.pack(rows.data(), outputs, depth, packed.mutable_data_ptr());
  return packed;
}

Tensor narrow_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs) {
  const Tensor input = x.contiguous(), added = bias ? bias->contiguous() : Tensor();
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  const Tensor out = at::cpu::empty(sizes, x.options());
  const int64_t depth = x.size(-1);
  kernels().linear.narrow.linear({input.const_data_ptr<at::BFloat16>(), packed.const_data_ptr(),
                                  bias ? added.const_data_ptr<at::BFloat16>() : nullptr,
                                  out.mutable_data_ptr<at::BFloat16>(), input.numel() / depth, depth, outputs});
  return out;
}

Tensor quantized_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs,
                        std::string_view activation) {
  const Tensor input = x.contiguous(), added = bias ? bias->contiguous() : Tensor();
  const int64_t depth = x.size(-1);
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  const Tensor out = at::cpu::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  const Activation function = activation_of(Checks{"quantized_linear"}, activation);
  kernels().linear.int8.linear({input.const_data_ptr<float>(), packed.const_data_ptr(),
                                bias ? added.const_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>(),
                                input.numel() / depth, depth, outputs, function});
  return out;
}

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def("pack_step_weight(Tensor[] weights) -> Tensor");
  m.def("step_linear(Tensor x, Tensor packed, Tensor? bias, int outputs, bool relu) -> Tensor");
  m.def("pack_quantized_weight(Tensor[] weights) -> Tensor");
  m.def("quantized_linear(Tensor x, Tensor packed, Tensor? bias, int outputs, str activation) -> Tensor");
}

TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("step_linear", Checked<check_step, step_linear>::call);
  m.impl("quantized_linear", Checked<check_quantized, quantized_linear>::call);
}

TORCH_LIBRARY_IMPL(transformer_fast, CompositeExplicitAutograd, m) {  // a list without tensors has no device
  m.impl("pack_step_weight", Checked<check_weights<"pack_step_weight">, pack_step_weight>::call);
  m.impl("pack_quantized_weight", Checked<check_weights<"pack_quantized_weight">, pack_quantized_weight>::call);
}

}  // namespace transformer_fast
