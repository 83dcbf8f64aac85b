// Attention with its autograd node.
#pragma once

#include "attention.h"

namespace transformer_fast::attention_op {

// `direct`: whether the kernels may be called without the dispatcher; `outputs`: how many of (out, logsumexp) the caller
// gets.
AttentionResult recorded(bool direct, size_t outputs, const AttentionParams& params, const Tensor& q, const Tensor& k,
                         const Tensor& v);

}  // namespace transformer_fast::attention_op
