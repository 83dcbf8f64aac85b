// The end of an encoder block, behind its attention, in evaluation: the attention's output projection, the feed-forward
// network, and the norms and residual additions around them. For few rows, Python code between these kernels would take
// as long as they do. With int8 weights, a chunk of rows passes through all of them, so that what lies between two
// products stays in the cache.
#include "eager_call.h"
#include "kept_weight.h"
#include "linear.h"
#include "norm.h"
#include "prepacked_linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/sigmoid.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace transformer_fast::eager {
namespace {

constexpr int64_t kChunk = 96;  // rows: what lies between is in the second-level cache

// A linear layer: weight (out, in), bias (out,) or none, and the operand of layers/prepacked.py.
struct Product {
  Tensor weight;  // undefined beside an int8 one
  OptionalTensor bias;
  Tensor copy;  // a kept copy, an int8 weight, or undefined
  int64_t inputs = 0, outputs = 0;

  bool is_int8() const { return !weight.defined(); }

  // activation(x weight^T + bias), x (rows, in) -> (rows, out)
  Tensor operator()(const Tensor& x, std::string_view activation = "none") const {
    const bool fused = activation == "relu" || activation == "gelu" || activation == "gelu_tanh";
    if (is_int8() && fused) return quantized_linear(x, copy, bias, outputs, activation);
    Tensor out = is_int8()        ? quantized_linear(x, copy, bias, outputs, "none")
                 : copy.defined() ? kept_product(x, copy, bias, outputs)
                                  : linear_forward(x, weight, bias);
    if (activation == "relu") return out.relu_();
    if (activation == "gelu") return at::gelu_(out, "none");
    if (activation == "gelu_tanh") return at::gelu_(out, "tanh");
    if (activation == "quick_gelu") return out.mul_(at::sigmoid(out * 1.702));
    return out;
  }
};

struct Norm {
  OptionalTensor weight, bias;
  double eps = 0;
  NormKind kind = NormKind::kLayer;
};

// Writes norm(x + residual) to out, and x + residual to summed; all are (rows, d).
void norm_of_sum(const Norm& norm, const Tensor& x, const Tensor& residual, const Tensor& out, const Tensor& summed) {
  norm_to(out, summed, x, residual, norm.weight, norm.bias, norm.eps, norm.kind);
}

// A block after its attention.
struct Block {
  std::optional<Product> projection;  // none: attended is the sum's other part
  Norm norm_1, norm_2;
  Product first, second;
  std::string activation;
  bool norm_first;

  bool is_int8() const { return first.is_int8() && second.is_int8() && (!projection || projection->is_int8()); }

  // Writes to out; x and out are (rows, d), attended (rows, in of the projection).
  void run(const Tensor& x, const Tensor& attended, const Tensor& out) const {
    const Tensor added = projection ? (*projection)(attended) : attended;
    const Tensor summed = at::empty_like(x), normed = at::empty_like(x);
    norm_of_sum(norm_first ? norm_2 : norm_1, added, x, normed, summed);
    const Tensor inner = second(first(normed, activation));
    if (norm_first) {
      Tensor to = out;
      at::add_out(to, summed, inner);
    } else {
      norm_of_sum(norm_2, inner, normed, out, summed);
    }
  }
};

// Reads (weight, bias, operand); `rows` is the number of rows of the product.
Product read_product(Arguments& arguments, py::handle given, int64_t rows, at::ScalarType type) {
  const py::tuple parts = py::reinterpret_borrow<py::tuple>(given);
  const py::handle weight = parts[0], operand = parts[2];
  Product product;
  product.bias = arguments.optional_floating(parts[1]);
  if (THPVariable_Check(operand.ptr())) {  // int8; the layer's own weight may be freed
    const Tensor& own = THPVariable_Unpack(weight.ptr());
    product.copy = arguments.tensor(operand), product.inputs = own.size(1), product.outputs = own.size(0);
    arguments.require(type == at::kFloat && !needs_gradient(own, product.bias));
  } else {
    product.weight = arguments.floating(weight);
    arguments.require(arguments.ok() && product.weight.dim() == 2 && product.weight.scalar_type() == type);
    if (!arguments.ok()) return product;
    product.inputs = product.weight.size(1), product.outputs = product.weight.size(0);
    arguments.require(!product.weight.is_inference() && !needs_gradient(product.weight, product.bias));
    if (arguments.ok() && !operand.is_none()) product.copy = operand.cast<KeptWeight&>().copy_for(product.weight, rows);
  }
  if (product.bias)
    arguments.require(product.bias->dim() == 1 && product.bias->size(0) == product.outputs &&
                      product.bias->scalar_type() == type);
  return product;
}

// Reads (weight, bias, eps, kind) for d columns.
Norm read_norm(Arguments& arguments, py::handle given, int64_t d) {
  const py::tuple parts = py::reinterpret_borrow<py::tuple>(given);
  Norm norm{arguments.optional_floating(parts[0]), arguments.optional_floating(parts[1]), arguments.number(parts[2]),
            norm_kind(parts[3].cast<std::string>())};
  for (const OptionalTensor* t : {&norm.weight, &norm.bias})
    if (*t) arguments.require((*t)->dim() == 1 && (*t)->size(0) == d && !needs_gradient(*t));
  return norm;
}

// Linear layers on x (..., in), given as (weight, bias, operand) each -> a list, or None for a call that other ops must
// compute.
py::object evaluated_linears(py::handle x_, const py::tuple& given) {
  Arguments arguments;
  const Tensor x = arguments.floating(x_);
  if (!arguments.ok() || at::autocast::is_autocast_enabled(at::kCPU) || x.dim() < 2 || x.numel() == 0)
    return py::none();
  arguments.require(!needs_gradient(x));
  std::vector<Product> products;
  for (const py::handle one : given) {
    products.push_back(read_product(arguments, one, x.numel() / x.size(-1), x.scalar_type()));
    arguments.require(products.back().inputs == x.size(-1));
  }
  if (!arguments.ok()) return py::none();
  std::vector<Tensor> results;
  {
    const py::gil_scoped_release no_gil;
    const at::AutoDispatchBelowADInplaceOrView below;
    if (std::all_of(products.begin(), products.end(), [](const Product& product) { return product.is_int8(); })) {
      std::vector<QuantizedWeight> weights;
      for (const Product& product : products) weights.push_back({product.copy, product.bias, product.outputs});
      results = quantized_linears(x, weights);
    } else {
      for (const Product& product : products) results.push_back(product(x));
    }
  }
  py::list wrapped;
  for (const Tensor& result : results) wrapped.append(wrap(result));
  return std::move(wrapped);
}

// The arguments of layers/evaluated_block.py -> (..., d), or None for a call that other ops must compute.
py::object encoder_block_end(py::handle x_, py::handle attended_, py::handle projection_, py::handle norm_1_,
                             py::handle first_, const std::string& activation, py::handle second_, py::handle norm_2_,
                             bool norm_first) {
  Arguments arguments;
  const Tensor x = arguments.floating(x_), attended = arguments.floating(attended_);
  if (!arguments.ok() || at::autocast::is_autocast_enabled(at::kCPU) || x.dim() < 2 || x.numel() == 0)
    return py::none();
  const int64_t d = x.size(-1), rows = x.numel() / d;
  const at::ScalarType type = x.scalar_type();
  arguments.require(attended.dim() == x.dim() && attended.scalar_type() == type && !needs_gradient(x, attended));
  if (!arguments.ok() || attended.sizes().slice(0, x.dim() - 1) != x.sizes().slice(0, x.dim() - 1)) return py::none();
  Block block;
  block.activation = activation, block.norm_first = norm_first;
  if (!projection_.is_none()) block.projection = read_product(arguments, projection_, rows, type);
  if (!norm_first) block.norm_1 = read_norm(arguments, norm_1_, d);
  block.norm_2 = read_norm(arguments, norm_2_, d);
  block.first = read_product(arguments, first_, rows, type),
  block.second = read_product(arguments, second_, rows, type);
  const auto fits = [](const Product& product, int64_t in, int64_t out) {
    return product.inputs == in && product.outputs == out;
  };
  arguments.require(block.projection ? fits(*block.projection, attended.size(-1), d) : attended.size(-1) == d);
  arguments.require(fits(block.first, d, block.second.inputs) && block.second.outputs == d);
  if (!arguments.ok()) return py::none();
  return computed([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor out = at::empty(x.sizes(), x.options());
    const Tensor of_x = matrix_of(x).contiguous(), of_attended = matrix_of(attended).contiguous(), to = matrix_of(out);
    const int64_t chunk = block.is_int8() ? kChunk : rows, chunks = (rows + chunk - 1) / chunk;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t begin = i * rows / chunks, count = (i + 1) * rows / chunks - begin;
      const auto part = [&](const Tensor& t) { return t.narrow(0, begin, count); };
      block.run(part(of_x), part(of_attended), part(to));
    }
    return out;
  });
}

PYTHON_MODULE_FRAGMENT(m) {
  m.def("evaluated_linears", &evaluated_linears);
  m.def("encoder_block_end", &encoder_block_end);
}

}  // namespace
}  // namespace transformer_fast::eager
