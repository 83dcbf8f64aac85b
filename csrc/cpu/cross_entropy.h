// Parameters of the cross-entropy kernel on the CPU (cross_entropy.cpp). T is the type of the elements.
#pragma once

#include "element.h"

namespace transformer_fast {

template <typename T>
struct CrossEntropyParams {
  T* logits;               // (rows, vocabulary), contiguous; becomes the gradient of the losses' sum where `gradient`
  const int64_t* targets;  // (rows), each in the vocabulary
  Accumulate<T>* losses;   // (rows)
  int64_t rows, vocabulary;
  Accumulate<T> smoothing;
  bool gradient;
};

}  // namespace transformer_fast
