// Rows of a generation cache that change places: what a beam copies when one hypothesis is continued twice.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace transformer_fast {
namespace {

// cache (layers, rows, 2, heads, capacity, d), contiguous: the first `length` positions of row sources[i] become those
// of row targets[i], in every layer. No row is both a source and a target, so the order does not matter.
void copy_cache_rows(at::Tensor cache, at::IntArrayRef sources, at::IntArrayRef targets, int64_t length) {
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def("copy_cache_rows(Tensor(a!) cache, int[] sources, int[] targets, int length) -> ()");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) { m.impl("copy_cache_rows", copy_cache_rows); }

}  // namespace transformer_fast
