// Attention by launchers of Triton kernels, which are functions in Python.
#pragma once

#include "call.h"
#include "node.h"

#include <array>
#include <cstdint>

namespace transformer_fast::direct {

// Where the sequences of a packed batch lie.
struct Sequences {
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // None: the batch is not packed
  int64_t max_q, max_k;
};

constexpr size_t kMaskTensors = 7;
using MaskTensors = std::array<Tensor, kMaskTensors>;

// What is masked, scaled and dropped: the normal form that the kernels take. A launcher also takes the seed as a
// number.
struct Mask {
  OptionalTensor keep, key_keep, lengths, bias, seed;
  std::optional<int64_t> causal, seed_value;
  double scale, dropout_p;
  bool zero_empty_rows;
  Sequences packed;

  // The same without tensors, which autograd saves apart, where a change in place is noticed.
  Mask options() const {
    return {{},
            {},
            {},
            {},
            {},
            causal,
            seed_value,
            scale,
            dropout_p,
            zero_empty_rows,
            {{}, {}, packed.max_q, packed.max_k}};
  }
  // The tensors, undefined where there is none, and a mask with them again.
  MaskTensors tensors() const;
  Mask with(const Tensor* saved) const;
};

// The output; in training with the logsumexp after it; and the gradients of q, k and v (a bias has none here), for which
// `found` is what that gave.
struct ByLaunchers {
  static constexpr size_t kFound = 2;
  using Found = std::array<Tensor, kFound>;

  static Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    return forward_training(q, k, v, m)[0];
  }
  static Found forward_training(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask);
  static variable_list backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor* found, const Mask& mask, bool needs_bias);
};

}  // namespace transformer_fast::direct
