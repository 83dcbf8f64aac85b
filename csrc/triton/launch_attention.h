// Attention by the Triton kernels of transformer_fast/triton: by the launches of an earlier equal call, or by the
// launchers in Python. Arguments and results are those of attention.h. All functions are the Python module's, and take
// the GIL; the ops call them by python_hooks.h.
#pragma once

#include "../ops/attention.h"
#include "../ops/attention_decode.h"

#include <array>
#include <optional>
#include <tuple>

namespace transformer_fast {

// `dropout_words`: how many int32 keep bits of dropout for a backward; none: as dropout_words() says.
AttentionResult launch_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params,
                                 std::optional<int64_t> dropout_words);
// Number of int32 that the forward keeps for the dropout of a call with gradients; 0 if it keeps none. Sizes may be
// symbolic.
c10::SymInt dropout_words(const Tensor& q, const Tensor& k, AttentionParams params);
// The gradients of q, of k and v, and of the biases, as needed.
AttentionGradients launch_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                             const AttentionParams& params, GradientNeeds needs);

// (out, logsumexp) of attention to a cache.
std::tuple<Tensor, Tensor> launch_decode(const DecodeParams& params);

// The weights on a GPU, by PyTorch's own operators, and their gradients on any device, by the reference: of q, k, bias,
// distance bias and sinks.
Tensor weights_by_torch(const Tensor& q, const Tensor& k, const AttentionParams& params);
std::array<Tensor, 5> weights_gradients(const Tensor& grad_weights, const Tensor& q, const Tensor& k,
                                        const AttentionParams& params, const std::array<bool, 5>& needed);

}  // namespace transformer_fast
