// Attention by the Triton kernels of transformer_fast/triton: by the launches of an earlier equal call, or by the
// launchers in Python. Arguments and results are those of attention.h. All functions take the GIL.
#pragma once

#include "../ops/attention.h"

#include <pybind11/pybind11.h>

namespace transformer_fast {

// Conversion to transformer_fast.attention_params.AttentionParams. The GIL must be held.
pybind11::object python_params(const AttentionParams& params);

AttentionResult launch_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params,
                                 bool training);
// The gradients of q, of k and v, and of the biases, as needed.
AttentionGradients launch_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                             const AttentionParams& params, GradientNeeds needs);

}  // namespace transformer_fast
