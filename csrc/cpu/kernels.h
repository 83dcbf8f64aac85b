// Kernels that the library of one instruction set gives to the module. Everything in this folder but kernels.h and
// the parameters it includes is compiled once for each instruction set, into a library of its own, so that no function
// is shared between them; csrc/instruction_set.cpp loads the best one that the processor runs.
//
// Kernels trust what they are given, and know no tensors: csrc/ops checks, allocates and records. Pointers, sizes and types
// of the standard library pass between them, so one library serves every PyTorch and every Python.
#pragma once

#include "attention/attention_params.h"
#include "cross_entropy.h"
#include "dropout.h"
#include "embedding/embedding_params.h"
#include "generation/generation_kernels.h"
#include "norm/norm_params.h"

#include <span>
#include <tuple>
#include <type_traits>

namespace transformer_fast {

// The kernels for one type of elements.
template <typename T>
struct TypedKernels {
  using A = Accumulate<T>;
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
  const char* sources;  // a digest of what they were compiled of (kernels_config.h); the module expects its own
  int64_t vector_bytes;
  std::tuple<TypedKernels<float>, TypedKernels<double>, TypedKernels<c10::Half>, TypedKernels<c10::BFloat16>> typed;
  void (*fill_positional_table)(float* table, int64_t length, int64_t d);
  GenerationKernels generation;

  template <typename T>
  const TypedKernels<T>& of() const {
    return std::get<TypedKernels<T>>(typed);
  }
};

// Those in use. Raises a RuntimeError where none was loaded.
const Kernels& kernels();

}  // namespace transformer_fast
