// An op's autograd rule as a node of PyTorch's graph, built as PyTorch's own ops do. torch::autograd::Function would
// add some microseconds per call, as much as a kernel on a small tensor.
#pragma once

#include "operator.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace transformer_fast::eager {

using torch::autograd::variable_list;

// A new node. Older PyTorch (2.11) counts references to nodes in std::shared_ptr, newer (2.13) in the nodes themselves.
template <typename Node, typename... Args>
auto make_node(Args&&... args) {
  using Pointer = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<Node>(new Node(std::forward<Args>(args)...), [](Node* node) { deleteNode(node); });
  else
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
}

// Required input gradients, in the order of the inputs.
class Needs {
 public:
  explicit Needs(torch::autograd::Node& node) : node_(node) {}
  bool operator[](size_t input) const { return node_.task_should_compute_output(input); }

 private:
  torch::autograd::Node& node_;
};

// Marks gradients as not differentiable: a second derivative raises. A gradient that is one of `grads` itself stays
// differentiable. `edges` are those of tensors that the gradients depend on beside `grads` and `saved`.
inline void refuse_second_derivative(const std::string& op, const variable_list& gradients, const variable_list& grads,
                                     const variable_list& saved, torch::autograd::edge_list edges = {}) {
  for (const variable_list* tensors : {&grads, &saved})
    for (const at::Tensor& tensor : *tensors)
      if (tensor.defined() && tensor.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  if (edges.empty()) return;
  const auto error =
      make_node<torch::autograd::Error>(op + " cannot be differentiated again: the fused kernels have no "
                                             "second derivative. Run the forward under "
                                             "transformer_fast.backend(\"reference\") to differentiate twice.",
                                        std::move(edges));
  for (const at::Tensor& gradient : gradients) {
    const auto same = [&](const at::Tensor& grad) { return grad.is_same(gradient); };
    if (gradient.defined() && !gradient.requires_grad() && std::none_of(grads.begin(), grads.end(), same))
      torch::autograd::set_history(gradient, error);
  }
}

inline void append(variable_list& tensors, const at::Tensor& tensor) { tensors.push_back(tensor); }
inline void append(variable_list& tensors, const std::optional<at::Tensor>& tensor) {
  if (tensor) tensors.push_back(*tensor);
}
template <typename... Tensors>
void append(variable_list& tensors, const std::tuple<Tensors...>& several) {
  std::apply([&](const Tensors&... tensor) { (append(tensors, tensor), ...); }, several);
}
template <typename Other>
void append(variable_list&, const Other&) {}

// The autograd rule of a backward op that is called directly: its results are not differentiable.
template <Name name, auto implementation>
struct Undifferentiable;
template <Name name, typename Result, typename... Args, Result (*implementation)(Args...)>
struct Undifferentiable<name, implementation> {
  static Result call(Args... args) {
    const Result results = below_autograd<name, implementation>(/*direct=*/false, args...);
    if (!at::GradMode::is_enabled()) return results;
    variable_list inputs, gradients;
    (append(inputs, args), ...);
    append(gradients, results);
    refuse_second_derivative(std::string("transformer_fast::") + name.text, gradients, {}, inputs);
    return results;
  }
};

// True if an op declares that its backward uses only differentiable ops.
template <typename Op>
concept DifferentiableBackward = requires { Op::kDifferentiableBackward; };

// True if an op declares that it saves nothing that has the history of its inputs.
template <typename Op>
concept SavesCopies = requires { Op::kSavesCopies; };

// The number of saved tensors that are values of the computation; they come first. The others are masks and indices.
template <typename Op>
constexpr size_t saved_values() {
  if constexpr (requires { Op::kValues; }) return Op::kValues;
  return 0;
}

// A tensor that autograd can save. An inference tensor is copied, because autograd refuses it; broadcast dimensions are
// not expanded.
inline at::Tensor savable(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_inference()) return tensor;
  at::Tensor small = tensor;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.sym_stride(dim) == 0 && tensor.sym_size(dim) > 1) small = small.narrow(dim, 0, 1);
  return small.clone().expand_symint(tensor.sym_sizes());
}

// Op defines kName, Options, kSaved (number of saved tensors: the last value of an enum of their places) and
//   variable_list backward(const variable_list& grads, const variable_list& saved, const Options&, const Needs&)
// with a gradient, or an undefined tensor, for each of its inputs. At least one of grads is defined there.
template <typename Op>
class OpNode final : public torch::autograd::Node {
 public:
  using Saved = std::array<at::Tensor, Op::kSaved>;

  OpNode(torch::autograd::edge_list&& edges, typename Op::Options options)
      : Node(std::move(edges)), options_(std::move(options)) {}

  // Outputs among the tensors must have this node as their history already.
  void save(const Saved& tensors, const variable_list& outputs) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto same = [&](const at::Tensor& output) { return output.is_same(tensors[i]); };
      const bool is_output = tensors[i].defined() && std::any_of(outputs.begin(), outputs.end(), same);
      // As in PyTorch's own ops, a value from inference mode cannot be saved: SavedVariable raises.
      const bool value = i < saved_values<Op>();
      saved_[i] = torch::autograd::SavedVariable(value ? tensors[i] : savable(tensors[i]), is_output);
    }
  }

  std::string name() const override { return std::string("transformer_fast::") + Op::kName + "_backward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& tensor : saved_) tensor.reset_data();
  }

 protected:
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto defined = [](const at::Tensor& grad) { return grad.defined(); };
    if (std::none_of(grads.begin(), grads.end(), defined)) return variable_list(num_outputs());
    variable_list saved;
    saved.reserve(saved_.size());
    for (const auto& tensor : saved_) saved.push_back(tensor.unpack(getptr()));
    variable_list gradients;
    {
      std::optional<at::NoGradGuard> no_grad;
      if constexpr (!DifferentiableBackward<Op>) no_grad.emplace();
      gradients = Op::backward(grads, saved, options_, Needs(*this));
    }
    if (at::GradMode::is_enabled()) {
      torch::autograd::edge_list edges;
      if constexpr (SavesCopies<Op>)
        std::copy_if(next_edges().begin(), next_edges().end(), std::back_inserter(edges),
                     [](const torch::autograd::Edge& edge) { return edge.is_valid(); });
      refuse_second_derivative(name(), gradients, grads, saved, std::move(edges));
    }
    return gradients;
  }

 private:
  std::array<torch::autograd::SavedVariable, Op::kSaved> saved_;
  typename Op::Options options_;
};

// Records that Op computed `outputs` from `inputs`, tensors or optional ones.
template <typename Op, typename... Inputs>
void record(const variable_list& outputs, const typename OpNode<Op>::Saved& saved, typename Op::Options options,
            const Inputs&... inputs) {
  auto node = make_node<OpNode<Op>>(torch::autograd::collect_next_edges(inputs...), std::move(options));
  torch::autograd::set_history(outputs, node);
  node->save(saved, outputs);
}

}  // namespace transformer_fast::eager
