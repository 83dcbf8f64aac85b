// Linear layers with weights in a layout of their own, on the CPU: conversion of tensors to kernel arguments.
#include "prepacked_linear.h"

#include "../cpu/kernels.h"
#include "../ops/operator.h"
#include "../ops/tensors.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

namespace transformer_fast {
namespace {

void check_weights(at::TensorList weights, bool) {
  constexpr Checks check{"pack_weight"};
  check.require(!weights.empty(), "weights must be one tensor or more");
  for (const Tensor& weight : weights) {
    check("weights", weight).type({at::kFloat}).rank(2, "(out, in) each").require(weight.is_cpu(), "on the CPU");
    check("weights", weight).sizes({weight.sym_size(0), weights[0].sym_size(1)});
  }
}

// The sizes of packed weights of this dtype: panels of words, and of an int8 weight the bytes of a word.
std::vector<int64_t> packed_sizes(at::ScalarType type, int64_t outputs, int64_t depth) {
  const LinearKernels& linear = kernels().linear;
  const int64_t panels = (outputs + linear.panel - 1) / linear.panel;
  if (type == at::kFloat) return {panels, depth, linear.panel};
  if (type == at::kInt) return {panels, (depth + 1) / 2, linear.panel};
  return {panels, kPanelHeader + linear.int8_groups(depth), linear.panel, sizeof(int32_t)};
}

constexpr std::array kActivations = {std::pair("none", Activation::kNone), std::pair("relu", Activation::kRelu),
                                     std::pair("gelu", Activation::kGelu),
                                     std::pair("gelu_tanh", Activation::kGeluTanh)};

void check_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs,
                  std::string_view activation) {
  constexpr Checks check{"packed_linear"};
  check("x", x).type({at::kFloat}).rank_at_least(1, "(..., in)");
  check("x", x).require(x.size(-1) > 0, "of one column or more");
  check.require(outputs >= 0, "outputs must be at least 0, got ", outputs);
  check("bias", bias).type({at::kFloat}).sizes({outputs});
  check("packed", packed).type({at::kFloat, at::kChar});
  check("packed", packed).sizes(c10::fromIntArrayRefSlow(packed_sizes(packed.scalar_type(), outputs, x.size(-1))));
  check("packed", packed).require(packed.is_contiguous(), "contiguous");
  const bool int8 = packed.scalar_type() == at::kChar;
  const auto known = [&](const auto& named) { return activation == named.first; };
  check.require(std::any_of(kActivations.begin(), kActivations.begin() + (int8 ? 4 : 2), known), "activation must be ",
                int8 ? "none, relu, gelu or gelu_tanh" : "none or relu for weights in float", ", got ", activation);
}

template <typename T>
Tensor packed_by(const PackedKernels<T>& kernels, at::TensorList weights, at::ScalarType type) {
  const int64_t depth = weights[0].size(1);
  std::vector<Tensor> contiguous;
  std::vector<const T*> rows;  // stacked along the outputs
  for (const Tensor& weight : weights) {
    contiguous.push_back(weight.contiguous());
    for (int64_t n = 0; n < weight.size(0); ++n) rows.push_back(contiguous.back().const_data_ptr<T>() + n * depth);
  }
  const auto outputs = static_cast<int64_t>(rows.size());
  const Tensor packed = at::cpu::empty(packed_sizes(type, outputs, depth), weights[0].options().dtype(type));
  kernels.pack(rows.data(), outputs, depth, packed.mutable_data_ptr());
  return packed;
}

template <typename T>
void multiply(const PackedKernels<T>& kernels, const Tensor& x, const Tensor& packed, const Tensor& bias,
              const Tensor& out, Activation activation) {
  const int64_t depth = x.size(-1);
  kernels.linear({x.const_data_ptr<T>(), packed.const_data_ptr(), bias.defined() ? bias.const_data_ptr<T>() : nullptr,
                  out.mutable_data_ptr<T>(), x.numel() / depth, depth, out.size(-1), activation});
}

}  // namespace

bool has_narrow_linear() { return kernels().linear.narrow.linear != nullptr; }

Tensor pack_weight(at::TensorList weights, bool int8) {
  const LinearKernels& linear = kernels().linear;
  if (weights[0].scalar_type() == at::kBFloat16) return packed_by(linear.narrow, weights, at::kInt);
  return int8 ? packed_by(linear.int8, weights, at::kChar) : packed_by(linear.step, weights, at::kFloat);
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs,
                     std::string_view activation) {
  const LinearKernels& linear = kernels().linear;
  const Tensor input = x.contiguous(), added = bias ? bias->contiguous() : Tensor();
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  const Tensor out = at::cpu::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  const auto known = [&](const auto& named) { return activation == named.first; };
  const Activation function = std::find_if(kActivations.begin(), kActivations.end(), known)->second;
  if (packed.scalar_type() == at::kInt)
    multiply(linear.narrow, input, packed, added, out, function);
  else
    multiply(packed.scalar_type() == at::kChar ? linear.int8 : linear.step, input, packed, added, out, function);
  return out;
}

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def("pack_weight(Tensor[] weights, bool int8) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int outputs, str activation) -> Tensor");
}

TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) { m.impl("packed_linear", Checked<check_linear, packed_linear>::call); }

TORCH_LIBRARY_IMPL(transformer_fast, CompositeExplicitAutograd, m) {  // a list without tensors has no device
  m.impl("pack_weight", Checked<check_weights, pack_weight>::call);
}

}  // namespace transformer_fast
