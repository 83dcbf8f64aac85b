// y = [residual +] dropout([relu] (x [+ bias])) and its backward, elementwise over the (rows, last dimension) view.
// The forward stores no mask: the backward draws it again from the seed, or takes it from the output of the ReLU.

#include "dropout.h"

#include "buffer.h"
#include "parallel.h"
#include "partials.h"
#include "simd/philox_dropout.h"
#include "simd/prefault.h"
#include "simd/vec.h"

#include <algorithm>

namespace transformer_fast {
namespace {

// Narrow rows handled as one. The first column of such rows is 0, and values per column are repeated per row.
template <typename A>
int64_t rows_as_one(int64_t d) {
  return d <= kNarrow<A> ? kChunkColumns / d : 1;
}

// Calls body(first column, first element, elements, random bits) for chunks of at most kChunkColumns elements, of one
// row or of several narrow rows. body writes these elements of the result `to`. Without dropout the bits are null.
template <typename T, typename Body>
void for_chunks(int64_t rows, int64_t d, T* to, bool drop, const Dropout& dropout, Body&& body) {
  const int64_t block = rows_as_one<Accumulate<T>>(d);
  if (block > 1) {
    parallel_for(0, rows, grain(d), [&](int64_t begin, int64_t end) __attribute__((flatten)) {
      Pages pages(to + begin * d, to + end * d);
      RandomBits random(dropout, d, end);
      for_blocks(to, d, begin, end, block, pages, [&](int64_t first, int64_t last) {
        body(0, first * d, (last - first) * d, drop ? random.side_by_side(first, last) : nullptr);
      });
    });
    return;
  }
  const int64_t chunks = (d + kChunkColumns - 1) / kChunkColumns;
  const auto of_wide = [&](int64_t begin, int64_t end) __attribute__((flatten)) {
    int64_t row = begin / chunks, column = begin % chunks * kChunkColumns;
    Pages pages(to + row * d + column, to + end / chunks * d + end % chunks * kChunkColumns);
    RandomBits random(dropout, d, rows);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t element = row * d + column, elements = std::min(kChunkColumns, d - column);
      pages.prefault(to + element + elements);
      body(column, element, elements, drop ? random.of(row, column, elements) : nullptr);
      column += kChunkColumns;
      if (column >= d) ++row, column = 0;
    }
  };
  parallel_for(0, rows * chunks, grain(std::min(d, kChunkColumns)), of_wide);
}

// A bias for for_chunks(): in the type of the arithmetic, repeated for narrow rows.
template <typename T>
class ChunkBias {
  using A = Accumulate<T>;

 public:
  // Valid until the thread's next call.
  ChunkBias(const Parameter<T>& bias, int64_t rows, int64_t d) : data(bias.wide) {
    const int64_t repeats = std::min(rows, rows_as_one<A>(d));
    if (!bias || (bias.wide && repeats == 1)) return;
    static thread_local GrowingBuffer<A> buffer;
    A* to = buffer.reserve(repeats * d);
    data = to;
    for (int64_t c = 0; c < d; ++c) to[c] = bias.wide ? bias.wide[c] : static_cast<A>(bias.narrow[c]);
    for (int64_t r = 1; r < repeats; ++r) std::copy_n(to, d, to + r * d);
  }

  const A* data;
};

}  // namespace

template <typename T>
void dropout_forward(const DropoutForwardParams<T>& p) {
  using A = Accumulate<T>;
  const Dropout dropout(p.dropout);
  const ChunkBias<T> bias(p.bias, p.rows, p.d);
  const A* const offsets = bias.data;
  const T *const from = p.x, *const add = p.residual;
  T* const to = p.out;
  const bool relu = p.relu;
  for_chunks(p.rows, p.d, to, p.dropout.p > 0, dropout,
             [&](int64_t column, int64_t first, int64_t elements, const uint16_t* bits) {
               for_columns<A>(0, elements, [&](int64_t c, auto count, int) {
                 auto v = load(from + first + c, count);
                 if (offsets) v += load(offsets + column + c, count);
                 if (relu) v = v < 0 ? Vector<A>{} : v;  // a NaN passes, as in torch.relu
                 if (bits) v = dropout.apply<A>(v, bits + c);
                 if (add) v += load(add + first + c, count);
                 store(to + first + c, v, count);
               });
             });
}

namespace {

// Computes the gradient of some elements, and passes each vector to sum(first element, vector, count).
template <typename T, typename Sum>
void chunk_gradient(const T* from, const T* positive, T* to, int64_t elements, const Dropout& dropout,
                    const uint16_t* bits, const Sum& sum) {
  using A = Accumulate<T>;
  for_columns<A>(0, elements, [&](int64_t c, auto count, int) {
    auto v = load(from + c, count);
    if (positive)
      v = load(positive + c, count) > 0 ? v * static_cast<A>(dropout.rate.scale) : Vector<A>{};
    else
      v = dropout.apply<A>(v, bits + c);
    store(to + c, v, count);
    sum(c, v, count);
  });
}

}  // namespace

template <typename T>
void dropout_backward(const DropoutBackwardParams<T>& p) {
  using A = Accumulate<T>;
  const int64_t rows = p.rows, d = p.d;
  const Dropout dropout(p.dropout);
  const T *const from = p.grad_out, *const positive = p.positive;
  T* const to = p.grad_x;
  const auto gradient_of = [&](int64_t first, int64_t elements, const uint16_t* bits, const auto& sum) {
    chunk_gradient(from + first, positive ? positive + first : nullptr, to + first, elements, dropout, bits, sum);
  };
  if (!p.grad_bias)
    return for_chunks(rows, d, to, !positive, dropout,
                      [&](int64_t, int64_t first, int64_t elements, const uint16_t* bits) {
                        gradient_of(first, elements, bits, [](int64_t, auto, auto) {});
                      });
  const int64_t per_chunk = chunk_rows(rows, d), chunks = (rows + per_chunk - 1) / per_chunk;
  const int64_t block = std::min(per_chunk, rows_as_one<A>(d));
  const Buffer<A> partials(chunks * block * d);
  A* const sums = partials.data();
  parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) __attribute__((flatten)) {
    const int64_t last_row = std::min(rows, end * per_chunk);
    RandomBits random(dropout, d, last_row);
    Pages pages(to + begin * per_chunk * d, to + last_row * d);
    for (int64_t k = begin; k < end; ++k) {
      A* own = sums + k * block * d;
      std::fill_n(own, block * d, A(0));
      const int64_t own_end = std::min(rows, (k + 1) * per_chunk);
      for_blocks(to, d, k * per_chunk, own_end, block, pages, [&](int64_t first, int64_t last) {
        const int64_t columns = (last - first) * d;
        for (int64_t column = 0; column < columns; column += kChunkColumns) {
          const int64_t elements = std::min(kChunkColumns, columns - column);
          const uint16_t* const bits = positive    ? nullptr
                                       : block > 1 ? random.side_by_side(first, last)
                                                   : random.of(first, column, elements);
          gradient_of(first * d + column, elements, bits, [own = own + column](int64_t c, auto v, auto count) {
            store(own + c, load(own + c, count) + v, count);
          });
        }
      });
    }
  });
  sum_partials(sums, chunks * block, d, p.grad_bias);
}

TRANSFORMER_FAST_FOR_EACH_TYPE(void, dropout_forward, DropoutForwardParams)
TRANSFORMER_FAST_FOR_EACH_TYPE(void, dropout_backward, DropoutBackwardParams)

}  // namespace transformer_fast
