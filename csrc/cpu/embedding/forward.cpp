// Embedding on the CPU: gather * scale + positional encoding + dropout in one pass over each row. The weight's gradient
// is in backward.cpp, the sinusoidal table in positional_table.cpp.
#include "embedding_params.h"

#include "../parallel.h"
#include "../simd/philox_dropout.h"
#include "../simd/prefault.h"
#include "../simd/vec.h"

#include <algorithm>
#include <atomic>

namespace transformer_fast {
namespace {

constexpr int64_t kCopied = 16384;  // elements of rows that are copied at a time

// Copies `count` elements, `stride` apart, side by side.
template <typename T>
void copy_columns(const T* from, int64_t stride, int64_t count, T* to) {
  for (int64_t c = 0; c < count; ++c) to[c] = from[c * stride];
}

// `count` columns of a row from `column` on; copied to `room` only where they are not neighbours (a transposed matrix).
template <typename T>
const T* columns_of(const StridedView<T>& matrix, int64_t row, int64_t column, int64_t count, T* room) {
  const T* first = matrix.data + row * matrix.row_stride + column * matrix.column_stride;
  if (matrix.column_stride == 1) return first;
  copy_columns(first, matrix.column_stride, count, room);
  return room;
}

// Copies at least kBytes bytes without a call: kBytes at a time; the last step overlaps the one before.
template <int64_t kBytes>
void copy_bytes(const char* from, char* to, int64_t bytes) {
  const auto copy_at = [=](int64_t place) { std::memcpy(to + place, from + place, kBytes); };
  for (int64_t place = 0; place < bytes - kBytes; place += kBytes) copy_at(place);
  copy_at(bytes - kBytes);
}

// Copies the rows source_row(begin) .. source_row(end - 1) side by side; a negative index is skipped.
template <typename T, typename SourceRow>
void gather(StridedView<T> source, SourceRow source_row, int64_t begin, int64_t end, int64_t d, T* to) {
  const int64_t bytes = d * static_cast<int64_t>(sizeof(T));
  const auto copy_rows = [=](auto copy_row) {
    T* place = to;
    for (int64_t r = begin; r < end; ++r, place += d) {
      const int64_t from = source_row(r);
      if (from >= 0) copy_row(source.data + from * source.row_stride, place);
    }
  };
  // Copies rows of at least one step's bytes; shorter rows are copied with half the step.
  const auto copy_rows_by = [=](auto bytes_at_once, const auto& copy_by_fewer) -> void {
    constexpr int64_t kBytes = bytes_at_once;
    if constexpr (kBytes > sizeof(T))
      if (bytes < kBytes) return copy_by_fewer(std::integral_constant<int64_t, kBytes / 2>(), copy_by_fewer);
    copy_rows([=](const T* row, T* place) {
      copy_bytes<kBytes>(reinterpret_cast<const char*>(row), reinterpret_cast<char*>(place), bytes);
    });
  };
  if (source.column_stride != 1)
    copy_rows([=](const T* row, T* place) { copy_columns(row, source.column_stride, d, place); });
  else
    copy_rows_by(std::integral_constant<int64_t, 64>(), copy_rows_by);
}

// Calls body(first row, last row, position of the first row) per sequence in the rows [begin, end).
template <typename Params, typename Body>
void for_sequences(const Params& call, int64_t begin, int64_t end, const Body& body) {
  for (int64_t first = begin, last; first < end; first = last) {
    const int64_t sequence = first / call.length;
    last = std::min(end, (sequence + 1) * call.length);
    body(first, last, (call.first_positions ? call.first_positions[sequence] : 0) + first % call.length);
  }
}

// y = dropout(x * scale + t) of some columns; without t, nothing is added, and without random bits, nothing is dropped.
template <typename T, typename Table, typename A = Accumulate<T>>
__attribute__((flatten)) void encode_columns(const T* x, A scale, const Table* t, const uint16_t* bits,
                                             const Dropout& dropout, T* y, int64_t count) {
  with_flags(t, bits, [&](auto add, auto drop) {
    for_columns<A>(0, count, [&, dropout = dropout](int64_t c, auto lanes, int) {
      Vector<A> v;
      if constexpr (add)
        v = fma(load(x + c, lanes), scale, load(t + c, lanes));
      else
        v = load(x + c, lanes) * scale;
      if constexpr (drop) v = dropout.template apply<A>(v, bits + c);
      store(y + c, v, lanes);
    });
  });
}

// A call whose table, if any, has elements of type Table. Rows whose id is outside the vocabulary are not written.
template <typename T, typename Table>
struct Encoding {
  using A = Accumulate<T>;
  const EncodeParams<T>& call;
  StridedView<Table> table;
  std::atomic<bool>* all_valid;  // true while all ids are in the vocabulary
  bool drop = call.dropout.p > 0;
  Dropout dropout{call.dropout};
  A scale = static_cast<A>(call.scale);
  int64_t d = call.d;
  T* out = call.out;

  void run() const {
    const bool copied = scale == 1 && !table && !drop;  // 16-bit rows need not pass through float
    parallel_for(0, call.rows, grain(d), [&](int64_t begin, int64_t end) {
      Pages pages(out + begin * d, out + end * d);
      if (copied)
        copy(begin, end, pages);
      else if (d <= kNarrow<A>)
        encode_narrow(begin, end, pages);
      else
        encode_wide(begin, end, pages);
    });
  }

 private:
  __attribute__((flatten)) void copy(int64_t begin, int64_t end, Pages& pages) const {
    const int64_t block = std::max<int64_t>(1, kCopied / d);
    for_blocks(out, d, begin, end, block, pages, [&](int64_t first, int64_t last) {
      gather(call.source, [this](int64_t r) { return source_row(r); }, first, last, d, out + first * d);
    });
  }

  // Source row; -1 for an id outside the vocabulary.
  int64_t source_row(int64_t r) const {
    if (!call.ids) return r;
    const int64_t id = call.ids[r];
    if (id >= 0 && id < call.vocabulary) return id;
    all_valid->store(false, std::memory_order_relaxed);
    return -1;
  }

  // Narrow rows of a few vectors are copied side by side and encoded as one row.
  __attribute__((flatten)) void encode_narrow(int64_t begin, int64_t end, Pages& pages) const {
    alignas(64) T source_room[kChunkColumns];
    alignas(64) Table table_room[kChunkColumns];
    RandomBits random(dropout, d, end);
    const bool in_place = !call.ids && call.source.row_stride == d && call.source.column_stride == 1;
    const bool table_in_place = table.row_stride == d && table.column_stride == 1;
    for_blocks(out, d, begin, end, kChunkColumns / d, pages, [&](int64_t first, int64_t last) {
      if (!in_place) gather(call.source, [this](int64_t r) { return source_row(r); }, first, last, d, source_room);
      const Table* encodings = table ? table_room : nullptr;
      if (table)
        for_sequences(call, first, last, [&](int64_t r, int64_t next, int64_t position) {
          if (table_in_place && next - r == last - first)
            encodings = table.data + position * d;
          else
            gather(table, [](int64_t p) { return p; }, position, position + next - r, d, table_room + (r - first) * d);
        });
      encode_columns<T, Table>(in_place ? call.source.data + first * d : source_room, scale, encodings,
                               drop ? random.side_by_side(first, last) : nullptr, dropout, out + first * d,
                               (last - first) * d);
    });
  }

  void encode_wide(int64_t begin, int64_t end, Pages& pages) const {
    alignas(64) T source_room[kChunkColumns];
    alignas(64) Table table_room[kChunkColumns];
    RandomBits random(dropout, d, end);
    for_sequences(call, begin, end, [&](int64_t first, int64_t last, int64_t position) {
      for (int64_t r = first; r < last; ++r, ++position) {
        const int64_t from = source_row(r);
        if (from < 0) continue;
        pages.prefault(out + (r + 1) * d);
        for (int64_t start = 0; start < d; start += kChunkColumns) {
          const int64_t count = std::min(kChunkColumns, d - start);
          const T* x = columns_of(call.source, from, start, count, source_room);
          const Table* t = table ? columns_of(table, position, start, count, table_room) : nullptr;
          const uint16_t* bits = drop ? random.of(r, start, count) : nullptr;
          encode_columns<T, Table>(x, scale, t, bits, dropout, out + r * d + start, count);
        }
      }
    });
  }
};

}  // namespace

template <typename T>
bool encode(const EncodeParams<T>& call) {
  std::atomic<bool> all_valid{true};
  if (call.narrow_table)
    Encoding<T, T>{call, call.narrow_table, &all_valid}.run();
  else
    Encoding<T, Accumulate<T>>{call, call.wide_table, &all_valid}.run();
  return all_valid;
}

TRANSFORMER_FAST_FOR_EACH_TYPE(bool, encode, EncodeParams)

}  // namespace transformer_fast
