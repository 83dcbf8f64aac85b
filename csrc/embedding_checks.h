// Shared parts of the embedding's CPU and CUDA kernels: the sizes of a call, and the checks that keep an invalid call
// from reading out of bounds. transformer_fast/ops/embedding.py has the detailed messages for users.
#pragma once

#include "ops/checks.h"

#include <ATen/core/Tensor.h>

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

inline void check_padding(const Checks& check, std::optional<int64_t> padding_idx, const c10::SymInt& vocabulary) {
  check.require(!padding_idx || (*padding_idx >= 0 && holds(vocabulary.sym_gt(*padding_idx))),
                "padding_idx must lie in [0, ", vocabulary, "), got ", padding_idx.value_or(0));
}

inline void check_ids(const Checks& check, const at::Tensor& ids, const at::Tensor& beside) {
  check("ids", ids).integer().on_device_of(beside).rank_at_least(1, "(..., length)");
}

// First positions of sequences: `offset`, plus one number per sequence if `offsets` is given. x is (..., length, d).
inline void check_table(const Checks& check, const at::Tensor& x, c10::SymIntArrayRef leading, const c10::SymInt& d,
                        const OptionalTensor& table, const c10::SymInt& offset, const OptionalTensor& offsets) {
  check("offsets", offsets).integer().on_device_of(x).sizes(leading.slice(0, leading.size() - 1));
  check.require(holds(offset.sym_ge(0)), "offset must be at least 0, got ", offset);
  if (!table) return;
  check("table", table).type({x.scalar_type(), at::kFloat}).on_device_of(x).rank(2, "(positions, d)");
  check("table", table).sizes({table->sym_size(0), d});
  check("table", table)
      .require(holds((table->sym_size(0) - leading.back()).sym_ge(offset)), "of at least ", offset, " + ",
               leading.back(), " positions");
}

inline void check_embed(const at::Tensor& ids, const at::Tensor& weight, const OptionalTensor& table, double,
                        const c10::SymInt& offset, const OptionalTensor& offsets, std::optional<int64_t> padding_idx,
                        double p, const OptionalTensor& seed, bool) {
  constexpr Checks check{"embed"};
  check("weight", weight).floating().rank(2, "(vocabulary, d)");
  check_ids(check, ids, weight);
  check_padding(check, padding_idx, weight.sym_size(0));
  check_table(check, weight, ids.sym_sizes(), weight.sym_size(1), table, offset, offsets);
  check.dropout(weight, p, seed);
}

inline void check_add_positional(const at::Tensor& x, const OptionalTensor& table, const c10::SymInt& offset,
                                 const OptionalTensor& offsets, double p, const OptionalTensor& seed) {
  constexpr Checks check{"add_positional"};
  check("x", x).floating().rank_at_least(2, "(..., length, d)");
  check_table(check, x, x.sym_sizes().slice(0, x.dim() - 1), x.sym_size(-1), table, offset, offsets);
  check.dropout(x, p, seed);
}

inline void check_embed_backward(const at::Tensor& grad_out, const at::Tensor& ids, const c10::SymInt& vocabulary,
                                 double, std::optional<int64_t> padding_idx, double p, const OptionalTensor& seed,
                                 bool) {
  constexpr Checks check{"embed_backward"};
  check("grad_out", grad_out).floating().rank_at_least(2, "(..., length, d)");
  check_ids(check, ids, grad_out);
  check("ids", ids).sizes(grad_out.sym_sizes().slice(0, grad_out.dim() - 1));
  check_padding(check, padding_idx, vocabulary);
  check.require(holds(vocabulary.sym_ge(0)), "num_embeddings must be at least 0, got ", vocabulary);
  check.dropout(grad_out, p, seed);
}

inline void check_positional_table(const at::Tensor& table) {
  constexpr Checks check{"fill_positional_table"};
  check("table", table).type({at::kFloat}).rank(2, "(length, d_model)");
  check("table", table).require(table.is_contiguous(), "contiguous");
}

}  // namespace transformer_fast
