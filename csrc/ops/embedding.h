// embed, add_positional and the positional table on the CPU, with the arguments of their schemas in embedding.cpp.
#pragma once

#include "tensors.h"

#include <optional>

namespace transformer_fast::embedding_op {

Tensor embed(const Tensor& ids, const Tensor& weight, const OptionalTensor& table, double scale, c10::SymInt first,
             const OptionalTensor& offsets, std::optional<int64_t> padding_idx, double p, const OptionalTensor& seed,
             bool deterministic);
Tensor embed_backward(const Tensor& grad_out, const Tensor& ids, c10::SymInt num_embeddings, double scale,
                      std::optional<int64_t> padding_idx, double p, const OptionalTensor& seed, bool deterministic);
Tensor add_positional(const Tensor& x, const OptionalTensor& table, c10::SymInt first, const OptionalTensor& offsets,
                      double p, const OptionalTensor& seed);
void fill_positional_table(const Tensor& table);

}  // namespace transformer_fast::embedding_op
