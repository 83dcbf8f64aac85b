// Parameters of the embedding kernels on the CPU (forward.cpp, backward.cpp, positional_table.cpp).
#pragma once

#include "../element.h"

namespace transformer_fast {

// Contiguous integers of either width.
struct Integers {
  const int64_t* wide = nullptr;
  const int32_t* narrow = nullptr;

  explicit operator bool() const { return wide || narrow; }
  int64_t operator[](int64_t i) const { return wide ? wide[i] : narrow[i]; }
};

// A matrix with any strides, or nothing.
template <typename T>
struct StridedView {
  const T* data = nullptr;
  int64_t row_stride = 0, column_stride = 1;

  explicit operator bool() const { return data != nullptr; }
};

// out[r] = dropout(source[row of r] * scale + table[position of r]). A row whose id is outside the vocabulary is not
// written, and encode() then returns false.
template <typename T>
struct EncodeParams {
  T* out;                   // (rows, d), contiguous
  int64_t rows, length, d;  // row r is position r % length of sequence r / length
  StridedView<T> source;
  Integers ids;        // source row per row; without ids, row r itself
  int64_t vocabulary;  // number of rows of the source, with ids
  double scale;
  // May be absent; in the type of the elements or in that of the arithmetic, from the first position on.
  StridedView<T> narrow_table;
  StridedView<Accumulate<T>> wide_table;
  Integers first_positions;  // per sequence; 0 without
  DropoutParams dropout;
};

// For an id outside the vocabulary embed_backward() returns false and writes nothing.
template <typename T>
struct EmbedBackwardParams {
  const T* grad;  // (rows, d), contiguous
  Integers ids;
  T* grad_weight;  // (vocabulary, d)
  int64_t rows, d, vocabulary;
  int64_t padding_idx;  // or -1
  double scale;
  DropoutParams dropout;
};

}  // namespace transformer_fast
