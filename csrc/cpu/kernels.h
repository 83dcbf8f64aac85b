// Table of the kernels that the library of one instruction set provides. Everything in this folder, except kernels.h
// and the parameters that it includes, is compiled once per instruction set, into a separate library, so that the
// libraries share no function. csrc/instruction_set.cpp loads the best library that the processor runs.
//
// Kernels do not check their arguments and use no tensors: csrc/ops checks, allocates and records for autograd. Only
// pointers, sizes and types of the standard library pass between them, so one library serves every PyTorch and Python.
#pragma once

#include "attention/attention_params.h"
#include "cross_entropy.h"
#include "dropout.h"
#include "embedding/embedding_params.h"
#include "generation/generation_kernels.h"
#include "linear/linear_kernels.h"
#include "norm/norm_params.h"

#include <span>
#include <tuple>
#include <type_traits>

namespace transformer_fast {

// The kernels for one type of elements.
template <typename T>
struct TypedKernels {
  using A = Accumulate<T>;
  bool saves_weights;  // whether attention_backward reads weights that the forward saved
  void (*attention_forward)(std::span<const AttentionForward<T, A>>);
  void (*attention_backward)(std::span<const AttentionBackward<T, A>>);
  void (*attention_weights)(const AttentionKernelParams<T, A>&, T* weights);  // (B, H, Lq, Lk), contiguous
  void (*attention_grad_bias)(const AttentionBackward<T, A>&, const BiasGradientResult<A>&);
  void (*norm_forward)(const NormForwardParams<T>&);
  void (*norm_backward)(const NormBackwardParams<T>&);
  void (*dropout_forward)(const DropoutForwardParams<T>&);
  void (*dropout_backward)(const DropoutBackwardParams<T>&);
  bool (*encode)(const EncodeParams<T>&);
  bool (*embed_backward)(const EmbedBackwardParams<T>&);
  void (*cross_entropy_rows)(const CrossEntropyParams<T>&);
};

struct Kernels {
  const char* sources;  // digest of the kernels' sources (kernels_config.h), which must equal that of the ops
  int64_t vector_bytes;
  std::tuple<TypedKernels<float>, TypedKernels<double>, TypedKernels<c10::Half>, TypedKernels<c10::BFloat16>> typed;
  void (*fill_positional_table)(float* table, int64_t length, int64_t d);
  GenerationKernels generation;
  LinearKernels linear;

  template <typename T>
  const TypedKernels<T>& of() const {
    return std::get<TypedKernels<T>>(typed);
  }
};

// The loaded kernels. Raises a RuntimeError if none were loaded.
const Kernels& kernels();

}  // namespace transformer_fast
