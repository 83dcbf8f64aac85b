// Shared parts of the embedding's CPU and CUDA kernels: the sizes of a call, and the checks that keep an invalid call
// from reading out of bounds. transformer_fast/ops/embedding.py has the detailed messages for users.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace transformer_fast {

using OptionalTensor = std::optional<at::Tensor>;

// A (..., length, d) result as (count, d); row r is position r % length of sequence r / length.
struct Rows {
  int64_t count, length, d;

  Rows(at::IntArrayRef leading, int64_t columns) : count(1), length(leading.empty() ? 1 : leading.back()), d(columns) {
    for (const int64_t size : leading) count *= size;
  }

  bool empty() const { return count == 0 || d == 0; }
};

inline void check_ids(const at::Tensor& ids) {
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
                   "ids: expected int64 or int32, got ", ids.scalar_type());
  TORCH_CHECK_VALUE(ids.dim() >= 1, "ids: expected (..., length), got a scalar");
}

// First positions of sequences: `offset`, plus one number per sequence if `offsets` is given.
inline void check_table(const at::Tensor& x, const OptionalTensor& table, const Rows& rows, int64_t offset,
                        const OptionalTensor& offsets) {
  TORCH_CHECK_VALUE(!offsets || ((offsets->scalar_type() == at::kLong || offsets->scalar_type() == at::kInt) &&
                                 offsets->numel() * rows.length == rows.count && offsets->device() == x.device()),
                    "offsets: expected an int64 or int32 for each of ", rows.length > 0 ? rows.count / rows.length : 0,
                    " sequences, on ", x.device());
  if (!table) return;
  TORCH_CHECK_VALUE(table->dim() == 2 && table->size(1) == rows.d && offset >= 0 &&
                        table->size(0) >= offset + rows.length,
                    "table: expected at least (", offset + rows.length, ", ", rows.d, "), got ", table->sizes());
  TORCH_CHECK_VALUE(table->device() == x.device(), "table: expected on ", x.device(), ", got ", table->device());
  TORCH_CHECK_TYPE(table->scalar_type() == x.scalar_type() || table->scalar_type() == at::kFloat,
                   "table: expected float32 or ", x.scalar_type(), ", got ", table->scalar_type());
}

inline void check_dropout(const at::Tensor& x, double p, const OptionalTensor& seed) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "dropout_p: expected in [0, 1], got ", p);
  TORCH_CHECK_VALUE(
      p == 0 || (seed && seed->scalar_type() == at::kLong && seed->numel() == 1 && seed->device() == x.device()),
      "seed: expected one int64 on ", x.device(), " where dropout_p > 0");
}

inline Rows check_embed(const at::Tensor& ids, const at::Tensor& weight, const OptionalTensor& table, int64_t offset,
                        const OptionalTensor& offsets, double p, const OptionalTensor& seed) {
  check_ids(ids);
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: expected (vocabulary, d), got ", weight.sizes());
  TORCH_CHECK_VALUE(ids.device() == weight.device(), "ids: expected on ", weight.device(), ", got ", ids.device());
  const Rows rows(ids.sizes(), weight.size(1));
  check_table(weight, table, rows, offset, offsets);
  check_dropout(weight, p, seed);
  return rows;
}

inline Rows check_add_positional(const at::Tensor& x, const OptionalTensor& table, int64_t offset,
                                 const OptionalTensor& offsets, double p, const OptionalTensor& seed) {
  TORCH_CHECK_VALUE(x.dim() >= 2, "x: expected (..., length, d), got ", x.sizes());
  const Rows rows(x.sizes().slice(0, x.dim() - 1), x.size(-1));
  check_table(x, table, rows, offset, offsets);
  check_dropout(x, p, seed);
  return rows;
}

inline void check_backward(const at::Tensor& grad, const at::Tensor& ids, int64_t vocabulary, double p,
                           const OptionalTensor& seed) {
  check_ids(ids);
  TORCH_CHECK_VALUE(grad.dim() == ids.dim() + 1 && grad.sizes().slice(0, ids.dim()) == ids.sizes(),
                    "grad_out: expected ", ids.sizes(), " and one more dimension, got ", grad.sizes());
  TORCH_CHECK_VALUE(ids.device() == grad.device(), "ids: expected on ", grad.device(), ", got ", ids.device());
  TORCH_CHECK_VALUE(vocabulary >= 0, "num_embeddings: expected >= 0, got ", vocabulary);
  check_dropout(grad, p, seed);
}

inline void check_positional_table(const at::Tensor& table) {
  TORCH_CHECK_VALUE(table.dim() == 2 && table.scalar_type() == at::kFloat && table.is_contiguous(),
                    "table: expected contiguous float32 (length, d_model)");
}

}  // namespace transformer_fast
