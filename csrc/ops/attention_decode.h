// A call of attention to a cache.
#pragma once

#include "tensors.h"

#include <cstdint>
#include <optional>

namespace transformer_fast {

// Few new queries q (B, H, Lq, D) against a cache (B, Hkv, S, D), or with a page table, int32 (B, pages of a sequence),
// against one of pages (pages, page_size, Hkv, D).
struct DecodeParams {
  Tensor q, k, v, lengths;  // int32 (B,)
  OptionalTensor page_table;
  OptionalSymInt causal, window;  // query i sees keys i + lengths[b] - Lq + window .. causal
  double scale;
  OptionalTensor distance_bias = {};            // (B | 1, H | 1, Lq + S - 1): entry S - 1 + j - (i + lengths[b] - Lq)
  OptionalTensor query_ids = {}, key_ids = {};  // int32 (B | 1, Lq) and (B | 1, S)
  OptionalTensor sinks = {};                    // fp32 or fp64 (H,)
  std::optional<double> softcap = {};

  int64_t capacity() const { return page_table ? page_table->size(1) * k.size(1) : k.size(2); }
  // Dimensions (pages, heads, ...): caches with and without pages are indexed alike.
  Tensor heads_first(const Tensor& cache) const { return page_table ? cache.transpose(1, 2) : cache; }
};

}  // namespace transformer_fast
