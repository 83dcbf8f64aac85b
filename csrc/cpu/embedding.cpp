// Embedding on the CPU: gather * scale + positional encoding + dropout in one pass over each row. The weight's gradient
// is in embedding_backward.cpp, the sinusoidal table in positional_table.cpp.
#include "embedding_common.h"
#include "pages.h"
#include "vec.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <atomic>
#include <optional>

namespace transformer_fast {
namespace {

constexpr int64_t kCopied = 16384;  // elements of rows that are copied at a time

// `count` elements, `stride` apart, side by side.
template <typename T>
void copy_columns(const T* from, int64_t stride, int64_t count, T* to) {
  for (const auto c : c10::irange(count)) to[c] = from[c * stride];
}

// Where the rows of a matrix start, and how far apart its rows and columns are.
template <typename T>
struct Matrix {
  const T* data = nullptr;
  int64_t row_stride = 0, column_stride = 1;

  Matrix() = default;
  explicit Matrix(const at::Tensor& m, int64_t first_row = 0)
      : data(m.const_data_ptr<T>() + first_row * m.stride(0)), row_stride(m.stride(0)), column_stride(m.stride(1)) {}

  explicit operator bool() const {
    return data != nullptr;
  }

  // `count` columns from `column` on; copied to `room` only where the columns are not neighbours (a transposed matrix).
  const T* columns(int64_t row, int64_t column, int64_t count, T* room) const {
    const T* first = data + row * row_stride + column * column_stride;
    if (column_stride == 1) return first;
    copy_columns(first, column_stride, count, room);
    return room;
  }
};

// A copy of at least kBytes bytes without a call: kBytes at a time, the last ones over some of those before.
template <int64_t kBytes>
void copy_bytes(const char* from, char* to, int64_t bytes) {
  const auto copy_at = [=](int64_t place) { std::memcpy(to + place, from + place, kBytes); };
  for (int64_t place = 0; place < bytes - kBytes; place += kBytes) copy_at(place);
  copy_at(bytes - kBytes);
}

// The rows source_row(begin) .. source_row(end - 1) side by side; a negative one leaves its place as it was.
template <typename T, typename SourceRow>
void gather(Matrix<T> source, SourceRow source_row, int64_t begin, int64_t end, int64_t d, T* to) {
  const int64_t bytes = d * static_cast<int64_t>(sizeof(T));
  const auto copy_rows = [=](auto copy_row) {
    T* place = to;
    for (int64_t r = begin; r < end; ++r, place += d) {
      const int64_t from = source_row(r);
      if (from >= 0) copy_row(source.data + from * source.row_stride, place);
    }
  };
  const auto copy_rows_by = [=](auto bytes_at_once) {
    copy_rows([=](const T* row, T* place) {
      copy_bytes<bytes_at_once>(reinterpret_cast<const char*>(row), reinterpret_cast<char*>(place), bytes);
    });
  };
  if (source.column_stride != 1)
    copy_rows([=](const T* row, T* place) { copy_columns(row, source.column_stride, d, place); });
  else if (bytes >= 64)
    copy_rows_by(std::integral_constant<int64_t, 64>());
  else if (bytes >= 32)
    copy_rows_by(std::integral_constant<int64_t, 32>());
  else if (bytes >= 16)
    copy_rows_by(std::integral_constant<int64_t, 16>());
  else if (bytes >= 8)
    copy_rows_by(std::integral_constant<int64_t, 8>());
  else if (bytes >= 4)
    copy_rows_by(std::integral_constant<int64_t, 4>());
  else
    copy_rows_by(std::integral_constant<int64_t, sizeof(T)>());
}

// The positions of rows one after another: those of sequence s count up from first_position(s).
template <typename FirstPosition>
class Positions {
 public:
  Positions(int64_t row, int64_t length, const FirstPosition& first_position)
      : length_(length), sequence_(row / length), place_(row % length), first_position_(first_position) {
    first_ = first_position(sequence_);
  }

  // The first of as many positions that follow each other as the sequence has, at most `count`, which it sets.
  int64_t next(int64_t& count) {
    if (place_ == length_) place_ = 0, first_ = first_position_(++sequence_);
    count = std::min(count, length_ - place_);
    place_ += count;
    return first_ + place_ - count;
  }

  int64_t next() {
    int64_t one = 1;
    return next(one);
  }

 private:
  const int64_t length_;
  int64_t sequence_, place_, first_;
  const FirstPosition& first_position_;
};

// y = dropout(x * scale + t) of some columns; without t, nothing is added, and without draws, nothing is dropped.
template <typename T, typename Table, typename A = Accumulate<T>>
__attribute__((flatten)) void encode_columns(
    const T* x, A scale, const Table* t, const uint16_t* draws, const Dropout& dropout, T* y, int64_t count) {
  with_flags(t, draws, [&](auto add, auto drop) {
    for_columns<A>(0, count, [&, dropout = dropout](int64_t c, auto lanes, int) {
      Vector<A> v;
      if constexpr (add)  // one expression, which the compiler rounds once: in whole vectors and at the end of a row
        v = load(x + c, lanes) * scale + load(t + c, lanes);
      else
        v = load(x + c, lanes) * scale;
      if constexpr (drop) v = dropout.template apply<A>(v, draws + c);
      store(y + c, v, lanes);
    });
  });
}

// out[r] = dropout(source[source_row(r)] * scale + table[position of r]); where source_row is negative, nothing. There
// may be no table.
template <typename T, typename Table, typename SourceRow, typename FirstPosition>
struct Encoding {
  using A = Accumulate<T>;
  T* out;
  Rows rows;
  Matrix<T> source;
  const SourceRow& source_row;
  A scale;
  Matrix<Table> table;
  const FirstPosition& first_position;
  bool drop;
  Dropout dropout;

  void run() const {
    const bool copied = scale == 1 && !table && !drop;  // 16-bit rows need not pass through float
    at::parallel_for(0, rows.count, grain(rows.d), [&](int64_t begin, int64_t end) {
      Pages pages(out + begin * rows.d, out + end * rows.d);
      if (copied)
        copy(begin, end, pages);
      else if (rows.d <= kNarrow<A>)
        encode_narrow(begin, end, pages);
      else
        encode_wide(begin, end, pages);
    });
  }

 private:
  __attribute__((flatten)) void copy(int64_t begin, int64_t end, Pages& pages) const {
    const int64_t block = std::max<int64_t>(1, kCopied / rows.d);
    for_blocks(out, rows.d, begin, end, block, pages, [&](int64_t first, int64_t last) {
      gather(source, source_row, first, last, rows.d, out + first * rows.d);
    });
  }

  // Rows of less than a few vectors are brought side by side, and encoded as one.
  __attribute__((flatten)) void encode_narrow(int64_t begin, int64_t end, Pages& pages) const {
    alignas(64) T source_room[kDrawColumns];
    alignas(64) Table table_room[kDrawColumns];
    RowDraws draws(dropout, rows.d, end);
    Positions positions(begin, rows.length, first_position);
    for_blocks(out, rows.d, begin, end, kDrawColumns / rows.d, pages, [&](int64_t first, int64_t last) {
      gather(source, source_row, first, last, rows.d, source_room);
      for (int64_t r = first, count; table && r < last; r += count) {
        count = last - r;
        const int64_t position = positions.next(count);
        gather(table, [](int64_t p) { return p; }, position, position + count, rows.d,
               table_room + (r - first) * rows.d);
      }
      encode_columns<T, Table>(
          source_room, scale, table ? table_room : nullptr, drop ? draws.side_by_side(first, last) : nullptr, dropout,
          out + first * rows.d, (last - first) * rows.d);
    });
  }

  void encode_wide(int64_t begin, int64_t end, Pages& pages) const {
    alignas(64) T source_room[kDrawColumns];
    alignas(64) Table table_room[kDrawColumns];
    const int64_t d = rows.d;
    RowDraws row_draws(dropout, d, end);
    Positions positions(begin, rows.length, first_position);
    for (const auto r : c10::irange(begin, end)) {
      const int64_t position = positions.next(), from = source_row(r);
      if (from < 0) continue;
      pages.reach(out + (r + 1) * d);
      for (int64_t start = 0; start < d; start += kDrawColumns) {
        const int64_t count = std::min(kDrawColumns, d - start);
        const T* x = source.columns(from, start, count, source_room);
        const Table* t = table ? table.columns(position, start, count, table_room) : nullptr;
        const uint16_t* draws = drop ? row_draws.of(r, start, count) : nullptr;
        encode_columns<T, Table>(x, scale, t, draws, dropout, out + r * d + start, count);
      }
    }
  }
};

// The encoding of `out`, for whichever type the table has: the accumulation type, or the type of the source.
template <typename T, typename SourceRow>
void encode(
    at::Tensor& out, const Rows& rows, const Matrix<T>& source, const SourceRow& source_row, double scale,
    const OptionalTensor& table, int64_t offset, const Ids* offsets, double p, const OptionalTensor& seed) {
  using A = Accumulate<T>;
  T* const y = out.mutable_data_ptr<T>();
  const Dropout dropout = dropout_of(p, seed);
  const at::Tensor added = !table ? at::Tensor() : std::is_same_v<T, double> ? table->to(at::kDouble) : *table;
  const auto encode_by = [&](const auto& first_position) {
    const auto run = [&](auto table_type) {
      using Table = decltype(table_type);
      const Matrix<Table> matrix = table ? Matrix<Table>(added, offset) : Matrix<Table>();
      Encoding<T, Table, SourceRow, std::decay_t<decltype(first_position)>>{
          y, rows, source, source_row, static_cast<A>(scale), matrix, first_position, p > 0, dropout}
          .run();
    };
    table && added.scalar_type() == out.scalar_type() ? run(T{}) : run(A{});
  };
  if (offsets && table)
    encode_by([&](int64_t sequence) { return (*offsets)[sequence]; });
  else
    encode_by([](int64_t) { return 0; });
}

// Each sequence must find its positions in the table.
void check_offsets(const Ids* offsets, const OptionalTensor& table, const Rows& rows, int64_t offset) {
  if (!offsets || !table) return;
  for (const auto i : c10::irange(rows.count / rows.length)) {
    const int64_t first = offset + (*offsets)[i];
    TORCH_CHECK_INDEX(
        first >= 0 && first + rows.length <= table->size(0), "offset ", (*offsets)[i], " of sequence ", i,
        ": positions ", first, " to ", first + rows.length - 1, " are not all in the table of ", table->size(0));
  }
}

// Integers as Ids, and the tensor that holds them.
struct Offsets {
  at::Tensor dense;
  std::optional<Ids> values;

  explicit Offsets(const OptionalTensor& offsets) : dense(offsets ? offsets->contiguous() : at::Tensor()) {
    if (offsets) values.emplace(dense, 0);
  }

  const Ids* get() const {
    return values ? &*values : nullptr;
  }
};

at::Tensor embed(
    const at::Tensor& ids, const at::Tensor& weight, const OptionalTensor& table, double scale, int64_t offset,
    const OptionalTensor& offsets, double p, const OptionalTensor& seed) {
  const Rows rows = check_embed(ids, weight, table, offset, offsets, p, seed);
  auto shape = ids.sizes().vec();
  shape.push_back(rows.d);
  at::Tensor out = at::cpu::empty(shape, weight.options());
  if (rows.empty()) return out;

  const Offsets starts(offsets);
  check_offsets(starts.get(), table, rows, offset);
  const at::Tensor dense = ids.contiguous();
  const Ids id(dense, weight.size(0));
  std::atomic<int64_t> first_invalid{rows.count};
  const auto source_row = [id, &first_invalid](int64_t r) -> int64_t {
    if (id.valid(id[r])) return id[r];
    int64_t seen = first_invalid.load(std::memory_order_relaxed);
    while (r < seen && !first_invalid.compare_exchange_weak(seen, r)) {
    }
    return -1;
  };
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, weight.scalar_type(), "embed", [&] {
    encode<scalar_t>(out, rows, Matrix<scalar_t>(weight), source_row, scale, table, offset, starts.get(), p, seed);
  });
  if (first_invalid < rows.count) id.raise(first_invalid);
  return out;
}

// x + the table, again and again: nothing tells one row of a sequence from the next. Both are contiguous.
at::Tensor add_repeated(const at::Tensor& x, const at::Tensor& table) {
  if (x.element_size() >= 4) return at::cpu::add(x, table);
  const at::Tensor out = at::cpu::empty(x.sizes(), x.options());
  AT_DISPATCH_REDUCED_FLOATING_TYPES(x.scalar_type(), "add_positional", [&] {
    const auto add = [&](const auto* t) {
      const scalar_t* const from = x.const_data_ptr<scalar_t>();
      scalar_t* const to = out.mutable_data_ptr<scalar_t>();
      const int64_t repeated = table.numel();
      at::parallel_for(0, x.numel(), kCopied, [&](int64_t begin, int64_t end) __attribute__((flatten)) {
        Pages pages(to + begin, to + end);
        int64_t place = begin % repeated;
        for (int64_t i = begin, count; i < end; i += count) {
          count = std::min(std::min(end - i, repeated - place), kCopied);
          pages.reach(to + i + count);
          for_columns<float>(0, count, [&](int64_t c, auto lanes, int) {
            store(to + i + c, load(from + i + c, lanes) + load(t + place + c, lanes), lanes);
          });
          place = place + count == repeated ? 0 : place + count;
        }
      });
    };
    table.scalar_type() == x.scalar_type() ? add(table.const_data_ptr<scalar_t>()) : add(table.const_data_ptr<float>());
  });
  return out;
}

at::Tensor add_positional(
    const at::Tensor& x, const OptionalTensor& table, int64_t offset, const OptionalTensor& offsets, double p,
    const OptionalTensor& seed) {
  const Rows rows = check_add_positional(x, table, offset, offsets, p, seed);
  if (rows.empty()) return at::cpu::empty(x.sizes(), x.options());
  if (x.is_contiguous() && table && table->is_contiguous() && !offsets && p == 0)
    return add_repeated(x, table->narrow(0, offset, rows.length));

  at::Tensor out = at::cpu::empty(x.sizes(), x.options());
  const Offsets starts(offsets);
  check_offsets(starts.get(), table, rows, offset);
  const at::Tensor source = x.reshape({rows.count, rows.d});
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "add_positional", [&] {
    const auto same_row = [](int64_t r) { return r; };
    encode<scalar_t>(out, rows, Matrix<scalar_t>(source), same_row, 1.0, table, offset, starts.get(), p, seed);
  });
  return out;
}

}  // namespace
}  // namespace transformer_fast

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "embed(Tensor ids, Tensor weight, Tensor? table, float scale, int offset, Tensor? offsets, "
      "float dropout_p, Tensor? seed) -> Tensor");
  m.def(
      "embed_backward(Tensor grad_out, Tensor ids, int num_embeddings, float scale, int? padding_idx, float dropout_p, "
      "Tensor? seed, bool deterministic) -> Tensor");
  m.def(
      "add_positional(Tensor x, Tensor? table, int offset, Tensor? offsets, float dropout_p, Tensor? seed) -> Tensor");
  m.def("fill_positional_table(Tensor(a!) table) -> ()");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("embed", TORCH_FN(transformer_fast::embed));
  m.impl("add_positional", TORCH_FN(transformer_fast::add_positional));
}
