// x weight^T + bias, on the CPU: no kernel of this package, but a choice between PyTorch's two libraries.
// transformer_fast/ops/linear.py documents the arguments.
//
// PyTorch multiplies float32 matrices with MKL. On processors that Intel did not make, MKL does not use AVX-512.
// oneDNN, which PyTorch uses for 16-bit types, does.
#include "linear.h"

#include "../cpu/kernels.h"
#include "op.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <string_view>

namespace transformer_fast {
namespace {

using eager::needs_gradient, eager::Needs;
using torch::autograd::variable_list;

using OnednnLinear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                            c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);

const std::optional<c10::TypedOperatorHandle<OnednnLinear>>& onednn_product() {
  static const auto product = onednn_op<OnednnLinear>("mkldnn::_linear_pointwise");
  return product;
}

// True if oneDNN uses AVX-512 on this processor and MKL does not.
bool mkl_is_limited() {
#if defined(__x86_64__)
  static const bool limited = [] {
    __builtin_cpu_init();
    return at::hasMKL() && onednn_product() && kernels().vector_bytes == 64 && !__builtin_cpu_is("intel");
  }();
  return limited;
#else
  return false;
#endif
}

// Argument of send_products_to_onednn.
std::atomic<std::optional<bool>> chosen;

// True if large float32 products go to oneDNN.
bool takes_onednn() {
  const std::optional<bool> choice = chosen.load(std::memory_order_relaxed);
  return choice ? *choice : mkl_is_limited();
}

// Measured on Zen 5 with one thread and two (benchmarks/bench_linear.py): below these many multiplications, the
// microseconds of oneDNN's call are more than it saves. The product for a weight's gradient first makes a transposed
// copy.
constexpr int64_t kLeastRows = 4, kLeastProduct = int64_t{1} << 22, kLeastTransposed = int64_t{1} << 23;

// The transpose of a contiguous matrix, contiguous. ATen transposes on one thread.
Tensor transposed(const Tensor& matrix) {
  constexpr int64_t kBlock = 16;
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  const Tensor result = at::cpu::empty({columns, rows}, matrix.options());
  const float* const from = matrix.const_data_ptr<float>();
  float* const to = result.mutable_data_ptr<float>();
  const auto copy = [&](int64_t first, int64_t last) {  // rows of the matrix, in blocks
    for (int64_t r = first * kBlock; r < std::min(last * kBlock, rows); r += kBlock)
      for (int64_t c = 0; c < columns; c += kBlock) {
        const int64_t end_c = std::min(c + kBlock, columns), end_r = std::min(r + kBlock, rows);
        for (int64_t column = c; column < end_c; ++column)
          for (int64_t row = r; row < end_r; ++row) to[column * rows + row] = from[row * columns + column];
      }
  };
  at::parallel_for(0, (rows + kBlock - 1) / kBlock, std::max<int64_t>(1, 32768 / (kBlock * columns)), copy);
  return result;
}

struct Linear {
  static constexpr const char* kName = "linear";
  static constexpr size_t kSaved = 2;  // input and weight, each if the other needs a gradient
  static constexpr size_t kValues = kSaved;
  static constexpr bool kDifferentiableBackward = true;

  struct Options {
    bool direct;  // recorded by the eager fast path, not in a graph that is compiled
  };

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    const Tensor &grad = grads[0], &x = saved[0], &weight = saved[1];
    const Tensor grad_rows = matrix_of(grad);
    variable_list gradients(3);
    const bool direct = eager::is_plain_eager(grads) && eager::is_plain_eager(saved);
    if (at::GradMode::is_enabled() || (options.direct && !direct)) {
      if (needs[0]) gradients[0] = grad.matmul(weight);
      if (needs[1]) gradients[1] = grad_rows.t().mm(matrix_of(x));
    } else {
      if (needs[0]) gradients[0] = below_autograd<"linear", linear_forward>(direct, grad, weight.t(), OptionalTensor());
      if (needs[1])
        gradients[1] = below_autograd<"linear_grad_weight", linear_grad_weight>(direct, grad_rows, matrix_of(x));
    }
    if (needs[2]) gradients[2] = grad_rows.sum(0);
    return gradients;
  }
};

void check_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  constexpr Checks check{"linear"};
  check("x", x).floating().rank_at_least(1, "(..., in)");
  check("weight", weight).type_of(x).on_device_of(x).rank(2, "(out, in)");
  check("weight", weight).sizes({weight.sym_size(0), x.sym_size(-1)});
  check("bias", bias).type_of(x).on_device_of(x).sizes({weight.sym_size(0)});
}

void check_grad_weight(const Tensor& grad, const Tensor& x) {
  constexpr Checks check{"linear_grad_weight"};
  check("grad", grad).floating().rank(2, "(rows, out)");
  check("x", x).type_of(grad).on_device_of(grad).rank(2, "(rows, in)");
  check("x", x).sizes({grad.sym_size(0), x.sym_size(1)});
}

Tensor forward_meta(const Tensor& x, const Tensor& weight, const OptionalTensor&) {
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = weight.sym_size(0);
  return meta_tensor(x, sizes);
}

Tensor grad_weight_meta(const Tensor& grad, const Tensor& x) {
  return meta_tensor(x, {grad.sym_size(1), x.sym_size(1)});
}

// `direct`: true if the libraries may be called without the dispatcher.
Tensor recorded(bool direct, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  if (direct && !onednn_is_faster(x, weight)) return at::linear(x, weight, bias);
  const Tensor out = below_autograd<"linear", linear_forward>(direct, x, weight, bias);
  if (needs_gradient(x, weight, bias))
    eager::record<Linear>({out},
                          {eager::requires_grad(weight) ? x : Tensor(), eager::requires_grad(x) ? weight : Tensor()},
                          {direct}, x, weight, bias);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  define_op<"linear", check_forward, linear_forward, forward_meta, recorded,
            eager::DoorOptions{.casts = eager::kAllOfIt}>(m, "(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  define_backward<"linear_grad_weight", check_grad_weight, linear_grad_weight, grad_weight_meta>(
      m, "(Tensor grad, Tensor x) -> Tensor");
}

Tensor onednn_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool relu) {
  const bool dense = weight.is_mkldnn() || weight.is_contiguous() || weight.t().is_contiguous();
  return onednn_product()->call(x, dense ? weight : weight.contiguous(),
                                bias ? OptionalTensor(bias->contiguous()) : bias, relu ? "relu" : "none",
                                c10::List<std::optional<at::Scalar>>(), "");
}

std::optional<bool> send_products_to_onednn(std::optional<bool> choice) {
  TORCH_CHECK(!choice.value_or(false) || onednn_product(), "expected a PyTorch that was built with oneDNN");
  return chosen.exchange(choice, std::memory_order_relaxed);
}

bool onednn_is_faster(int64_t rows, int64_t in, int64_t out) {
  return rows >= kLeastRows && rows * in * out >= kLeastProduct && takes_onednn() &&
         at::globalContext().userEnabledMkldnn();
}

bool onednn_is_faster(const Tensor& x, const Tensor& weight) {
  const int64_t in = weight.size(1), rows = in > 0 ? x.numel() / in : 0;
  return x.scalar_type() == at::kFloat && onednn_is_faster(rows, in, weight.size(0));
}

Tensor linear_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return onednn_is_faster(x, weight) ? onednn_linear(x, weight, bias) : at::linear(x, weight, bias);
}

// oneDNN needs grad or x transposed in memory, whichever is cheaper; with x, the result must be transposed too.
Tensor linear_grad_weight(const Tensor& grad, const Tensor& x) {
  const int64_t rows = x.size(0), in = x.size(1), out = grad.size(1);
  const bool large = grad.scalar_type() == at::kFloat && rows * in * out >= kLeastTransposed;
  if (!large || !onednn_is_faster(out, rows, in)) return grad.t().mm(x);
  const Tensor gradient = grad.contiguous(), input = x.contiguous();
  if (rows * out <= (rows + out) * in) return onednn_linear(transposed(gradient), input.t(), {});
  return transposed(onednn_linear(transposed(input), gradient.t(), {}));
}

}  // namespace transformer_fast
