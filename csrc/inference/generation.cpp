// Functions of decoding besides the ops, on the CPU: conversion of tensors to kernel arguments.
#include "../cpu/kernels.h"
#include "../ops/operator.h"
#include "../ops/tensors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

namespace transformer_fast {
namespace {

// Raises unless all numbers lie in [0, count).
void check_below(const Checks& check, const char* name, at::IntArrayRef numbers, int64_t count) {
  for (const int64_t number : numbers)
    check.require(number >= 0 && number < count, name, " must lie in [0, ", count, "), got ", number);
}

void check_copy(const Tensor& cache, at::IntArrayRef sources, at::IntArrayRef targets, int64_t length) {
  constexpr Checks check{"copy_cache_rows"};
  check("cache", cache).rank(6, "(layers, rows, 2, heads, capacity, d)").require(cache.is_contiguous(), "contiguous");
  check.require(sources.size() == targets.size(), "sources and targets must have one length, got ", sources.size(),
                " and ", targets.size());
  check_below(check, "sources", sources, cache.size(1));
  check_below(check, "targets", targets, cache.size(1));
  std::vector<bool> written(cache.size(1));
  for (const int64_t target : targets) {
    check.require(!written[target], "targets must differ, got ", target, " twice");
    written[target] = true;
  }
  for (const int64_t source : sources) check.require(!written[source], "sources must not be targets too, got ", source);
  check.require(length >= 0 && length <= cache.size(4), "length must lie in [0, ", cache.size(4), "], got ", length);
}

void check_tokens(const Tensor& logits, int64_t k, at::IntArrayRef suppressed, bool) {
  constexpr Checks check{"choose_tokens"};
  check("logits", logits).type({at::kFloat}).rank(2, "(rows, vocabulary)");
  check("logits", logits).require(logits.size(1) > 0, "of one column or more");
  check.require(k >= 1 && k <= logits.size(1), "k must lie in [1, ", logits.size(1), "], got ", k);
  check_below(check, "suppressed", suppressed, logits.size(1));
  check.require(std::is_sorted(suppressed.begin(), suppressed.end()), "suppressed must rise, got ", suppressed);
}

void check_continuations(const Tensor& total, const Tensor& token, const Tensor& unit, const Tensor& slot,
                         int64_t units, int64_t width, int64_t candidates) {
  constexpr Checks check{"choose_continuations"};
  check("total", total).type({at::kFloat}).rank(2, "(rows, k)");
  check("token", token).type({at::kLong}).sizes(total.sym_sizes());
  constexpr int64_t kMost = 1 << 20;
  for (const auto& [name, number] :
       {std::pair("units", units), std::pair("width", width), std::pair("candidates", candidates)})
    check.require(number >= 0 && number <= kMost, name, " must lie in [0, ", kMost, "], got ", number);
  for (const auto& [name, numbers, count] : {std::tuple("unit", unit, units), std::tuple("slot", slot, width)}) {
    check(name, numbers).type({at::kLong}).sizes({total.sym_size(0)});
    const Tensor dense = numbers.contiguous();
    check_below(check, name, {dense.const_data_ptr<int64_t>(), static_cast<size_t>(dense.numel())}, count);
  }
}

// Copies the first `length` positions of row sources[i] to row targets[i] in every layer of a contiguous cache (layers,
// rows, 2, heads, capacity, d). No row is both a source and a target, so the order does not matter.
void copy_cache_rows(Tensor cache, at::IntArrayRef sources, at::IntArrayRef targets, int64_t length) {
  const int64_t position = cache.size(5) * cache.element_size();
  const int64_t head = cache.size(4) * position, heads = cache.size(2) * cache.size(3), row = heads * head;
  const int64_t moves = static_cast<int64_t>(sources.size()), bytes = length * position;
  if (bytes == 0 || moves == 0) return;
  char* data = static_cast<char*>(cache.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, 65536 / bytes);
  at::parallel_for(0, cache.size(0) * moves * heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t layer = task / (moves * heads), move = task / heads % moves, h = task % heads;
      char* rows = data + layer * cache.size(1) * row + h * head;
      std::memcpy(rows + targets[move] * row, rows + sources[move] * row, bytes);
    }
  });
}

// Per row of logits (rows, vocabulary): logits and numbers of the k best tokens that are not suppressed, best first;
// and the normalizer. See TokenChoice.
std::tuple<Tensor, Tensor, Tensor> choose_tokens(const Tensor& logits, int64_t k, at::IntArrayRef suppressed,
                                                 bool renormalize) {
  const Tensor given = logits.contiguous();
  const int64_t rows = given.size(0), columns = given.size(1);
  const Tensor best = at::empty({rows, k}, given.options()), normalizer = at::empty({rows}, given.options());
  const Tensor token = at::empty({rows, k}, given.options().dtype(at::kLong));
  kernels().generation.choose_tokens({given.const_data_ptr<float>(), rows, columns, k, suppressed.data(),
                                      static_cast<int64_t>(suppressed.size()), renormalize,
                                      best.mutable_data_ptr<float>(), token.mutable_data_ptr<int64_t>(),
                                      normalizer.mutable_data_ptr<float>()});
  return {best, token, normalizer};
}

// The best continuations per unit of a beam, (units, candidates) each; see BeamChoice.
std::tuple<Tensor, Tensor, Tensor> choose_continuations(const Tensor& total, const Tensor& token, const Tensor& unit,
                                                        const Tensor& slot, int64_t units, int64_t width,
                                                        int64_t candidates) {
  const Tensor totals = total.contiguous(), tokens = token.contiguous();
  const Tensor of_unit = unit.contiguous(), at_slot = slot.contiguous();
  const Tensor best = at::empty({units, candidates}, total.options());
  const Tensor parent = at::empty({units, candidates}, token.options());
  const Tensor chosen = at::empty({units, candidates}, token.options());
  kernels().generation.choose_continuations(
      {totals.const_data_ptr<float>(), tokens.const_data_ptr<int64_t>(), of_unit.const_data_ptr<int64_t>(),
       at_slot.const_data_ptr<int64_t>(), tokens.size(0), tokens.size(1), units, width, candidates,
       best.mutable_data_ptr<float>(), parent.mutable_data_ptr<int64_t>(), chosen.mutable_data_ptr<int64_t>()});
  return {best, parent, chosen};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def("copy_cache_rows(Tensor(a!) cache, int[] sources, int[] targets, int length) -> ()");
  m.def(
      "choose_tokens(Tensor logits, int k, int[] suppressed, bool renormalize) -> (Tensor best, Tensor token, Tensor "
      "normalizer)");
  m.def(
      "choose_continuations(Tensor total, Tensor token, Tensor unit, Tensor slot, int units, int width, int "
      "candidates) -> (Tensor best, Tensor parent, Tensor chosen)");
}

TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("copy_cache_rows", Checked<check_copy, copy_cache_rows>::call);
  m.impl("choose_tokens", Checked<check_tokens, choose_tokens>::call);
  m.impl("choose_continuations", Checked<check_continuations, choose_continuations>::call);
}

}  // namespace transformer_fast
