// Shared parts of the norms' forward and backward on the CPU.
#pragma once

#include "norm_params.h"

#include "../buffer.h"
#include "../parallel.h"
#include "../simd/philox_dropout.h"
#include "../simd/prefault.h"
#include "../simd/vec.h"

namespace transformer_fast {
namespace {

template <typename T>
inline Pages pages_of(RowView<T> result, int64_t begin, int64_t end) {
  return result ? Pages(result.row(begin), result.row(end)) : Pages();
}

// Parameters converted to the type of the arithmetic; the conversion is cheap compared with the rows of a call.
template <typename T>
class WideParameters {
  using A = Accumulate<T>;

 public:
  // Valid until the thread's next call.
  WideParameters(const Parameter<T>& weight, const Parameter<T>& bias, int64_t d) {
    static thread_local GrowingBuffer<A> buffer;
    A* const room = weight.narrow || bias.narrow ? buffer.reserve(2 * d) : nullptr;
    this->weight = widened(weight, d, room);
    this->bias = widened(bias, d, room ? room + d : nullptr);
  }

  const A *weight, *bias;

 private:
  static const A* widened(const Parameter<T>& parameter, int64_t d, A* room) {
    if (!parameter.narrow) return parameter.wide;
    for_columns<A>(0, d,
                   [&](int64_t c, auto count, int) { store(room + c, load(parameter.narrow + c, count), count); });
    return room;
  }
};

}  // namespace
}  // namespace transformer_fast
