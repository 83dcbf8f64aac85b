// Kernels of decoding besides the ops (topk.cpp), for float, on contiguous memory.
#pragma once

#include <cstdint>

namespace transformer_fast {

// Per row of logits (rows, columns): the k largest without the suppressed columns (ascending), and their columns, each
// (rows, k); and the normalizer log(sum(exp(row))) of all columns, or with `renormalize` of those that are not
// suppressed. The normalizer is NaN if the row has NaN or +inf.
struct TokenChoice {
  const float* logits;
  int64_t rows, columns, k;
  const int64_t* suppressed;
  int64_t suppressed_count;
  bool renormalize;
  float* best;
  int64_t* token;
  float* normalizer;
};

// The best continuations per unit of a beam search, which is the beam of a sentence. Inputs are the continuations of its
// rows, (rows, k) each: `total` is the cumulative log-probability. Outputs are (units, candidates) each, best first: the
// total, the row that is continued, and the token. Missing continuations at the end are -inf, with row 0 and token 0.
struct BeamChoice {
  const float* total;
  const int64_t* token;
  const int64_t *unit, *slot;  // (rows,), below `units` and `width`
  int64_t rows, k, units, width, candidates;
  float* best;
  int64_t *parent, *chosen;
};

struct GenerationKernels {
  void (*choose_tokens)(const TokenChoice& params);
  void (*choose_continuations)(const BeamChoice& params);
};

}  // namespace transformer_fast
