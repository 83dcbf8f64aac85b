// The weights of attention: the op of torch.ops.transformer_fast, from schema to kernel.
#include "attention_arguments.h"
#include "attention_op_checks.h"
#include "python_hooks.h"

#include <torch/library.h>

#include <algorithm>
#include <string>

namespace transformer_fast::attention_op {
namespace {

using eager::needs_gradient, eager::Needs;
using torch::autograd::variable_list;

// On a GPU by PyTorch's own operators: a request for the weights is rare.
Tensor weights(const AttentionParams& params, const Tensor& q, const Tensor& k) {
  if (!is_dense(q) || !is_dense(k)) return weights(params, q.contiguous(), k.contiguous());
  const AttentionParams read = readable(params, q, k);
  return params.by_triton ? python_hooks().weights_by_torch(q, k, read) : attention_weights(q, k, read);
}

void check_weights(const AttentionParams& params, const Tensor& q, const Tensor& k) {
  constexpr Checks check{"attention_weights"};
  check.require(!params.is_packed(), "cu_seqlens_q must be None");
  check_arguments(check, params, q, k, std::nullopt);
}

Tensor weights_meta(const AttentionParams&, const Tensor& q, const Tensor& k) {
  return meta_tensor(q, {q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)});
}

// A loss on the weights is rare. The reference computes the gradients of the weights.
struct AttentionWeights {
  static constexpr const char* kName = "attention_weights";
  enum : size_t { kQ, kK, kParams, kSaved = kParams + AttentionParams::kTensors };  // what is saved
  static constexpr size_t kValues = kParams;
  using Options = AttentionParams;

  static variable_list backward(const variable_list& grads, const variable_list& saved, const AttentionParams& options,
                                const Needs& needs) {
    const std::array needed = {needs[0], needs[1], needs[2], needs[3], needs[4]};
    const auto gradients =
        python_hooks().weights_gradients(grads[0], saved[kQ], saved[kK], options.with(&saved[kParams]), needed);
    return {gradients.begin(), gradients.end()};
  }
};

Tensor weights_autograd(const AttentionParams& params, const Tensor& q, const Tensor& k) {
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = dispatch<"attention_weights", weights>(params, q, k);
  }
  if (!needs_gradient(q, k, params.bias, params.distance_bias, params.sinks)) return result;
  eager::OpNode<AttentionWeights>::Saved saved = {q, k};
  const auto tensors = params.tensors();
  std::copy(tensors.begin(), tensors.end(), &saved[AttentionWeights::kParams]);
  eager::record<AttentionWeights>({result}, saved, params.without_tensors(), q, k, params.bias, params.distance_bias,
                                  params.sinks);
  return result;
}

template <c10::DeviceType device>
Tensor weights_autocast(const AttentionParams& params, const Tensor& q, const Tensor& k) {
  const NoAutocast<device> no_autocast;
  return dispatch<"attention_weights", weights>(params, autocast<device>(q), autocast<device>(k));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  define<Flat<check_weights>::call, Flat<weights>::call, Flat<weights_meta>::call, Flat<weights_autograd>::call>(
      m, "attention_weights(Tensor q, Tensor k, " + kArguments + " -> Tensor");
}
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCPU, m) {
  m.impl("attention_weights", Flat<weights_autocast<at::kCPU>>::call);
}
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCUDA, m) {
  m.impl("attention_weights", Flat<weights_autocast<at::kCUDA>>::call);
}

}  // namespace transformer_fast::attention_op
