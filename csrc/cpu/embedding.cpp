// Embedding on the CPU: gather * scale + positional encoding + dropout in one pass over each row, and its gradient.
//
// Every row of a result is written by one thread in an order that the number of threads does not change, so all of this is
// repeatable bit for bit.
#include "../embedding.h"
#include "draws.h"
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

constexpr int64_t kGrainElements = 16384;  // less is not worth waking a thread for

int64_t grain(int64_t d) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, d));
}

// ids of either width, in row order.
class Ids {
 public:
  Ids(const at::Tensor& ids, int64_t vocabulary)
      : shape_(ids.sizes()),
        vocabulary_(vocabulary),
        wide_(ids.scalar_type() == at::kLong ? ids.const_data_ptr<int64_t>() : nullptr),
        narrow_(wide_ ? nullptr : ids.const_data_ptr<int32_t>()) {}

  int64_t operator[](int64_t row) const {
    return wide_ ? wide_[row] : narrow_[row];
  }

  bool valid(int64_t id) const {
    return id >= 0 && id < vocabulary_;
  }

  [[noreturn]] void raise(int64_t row) const {
    std::string place;
    int64_t rest = row;
    for (size_t dim = shape_.size(); dim-- > 0; rest /= shape_[dim])
      place = std::to_string(rest % shape_[dim]) + (place.empty() ? "" : ", ") + place;
    TORCH_CHECK_INDEX(
        false, "ids[", place, "] is ", (*this)[row], ", but the vocabulary has ", vocabulary_,
        " rows: expected 0 <= id < ", vocabulary_);
  }

 private:
  at::IntArrayRef shape_;
  int64_t vocabulary_;
  const int64_t* wide_;
  const int32_t* narrow_;
};

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

Dropout dropout_of(double p, const OptionalTensor& seed) {
  return p > 0 ? Dropout(p, *seed->const_data_ptr<int64_t>()) : Dropout();
}

// out[r] = dropout(source[source_row(r)] * scale + table[offset + r % length]); a negative source row is left unwritten.
template <typename T, typename Table, typename SourceRow>
void encode(
    T* out, const Rows& rows, const Matrix<T>& source, const SourceRow& source_row, double scale,
    const Matrix<Table>* table, int64_t offset, double p, const Dropout& dropout) {
  using A = Accumulate<T>;
  at::parallel_for(0, rows.count, grain(rows.d), [&](int64_t begin, int64_t end) {
    alignas(64) T source_room[kDrawColumns];
    alignas(64) Table table_room[kDrawColumns];
    alignas(64) uint16_t draws[kDrawRoom];
    for (const auto r : c10::irange(begin, end)) {
      const int64_t from = source_row(r);
      if (from < 0) continue;
      for (int64_t start = 0; start < rows.d; start += kDrawColumns) {
        const int64_t count = std::min(kDrawColumns, rows.d - start);
        const T* x = source.columns(from, start, count, source_room);
        const Table* t = table ? table->columns(offset + r % rows.length, start, count, table_room) : nullptr;
        T* y = out + r * rows.d + start;
        if (p > 0) dropout.draw(r, start, count, draws);
        for_columns<A>(0, count, [&](int64_t c, auto lanes, int) {
          Vector<A> v = load(x + c, lanes) * static_cast<A>(scale);
          if (t) v += load(t + c, lanes);
          if (p > 0) v = dropout.apply<A>(v, draws + c);
          store(y + c, v, lanes);
        });
      }
    }
  });
}

// encode() for whichever type the table has: the accumulation type, or the type of the source.
template <typename T, typename SourceRow>
void encode_with(
    at::Tensor& out, const Rows& rows, const at::Tensor& source, const SourceRow& source_row, double scale,
    const OptionalTensor& table, int64_t offset, double p, const OptionalTensor& seed) {
  using A = Accumulate<T>;
  const Matrix<T> from(source);
  const Dropout dropout = dropout_of(p, seed);
  T* y = out.mutable_data_ptr<T>();
  if (!table) {
    encode<T, A, SourceRow>(y, rows, from, source_row, scale, nullptr, offset, p, dropout);
  } else if (std::is_same_v<T, A> || table->scalar_type() != source.scalar_type()) {
    const at::Tensor converted = table->to(c10::CppTypeToScalarType<A>::value);
    const Matrix<A> matrix(converted);
    encode<T, A, SourceRow>(y, rows, from, source_row, scale, &matrix, offset, p, dropout);
  } else {
    const Matrix<T> matrix(*table);
    encode<T, T, SourceRow>(y, rows, from, source_row, scale, &matrix, offset, p, dropout);
  }
}

at::Tensor embed(
    const at::Tensor& ids, const at::Tensor& weight, const OptionalTensor& table, double scale, int64_t offset, double p,
    const OptionalTensor& seed) {
  check_ids(ids);
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: expected (vocabulary, d), got ", weight.sizes());
  const Rows rows(ids.sizes(), weight.size(1));
  if (table) check_table(weight, *table, rows, offset);
  check_dropout(weight, p, seed);
  auto shape = ids.sizes().vec();
  shape.push_back(rows.d);
  at::Tensor out = at::empty(shape, weight.options());
  if (rows.empty()) return out;

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
    encode_with<scalar_t>(out, rows, weight, source_row, scale, table, offset, p, seed);
  });
  if (first_invalid < rows.count) id.raise(first_invalid);
  return out;
}

at::Tensor add_positional(
    const at::Tensor& x, const OptionalTensor& table, int64_t offset, double p, const OptionalTensor& seed) {
  TORCH_CHECK_VALUE(x.dim() >= 2, "x: expected (..., length, d), got ", x.sizes());
  const Rows rows(x.sizes().slice(0, x.dim() - 1), x.size(-1));
  if (table) check_table(x, *table, rows, offset);
  check_dropout(x, p, seed);
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (rows.empty()) return out;

  const at::Tensor source = x.reshape({rows.count, rows.d});
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "add_positional", [&] {
    const auto same_row = [](int64_t r) { return r; };
    encode_with<scalar_t>(out, rows, source, same_row, 1.0, table, offset, p, seed);
  });
  return out;
}

// The rows of grad in order of their ids (a counting sort, stable): those of id v are order[starts[v]] .. order[starts[v + 1] - 1].
// padding_idx has none.
struct RowsById {
  std::vector<int64_t> starts, order;

  RowsById(const Ids& ids, int64_t count, int64_t vocabulary, int64_t padding_idx)
      : starts(vocabulary + 1), order(count) {
    for (const auto r : c10::irange(count)) {
      const int64_t id = ids[r];
      if (!ids.valid(id)) ids.raise(r);
      if (id != padding_idx) ++starts[id + 1];
    }
    for (const auto v : c10::irange(vocabulary)) starts[v + 1] += starts[v];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (const auto r : c10::irange(count))
      if (ids[r] != padding_idx) order[next[ids[r]]++] = r;
  }
};

// A row of the weight's gradient is the sum of at most kSegment rows of grad, or else of the sums of such segments: one id that
// fills the batch then still occupies every thread, and the order of summation depends on the batch alone.
constexpr int64_t kSegment = 256;

template <typename T>
class WeightGradient {
  using A = Accumulate<T>;

 public:
  WeightGradient(const T* grad, int64_t d, const RowsById& by_id, double scale, double p, const Dropout& dropout)
      : grad_(grad), d_(d), by_id_(by_id), scale_(static_cast<A>(scale)), p_(p), dropout_(dropout) {}

  void write(T* out, int64_t vocabulary) const {
    // Along this axis each id has length 1 + its number of rows, so equal stretches are about equal work.
    const auto& starts = by_id_.starts;
    const int64_t length = vocabulary + starts.back();
    at::parallel_for(0, length, grain(d_), [&](int64_t begin, int64_t end) {
      for (int64_t v = id_at(begin); v < vocabulary && starts[v] + v < end; ++v) {
        const int64_t count = starts[v + 1] - starts[v];
        if (count == 0)
          std::fill_n(out + v * d_, d_, T(0));
        else if (count <= kSegment)
          sum_rows(out + v * d_, starts[v], count, scale_);
      }
    });
    for (const auto v : heavy_ids(vocabulary)) write_heavy(out + v * d_, starts[v], starts[v + 1] - starts[v]);
  }

 private:
  // The first id that begins at or after a place on the axis of write().
  int64_t id_at(int64_t place) const {
    int64_t low = 0, high = static_cast<int64_t>(by_id_.starts.size()) - 1;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (by_id_.starts[middle] + middle < place)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  std::vector<int64_t> heavy_ids(int64_t vocabulary) const {
    std::vector<int64_t> ids;
    if (by_id_.starts.back() > kSegment)
      for (const auto v : c10::irange(vocabulary))
        if (by_id_.starts[v + 1] - by_id_.starts[v] > kSegment) ids.push_back(v);
    return ids;
  }

  void write_heavy(T* out, int64_t first, int64_t count) const {
    const int64_t segments = (count + kSegment - 1) / kSegment;
    std::vector<A> partial(segments * d_);
    at::parallel_for(0, segments, 1, [&](int64_t begin, int64_t end) {
      for (const auto s : c10::irange(begin, end))
        sum_rows(&partial[s * d_], first + s * kSegment, std::min(kSegment, count - s * kSegment), A(1));
    });
    at::parallel_for(0, d_, std::max<int64_t>(64, kGrainElements / segments), [&](int64_t begin, int64_t end) {
      for_columns<A>(begin, end, [&](int64_t c, auto lanes, int) {
        Vector<A> total{};
        for (const auto s : c10::irange(segments)) total += load(&partial[s * d_ + c], lanes);
        store(out + c, total * scale_, lanes);
      });
    });
  }

  // out = scale * sum of dropout'(grad row) over by_id.order[first .. first + count)
  template <typename Out>
  void sum_rows(Out* out, int64_t first, int64_t count, A scale) const {
    alignas(64) A total[kDrawColumns];
    alignas(64) uint16_t draws[kDrawRoom];
    for (int64_t start = 0; start < d_; start += kDrawColumns) {
      const int64_t columns = std::min(kDrawColumns, d_ - start);
      std::fill_n(total, columns, A(0));
      for (const auto i : c10::irange(first, first + count)) {
        const int64_t row = by_id_.order[i];
        const T* g = grad_ + row * d_ + start;
        if (p_ > 0) dropout_.draw(row, start, columns, draws);
        for_columns<A>(0, columns, [&](int64_t c, auto lanes, int) {
          Vector<A> v = load(g + c, lanes);
          if (p_ > 0) v = dropout_.template apply<A>(v, draws + c);
          store(total + c, load(total + c, lanes) + v, lanes);
        });
      }
      for_columns<A>(0, columns, [&](int64_t c, auto lanes, int) {
        store(out + start + c, load(total + c, lanes) * scale, lanes);
      });
    }
  }

  const T* grad_;
  int64_t d_;
  const RowsById& by_id_;
  A scale_;
  double p_;
  const Dropout& dropout_;
};

at::Tensor embed_backward(
    const at::Tensor& grad_out, const at::Tensor& ids, int64_t vocabulary, double scale, std::optional<int64_t> padding_idx,
    double p, const OptionalTensor& seed, bool /* deterministic: always */) {
  check_grad(grad_out, ids, vocabulary);
  check_dropout(grad_out, p, seed);
  const at::Tensor grad = grad_out.contiguous(), dense = ids.contiguous();
  const int64_t d = grad.size(-1);
  at::Tensor out = at::empty({vocabulary, d}, grad.options());
  if (out.numel() == 0) return out;

  const RowsById by_id(Ids(dense, vocabulary), dense.numel(), vocabulary, padding_idx.value_or(-1));
  const Dropout dropout = dropout_of(p, seed);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "embed_backward", [&] {
    const WeightGradient<scalar_t> gradient(grad.const_data_ptr<scalar_t>(), d, by_id, scale, p, dropout);
    gradient.write(out.mutable_data_ptr<scalar_t>(), vocabulary);
  });
  return out;
}

// table[r] = the encoding of position start + r. Sines and cosines are taken only of every kStep-th position and of the steps
// 0 .. kStep - 1; the rest follow by the addition theorem in fp64, whose error (a few 1e-16) vanishes in fp32.
void fill_positional_table(const at::Tensor& table, int64_t start) {
  TORCH_CHECK_VALUE(
      table.dim() == 2 && table.scalar_type() == at::kFloat && table.is_contiguous() && start >= 0,
      "table: expected contiguous float32 (length, d) and start >= 0");
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
        const double angle = static_cast<double>(start + block * kStep) * frequency[i];
        base_sin[i] = std::sin(angle);
        base_cos[i] = std::cos(angle);
      }
      for (const auto s : c10::irange(std::min(kStep, length - block * kStep))) {
        float* row = out + (block * kStep + s) * d;
        const double *sin_s = &step_sin[s * pairs], *cos_s = &step_cos[s * pairs];
        for (const auto i : c10::irange(pairs)) row[2 * i] = static_cast<float>(base_sin[i] * cos_s[i] + base_cos[i] * sin_s[i]);
        for (const auto i : c10::irange(d / 2))
          row[2 * i + 1] = static_cast<float>(base_cos[i] * cos_s[i] - base_sin[i] * sin_s[i]);
      }
    }
  });
}

}  // namespace
}  // namespace transformer_fast

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def("embed(Tensor ids, Tensor weight, Tensor? table, float scale, int offset, float dropout_p, Tensor? seed) -> Tensor");
  m.def(
      "embed_backward(Tensor grad_out, Tensor ids, int num_embeddings, float scale, int? padding_idx, float dropout_p, "
      "Tensor? seed, bool deterministic) -> Tensor");
  m.def("add_positional(Tensor x, Tensor? table, int offset, float dropout_p, Tensor? seed) -> Tensor");
  m.def("fill_positional_table(Tensor(a!) table, int start) -> ()");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("embed", TORCH_FN(transformer_fast::embed));
  m.impl("embed_backward", TORCH_FN(transformer_fast::embed_backward));
  m.impl("add_positional", TORCH_FN(transformer_fast::add_positional));
  m.impl("fill_positional_table", TORCH_FN(transformer_fast::fill_positional_table));
}
