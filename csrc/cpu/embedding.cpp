// Embedding on the CPU: gather * scale + positional encoding + dropout in one pass over each row, and the sinusoidal
// table. The weight's gradient is in embedding_backward.cpp.
#include "embedding_common.h"
#include "pages.h"
#include "vec.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <vector>

namespace transformer_fast {
namespace {

// Where the rows of a matrix start, and how far apart its columns are.
template <typename T>
struct Matrix {
  const T* data;
  int64_t row_stride, column_stride;

  explicit Matrix(const at::Tensor& m)
      : data(m.const_data_ptr<T>()), row_stride(m.stride(0)), column_stride(m.stride(1)) {}

  // `count` columns from `column` on; copied to `room` only where the columns are not neighbours (a transposed matrix).
  const T* columns(int64_t row, int64_t column, int64_t count, T* room) const {
    const T* first = data + row * row_stride + column * column_stride;
    if (column_stride == 1) return first;
    for (const auto c : c10::irange(count)) room[c] = first[c * column_stride];
    return room;
  }
};

// y = dropout(x * scale + t) of some columns; without t, nothing is added, and without draws, nothing is dropped.
template <typename T, typename Table, typename A = Accumulate<T>>
__attribute__((flatten)) void encode_columns(
    const T* x, A scale, const Table* t, const uint16_t* draws, const Dropout& dropout, T* y, int64_t count) {
  for_columns<A>(0, count, [&, dropout = dropout](int64_t c, auto lanes, int) {
    Vector<A> v = load(x + c, lanes) * scale;
    if (t) v += load(t + c, lanes);
    if (draws) v = dropout.template apply<A>(v, draws + c);
    store(y + c, v, lanes);
  });
}

// out[r] = dropout(source[source_row(r)] * scale + table[position of r]); where source_row is negative, nothing. The
// positions of sequence s count up from first_position(s).
template <typename T, typename Table, typename SourceRow, typename FirstPosition>
void encode(
    T* out, const Rows& rows, const Matrix<T>& source, const SourceRow& source_row, double scale,
    const Matrix<Table>* table, const FirstPosition& first_position, double p, const Dropout& dropout) {
  const int64_t d = rows.d, length = rows.length;
  const bool drop = p > 0, copied = scale == 1 && !table && !drop;  // 16-bit rows need not pass through float
  at::parallel_for(0, rows.count, grain(d), [=, &source_row, &first_position, &dropout](int64_t begin, int64_t end) {
    alignas(64) T source_room[kDrawColumns];
    alignas(64) Table table_room[kDrawColumns];
    RowDraws row_draws(dropout, d, end);
    Pages pages(out + begin * d, out + end * d);
    int64_t sequence = begin / length, place = begin % length, first = first_position(sequence);
    for (const auto r : c10::irange(begin, end)) {
      if (place == length) place = 0, first = first_position(++sequence);
      const int64_t position = first + place++;
      pages.reach(out + r * d);
      const int64_t from = source_row(r);
      if (from < 0) continue;
      for (int64_t start = 0; start < d; start += kDrawColumns) {
        const int64_t count = std::min(kDrawColumns, d - start);
        const T* x = source.columns(from, start, count, source_room);
        T* y = out + r * d + start;
        if (copied) {
          std::copy_n(x, count, y);
        } else {
          const Table* t = table ? table->columns(position, start, count, table_room) : nullptr;
          const uint16_t* draws = drop ? row_draws.of(r, start, count) : nullptr;
          encode_columns<T, Table>(x, static_cast<Accumulate<T>>(scale), t, draws, dropout, y, count);
        }
      }
    }
  });
}

// encode() for whichever type the table has: the accumulation type, or the type of the source.
template <typename T, typename SourceRow>
void encode_with(
    at::Tensor& out, const Rows& rows, const at::Tensor& source, const SourceRow& source_row, double scale,
    const OptionalTensor& table, int64_t offset, const Ids* offsets, double p, const OptionalTensor& seed) {
  using A = Accumulate<T>;
  const Matrix<T> from(source);
  const Dropout dropout = dropout_of(p, seed);
  T* y = out.mutable_data_ptr<T>();
  const auto encode_by = [&](const auto& first_position) {
    if (!table) {
      encode<T, A>(y, rows, from, source_row, scale, static_cast<Matrix<A>*>(nullptr), first_position, p, dropout);
    } else if (std::is_same_v<T, A> || table->scalar_type() != source.scalar_type()) {
      const at::Tensor used = (offsets ? table->slice(0, offset) : table->narrow(0, offset, rows.length))
                                  .to(c10::CppTypeToScalarType<A>::value);
      const Matrix<A> matrix(used);
      encode<T>(y, rows, from, source_row, scale, &matrix, first_position, p, dropout);
    } else {
      const at::Tensor used = table->slice(0, offset);
      const Matrix<T> matrix(used);
      encode<T>(y, rows, from, source_row, scale, &matrix, first_position, p, dropout);
    }
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
  at::Tensor out = at::empty(shape, weight.options());
  if (rows.empty()) return out;

  const Offsets starts(offsets);
  check_offsets(starts.get(), table, rows, offset);
  const at::Tensor dense = ids.contiguous();
  const Ids id(dense, weight.size(0));
  std::atomic<int64_t> first_invalid{rows.count};
  const auto source_row = [&](int64_t r) -> int64_t {
    if (id.valid(id[r])) return id[r];
    int64_t seen = first_invalid.load(std::memory_order_relaxed);
    while (r < seen && !first_invalid.compare_exchange_weak(seen, r)) {
    }
    return -1;
  };
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, weight.scalar_type(), "embed", [&] {
    encode_with<scalar_t>(out, rows, weight, source_row, scale, table, offset, starts.get(), p, seed);
  });
  if (first_invalid < rows.count) id.raise(first_invalid);
  return out;
}

at::Tensor add_positional(
    const at::Tensor& x, const OptionalTensor& table, int64_t offset, const OptionalTensor& offsets, double p,
    const OptionalTensor& seed) {
  const Rows rows = check_add_positional(x, table, offset, offsets, p, seed);
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (rows.empty()) return out;

  const Offsets starts(offsets);
  check_offsets(starts.get(), table, rows, offset);
  const at::Tensor source = x.reshape({rows.count, rows.d});
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "add_positional", [&] {
    const auto same_row = [](int64_t r) { return r; };
    encode_with<scalar_t>(out, rows, source, same_row, 1.0, table, offset, starts.get(), p, seed);
  });
  return out;
}

// table[r] = the encoding of position r. Sines and cosines are taken only of every kStep-th position and of the
// steps 0 .. kStep - 1; the rest follow by the addition theorem in fp64, whose error (a few 1e-16) vanishes in fp32.
void fill_positional_table(const at::Tensor& table) {
  check_positional_table(table);
  constexpr int64_t kStep = 32;
  const int64_t length = table.size(0), d = table.size(1), pairs = (d + 1) / 2;
  float* out = table.mutable_data_ptr<float>();
  if (table.numel() == 0) return;

  std::vector<double> frequency(pairs), step_sin(kStep * pairs), step_cos(kStep * pairs);
  for (const auto i : c10::irange(pairs))
    frequency[i] = std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(d));
  for (const auto s : c10::irange(std::min(kStep, length)))
    for (const auto i : c10::irange(pairs)) {
      step_sin[s * pairs + i] = std::sin(static_cast<double>(s) * frequency[i]);
      step_cos[s * pairs + i] = std::cos(static_cast<double>(s) * frequency[i]);
    }
  at::parallel_for(0, (length + kStep - 1) / kStep, grain(kStep * d), [&](int64_t begin, int64_t end) {
    std::vector<double> base_sin(pairs), base_cos(pairs);
    for (const auto block : c10::irange(begin, end)) {
      for (const auto i : c10::irange(pairs)) {
        const double angle = static_cast<double>(block * kStep) * frequency[i];
        base_sin[i] = std::sin(angle);
        base_cos[i] = std::cos(angle);
      }
      for (const auto s : c10::irange(std::min(kStep, length - block * kStep))) {
        float* row = out + (block * kStep + s) * d;
        const double *sin_s = &step_sin[s * pairs], *cos_s = &step_cos[s * pairs];
        for (const auto i : c10::irange(pairs))
          row[2 * i] = static_cast<float>(base_sin[i] * cos_s[i] + base_cos[i] * sin_s[i]);
        for (const auto i : c10::irange(d / 2))
          row[2 * i + 1] = static_cast<float>(base_cos[i] * cos_s[i] - base_sin[i] * sin_s[i]);
      }
    }
  });
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
  m.impl("fill_positional_table", TORCH_FN(transformer_fast::fill_positional_table));
}
