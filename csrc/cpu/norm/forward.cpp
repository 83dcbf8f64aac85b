// LayerNorm, Norm and RMSNorm over the last dimension, optionally of residual + dropout(x): forward.
//
//   layer: y = (x - mean) / sqrt(var + eps) * weight + bias     (variance over d)
//   std:   y = (x - mean) / (std + eps) * weight + bias         (variance over d - 1)
//   rms:   y = x / sqrt(average(x x) + eps) * weight
//
// A row fits in a cache near the core, so the statistics take two plain passes: as accurate as Welford's method,
// without its divisions. rms sums squares around 0, in one pass.

#include "common.h"

#include "../parallel.h"

#include <algorithm>
#include <cmath>

namespace transformer_fast {
namespace {

// Computes some elements of summed = residual + dropout(x); passes each vector to use(vector, column, count, slot).
template <typename T, typename Use>
void add(const T* x, const T* residual, T* summed, int64_t elements, const uint16_t* bits, const Dropout& dropout,
         const Use& use) {
  using A = Accumulate<T>;
  with_flag(bits, [&](auto drop) {
    for_columns<A>(0, elements, [&, dropout = dropout](int64_t c, auto count, int slot) {
      auto v = load_far(x + c, count);
      if constexpr (drop) v = dropout.template apply<A>(v, bits + c);
      v += load_far(residual + c, count);
      store(summed + c, v, count);
      use(v, c, count, slot);
    });
  });
}

// Source of the rows: summed = residual + dropout(x), or x without a residual.
template <typename T>
struct Addition {
  RowView<const T> x, residual;
  RowView<T> summed;
  int64_t d;
  bool drop;
  Dropout dropout;

  // Computes one row, in chunks of available random bits.
  template <typename Use>
  void row(int64_t r, RandomBits& random, const Use& use) const {
    const int64_t most = drop ? kChunkColumns : d;
    for (int64_t start = 0; start < d; start += most) {
      const int64_t columns = std::min(most, d - start);
      add(x.row(r) + start, residual.row(r) + start, summed.row(r) + start, columns,
          drop ? random.of(r, start, columns) : nullptr, dropout,
          [&](auto v, int64_t c, auto count, int slot) { use(v, start + c, count, slot); });
    }
  }

  // Computes one row and returns its mean, or with kSquares the sum of its squares. Calls also(column, count) per
  // vector.
  template <bool kSquares, typename Also>
  __attribute__((flatten)) T row_and_sum(int64_t r, RandomBits& random, const Also& also) const {
    const T first = drop ? residual.row(r)[0] : x.row(r)[0] + residual.row(r)[0];
    Vector<T> sums[4] = {};
    row(r, random, [&](auto v, int64_t c, auto count, int slot) {
      if constexpr (kSquares)
        sums[slot] = fma(v, v, sums[slot]);
      else
        sums[slot] += filled<T>(v, count, first) - first;
      also(c, count);
    });
    return kSquares ? sum(sums) : first + sum(sums) / d;
  }

  // Computes the rows `first` up to `last`, as one row if rows and random bits are contiguous.
  __attribute__((flatten)) void rows(int64_t first, int64_t last, RandomBits& random) const {
    const auto no_use = [](auto, int64_t, auto, int) {};
    if (x.stride == d && residual.stride == d && (!drop || d <= kNarrow<Accumulate<T>>)) {
      add(x.row(first), residual.row(first), summed.row(first), (last - first) * d,
          drop ? random.side_by_side(first, last) : nullptr, dropout, no_use);
    } else {
      for (int64_t r = first; r < last; ++r) row(r, random, no_use);
    }
  }
};

// Sums are of differences from the first element: large offsets cancel, and the mean of a constant row is exact.
template <typename T, typename A = Accumulate<T>>
A row_mean(const T* x, int64_t d) {
  const A first = static_cast<A>(x[0]);
  Vector<A> sums[4] = {};
  for_columns<A>(0, d, [&](int64_t c, auto count, int slot) { sums[slot] += load(x + c, count, first) - first; });
  return first + sum(sums) / d;
}

// Sums the squares of one row around the mean, or around 0 if !kCentred. Calls also(column) per vector.
template <bool kCentred, typename T, typename Also, typename A = Accumulate<T>>
A row_squares(const T* x, A mean, int64_t d, const Also& also) {
  Vector<A> squares[4] = {};
  for_columns<A>(0, d, [&](int64_t c, auto count, int slot) {
    also(c);
    Vector<A> v;
    if constexpr (kCentred)
      v = load(x + c, count, mean) - mean;
    else
      v = load(x + c, count);
    squares[slot] = fma(v, v, squares[slot]);
  });
  return sum(squares);
}

// Writer of the norm of one row, vector by vector.
template <typename T, bool kCentred, bool kWeight, bool kBias>
struct NormedRow {
  using A = Accumulate<T>;
  const T* x;
  const A *weight, *bias;
  T* out;
  A mean, rstd;

  template <typename Count>
  void operator()(int64_t c, Count count) const {
    auto v = load(x + c, count);
    if constexpr (kCentred) v -= mean;
    v *= rstd;
    if constexpr (kWeight && kBias)
      v = fma(v, load(weight + c, count), load(bias + c, count));
    else if constexpr (kWeight)
      v *= load(weight + c, count);
    else if constexpr (kBias)
      v += load(bias + c, count);
    store(out + c, v, count);
  }
};

// kCentred: true for LayerNorm and Norm; false for RMSNorm, which has no mean.
template <typename T, bool kCentred>
struct Forward {
  using A = Accumulate<T>;
  NormForwardParams<T> p;
  const A *weight, *bias;
  Addition<T> added{p.x, p.residual, p.summed, p.d, p.dropout.p > 0, Dropout(p.dropout)};

  RowView<const T> x() const { return p.residual ? RowView<const T>{p.summed.data, p.summed.stride} : p.x; }

  // Computes the factor of a row from the sum of its squares; stores mean and factor.
  A rstd_of(int64_t r, A mean_r, A squares) const {
    const bool std = kCentred && p.kind == NormKind::kStd;
    const A rstd_r = std ? 1 / (std::sqrt(squares / (p.d - 1)) + p.eps) : 1 / std::sqrt(squares / p.d + p.eps);
    if (p.rstd) {
      p.rstd[r] = rstd_r;
      if constexpr (kCentred) p.mean[r] = mean_r;
    }
    return rstd_r;
  }

  A mean_of(int64_t r) const { return kCentred ? row_mean(x().row(r), p.d) : 0; }

  template <bool kWeight, bool kBias>
  auto normed(int64_t r, A mean_r, A rstd_r) const {
    return NormedRow<T, kCentred, kWeight, kBias>{x().row(r), weight, bias, p.out.row(r), mean_r, rstd_r};
  }

  // Calls body(has weight, has bias) with constant flags.
  template <typename Body>
  void with_parameters(const Body& body) const {
    if constexpr (kCentred)
      with_flags(weight, bias, body);
    else
      with_flag(weight, [&](auto has_weight) { body(has_weight, std::false_type()); });
  }

  // Norms the rows [begin, end) in order; sums are computed ahead, as far as the cache holds them.
  void rows(int64_t begin, int64_t end) const {
    const int64_t d = p.d, block = std::max<int64_t>(1, kChunkColumns / d);
    const bool asks_ahead = p.residual && d * sizeof(T) < kPageBytes;  // more would evict the lines in use
    Pages out_pages = pages_of(p.out, begin, end), summed_pages = pages_of(p.summed, begin, end);
    RandomBits random(added.dropout, d, end);
    for (int64_t first = begin, last; first < end; first = last) {
      last = std::min(end, first + block);
      out_pages.prefault(p.out.row(last));
      if (p.residual) {
        summed_pages.prefault(p.summed.row(last));
        added.rows(first, last, random);
      }
      for (int64_t r = first; r < last; ++r) {
        const A mean_r = mean_of(r);
        T* const out_r = p.out.row(r);
        const A squares =
            row_squares<kCentred>(x().row(r), mean_r, d, [out_r](int64_t c) { __builtin_prefetch(out_r + c, 1); });
        const A rstd_r = rstd_of(r, mean_r, squares);
        const T* const ahead = asks_ahead ? x().row(r + 1) : out_r;
        with_parameters([&](auto has_weight, auto has_bias) {
          const auto row = normed<has_weight, has_bias>(r, mean_r, rstd_r);
          for_columns<A>(0, d, [&](int64_t c, auto count, int) {
            row(c, count);
            __builtin_prefetch(ahead + c, 1);
          });
        });
      }
    }
  }

  // Variant for wide rows of a stored sum: sums a row and its mean (or squares, without a mean) while the norm of the
  // row before is written, so that memory is read and written at the same time.
  template <bool kWeight, bool kBias>
  __attribute__((flatten)) void added_rows(int64_t begin, int64_t end) const {
    const int64_t d = p.d;
    Pages out_pages = pages_of(p.out, begin, end), summed_pages = pages_of(p.summed, begin, end);
    RandomBits random(added.dropout, d, end);
    const auto row_after = [&](int64_t r, const auto& write_row_before) {
      out_pages.prefault(p.out.row(r));
      summed_pages.prefault(p.summed.row(r + 1));
      const A sum_r = added.template row_and_sum<!kCentred>(r, random, write_row_before);
      if constexpr (!kCentred) return normed<kWeight, kBias>(r, 0, rstd_of(r, 0, sum_r));
      const A squares = row_squares<kCentred>(x().row(r), sum_r, d, [](int64_t) {});
      return normed<kWeight, kBias>(r, sum_r, rstd_of(r, sum_r, squares));
    };
    auto row = row_after(begin, [](int64_t, auto) {});
    for (int64_t r = begin + 1; r < end; ++r) row = row_after(r, row);
    out_pages.prefault(p.out.row(end));
    for_columns<A>(0, d, [&](int64_t c, auto count, int) { row(c, count); });
  }

  void all_rows(int64_t count) const {
    parallel_for(0, count, grain(p.d), [&](int64_t begin, int64_t end) {
      if constexpr (std::is_same_v<T, A>) {
        if (p.residual && p.d > kNarrow<A>)
          return with_parameters([&](auto has_weight, auto has_bias) { added_rows<has_weight, has_bias>(begin, end); });
      }
      rows(begin, end);
    });
  }
};

}  // namespace

template <typename T>
void norm_forward(const NormForwardParams<T>& p) {
  const WideParameters<T> parameters(p.weight, p.bias, p.d);
  with_flag(p.kind != NormKind::kRms, [&](auto centred) {
    const Forward<T, centred> forward{p, parameters.weight, parameters.bias};
    forward.all_rows(p.rows);
  });
}

TRANSFORMER_FAST_FOR_EACH_TYPE(void, norm_forward, NormForwardParams)

}  // namespace transformer_fast
