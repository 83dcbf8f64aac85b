// Linear layers of one input, such as query, key and value, in one call in evaluation.
#include "../ops/eager_call.h"
#include "../ops/linear.h"
#include "kept_weight.h"
#include "prepacked_linear.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace transformer_fast::eager {
namespace {

// A linear layer: weight (out, in), bias (out,) or none, and the operand of inference/prepacked.py.
struct Product {
  Tensor weight;  // undefined beside an int8 one
  OptionalTensor bias;
  Tensor copy;  // a kept copy, an int8 weight, or undefined
  int64_t inputs = 0, outputs = 0;

  bool is_int8() const { return !weight.defined(); }

  // x weight^T + bias, x (rows, in) -> (rows, out)
  Tensor operator()(const Tensor& x) const {
    if (is_int8()) return quantized_linear(x, copy, bias, outputs, "none");
    return copy.defined() ? kept_product(x, copy, bias, outputs) : linear_forward(x, weight, bias);
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

PYTHON_MODULE_FRAGMENT(m) { m.def("evaluated_linears", &evaluated_linears); }

}  // namespace
}  // namespace transformer_fast::eager
