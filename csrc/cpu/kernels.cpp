// The one symbol that the library of an instruction set exports.
#include "kernels.h"

#include "kernels_config.h"
#include "simd/vec.h"

#include <span>

namespace transformer_fast {

template <typename T, typename A>
void attention_forward(std::span<const AttentionForward<T, A>> calls);
template <typename T, typename A>
void attention_backward(std::span<const AttentionBackward<T, A>> calls);
template <typename T, typename A>
void attention_weights(const AttentionKernelParams<T, A>& params, T* weights);
template <typename T, typename A>
void attention_grad_bias(const AttentionBackward<T, A>& call, const BiasGradientResult<A>& grad);
template <typename T>
void norm_forward(const NormForwardParams<T>& params);
template <typename T>
void norm_backward(const NormBackwardParams<T>& params);
template <typename T>
void dropout_forward(const DropoutForwardParams<T>& params);
template <typename T>
void dropout_backward(const DropoutBackwardParams<T>& params);
template <typename T>
bool encode(const EncodeParams<T>& params);
template <typename T>
bool embed_backward(const EmbedBackwardParams<T>& params);
template <typename T>
void cross_entropy_rows(const CrossEntropyParams<T>& params);
void fill_positional_table(float* table, int64_t length, int64_t d);
void choose_tokens(const TokenChoice& params);
void choose_continuations(const BeamChoice& params);
void pack_step_weight(const float* const* rows, int64_t outputs, int64_t depth, void* packed);
void step_linear(const PackedLinearParams<float>& params);
int64_t int8_groups(int64_t depth);
PackedKernels<float> int8_kernels();
PackedKernels<c10::BFloat16> narrow_kernels();

namespace {

template <typename T>
constexpr TypedKernels<T> typed_kernels() {
  using A = Accumulate<T>;
  return {kPaired<T>,
          &attention_forward<T, A>,
          &attention_backward<T, A>,
          &attention_weights<T, A>,
          &attention_grad_bias<T, A>,
          &norm_forward<T>,
          &norm_backward<T>,
          &dropout_forward<T>,
          &dropout_backward<T>,
          &encode<T>,
          &embed_backward<T>,
          &cross_entropy_rows<T>};
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const Kernels* transformer_fast_kernels() {
  static const Kernels kernels{
      TRANSFORMER_FAST_KERNELS,
      kVectorBytes,
      {typed_kernels<float>(), typed_kernels<double>(), typed_kernels<c10::Half>(), typed_kernels<c10::BFloat16>()},
      &fill_positional_table,
      {&choose_tokens, &choose_continuations},
      {kStepPanel, &int8_groups, {&pack_step_weight, &step_linear}, int8_kernels(), narrow_kernels()}};
  return &kernels;
}

}  // namespace transformer_fast
