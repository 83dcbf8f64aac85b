// Masked attention on the CPU: shared parts of the forward and the backward kernel.
//
// The unit of work is a tile of scores, up to kKeyTile keys by kQueryTile queries, kept TRANSPOSED: a row is a key and
// the vector lanes are neighbouring queries. So the softmax runs down the rows with no sum across lanes, a key's mask
// is one number per row, a query's limit is one lane, and one Philox call of the dropout contract fills eight rows of a
// lane.
#pragma once

#include "attention_params.h"

#include "../buffer.h"
#include "../parallel.h"
#include "../simd/exp.h"
#include "../simd/operands.h"
#include "../simd/philox_dropout.h"

#include <atomic>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

namespace transformer_fast {

namespace {

template <typename A>
constexpr A kBlocked = -std::numeric_limits<A>::infinity();

// Elements (i, j) .. (i, j + count - 1) of a bias.
template <typename T, typename A>
Vector<A> load_bias(const Bias<T, A>& bias, int64_t i, int64_t j, int64_t count) {
  const auto &own = bias.own, &wide = bias.wide;
  if (own.data && own.column_stride() == 1) return load_some(own.data + i * own.row_stride() + j, count);
  if (wide.data && wide.column_stride() == 1) return load_some(wide.data + i * wide.row_stride() + j, count);
  Vector<A> v{};
  for (int64_t n = 0; n < count; ++n) v[n] = bias.at(i, j + n);
  return v;
}

// score = softcap * tanh(score / softcap) for `count` scores, whole vectors at a time, and the slopes of that, if wanted.
template <typename A>
void cap(int64_t count, A softcap, A* scores, A* slopes = nullptr) {
  for (int64_t n = 0; n < count; n += kLanes<A>) {
    const Vector<A> tangent = hyperbolic_tangent(load(scores + n) / softcap);
    store(scores + n, tangent * softcap);
    if (slopes) store(slopes + n, A(1) - tangent * tangent);
  }
}

// Memory of one thread, reused from call to call; it never shrinks.
template <typename A>
class Workspace {
 public:
  struct Part {
    A** buffer;
    int64_t size;
  };
  using Parts = std::initializer_list<Part>;

  // Sets each buffer to memory of its size, on cache lines of its own.
  static void divide(Parts parts, Parts more = {}) {
    static thread_local GrowingBuffer<A> memory;
    constexpr int64_t kAlign = 64 / sizeof(A);
    int64_t total = 0;
    for (const Parts& list : {parts, more})
      for (const auto& [buffer, size] : list) total += round_up(size, kAlign);
    A* next = memory.reserve(total);
    for (const Parts& list : {parts, more})
      for (const auto& [buffer, size] : list) *buffer = next, next += round_up(size, kAlign);
  }
};

// Runs task(i) once for every i, on the next free thread, because ragged batches make tasks of very different sizes.
// `work` is the number of multiplications of one product of scores; a small number is not worth waking a thread.
template <typename Task>
void for_tasks(int64_t tasks, double work, Task task) {
  constexpr double kWorthAThread = 2.5e5;  // about 10 us
  const int64_t threads = std::min<int64_t>({tasks, thread_count(), static_cast<int64_t>(work / kWorthAThread)});
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i);
  });
}

// The same for several calls: task(call, i) for i < tasks_of(call).
template <typename TasksOf, typename Task>
void for_tasks(int64_t calls, TasksOf tasks_of, double work, Task task) {
  if (calls == 1) return for_tasks(tasks_of(0), work, [&](int64_t i) { task(0, i); });
  std::vector<int64_t> ends(calls);
  int64_t total = 0;
  for (int64_t call = 0; call < calls; ++call) ends[call] = total += tasks_of(call);
  for_tasks(total, work, [&](int64_t i) {
    const int64_t call = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
    task(call, i - (call > 0 ? ends[call - 1] : 0));
  });
}

constexpr int64_t kKeysDrawn = 8 * kCounters;  // by one vector of Philox calls, for one query

// Number of key ranges per (batch, key head), from shapes only: more than one if there are too few heads to keep all
// threads busy.
struct KeyRanges {
  static constexpr int64_t kEnoughTasks = 16;

  KeyRanges(int64_t heads, int64_t Lk) {
    const int64_t tiles = std::max<int64_t>(1, (Lk + kKeyTile - 1) / kKeyTile);
    const int64_t wanted = std::min(tiles, (kEnoughTasks + heads - 1) / std::max<int64_t>(1, heads));
    length = (tiles + wanted - 1) / wanted * kKeyTile;
    count = std::max<int64_t>(1, (Lk + length - 1) / length);
  }

  int64_t length, count;
};

// The ranges of a call, and memory for the part of each range if there are several.
template <typename A>
struct KeySplit {
  KeyRanges ranges;
  int64_t size;  // size of a part
  A* partial = nullptr;

  A* of_range(int64_t range, int64_t offset) const { return partial ? partial + range * size + offset : nullptr; }
};

// The split per call, by number of keys and size of a range's part; `memory` holds the parts.
template <typename A, typename Call, typename KeysOf, typename SizeOf>
std::vector<KeySplit<A>> split_keys(std::span<const Call> calls, KeysOf keys_of, SizeOf size_of, Buffer<A>& memory) {
  int64_t heads = 0, total = 0;
  for (const Call& call : calls) heads += call.params.B * call.params.Hkv;
  std::vector<KeySplit<A>> splits;
  splits.reserve(calls.size());
  for (const Call& call : calls) {
    splits.push_back({KeyRanges(heads, keys_of(call.params)), size_of(call.params)});
    if (const auto& [ranges, size, _] = splits.back(); ranges.count > 1) total += ranges.count * size;
  }
  memory.resize(total);
  A* next = memory.data();
  for (auto& [ranges, size, partial] : splits)
    if (ranges.count > 1) partial = next, next += ranges.count * size;
  return splits;
}

using Even = std::integral_constant<int, 0>;
using Odd = std::integral_constant<int, 1>;

// Weights of a tile that dropout keeps, eight rows at a time (the contract is in reference/dropout.py).
template <typename A>
struct TileDropout {
  Dropout dropout;
  uint32_t head, batch;

  template <typename T>
  TileDropout(const AttentionKernelParams<T, A>& params, int64_t b, int64_t h)
      : dropout(params.dropout), head(static_cast<uint32_t>(h)), batch(static_cast<uint32_t>(params.first_batch + b)) {}

  // Draws of query i for kKeysDrawn keys from first_key, a multiple of kKeysDrawn.
  void draw_row(int64_t first_key, int64_t i, uint16_t* draws) const {
    CounterVector c[4][1] = {{lane_numbers() + static_cast<uint64_t>(first_key / 8)},
                             {CounterVector{} + static_cast<uint64_t>(i)},
                             {CounterVector{} + static_cast<uint64_t>(head)},
                             {CounterVector{} + static_cast<uint64_t>(batch)}};
    rounds(c);
    uint32_t words[4 * kCounters];
    for (int64_t lane = 0; lane < kCounters; ++lane)  // lane % 4: which pair of keys in each eighth of a group of 32
      for (int w = 0; w < 4; ++w) words[lane / 4 * 16 + 4 * w + lane % 4] = static_cast<uint32_t>(c[w][0][lane]);
    std::memcpy(draws, words, sizeof(words));
  }

  // Philox of `parts` vectors of counters at once, in place.
  template <int parts>
  void rounds(CounterVector (&c)[4][parts]) const {
    uint32_t key0 = static_cast<uint32_t>(dropout.seed), key1 = static_cast<uint32_t>(dropout.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int u = 0; u < parts; ++u) {
        const CounterVector product0 = multiply_low_words(c[0][u], kPhiloxM0),
                            product1 = multiply_low_words(c[2][u], kPhiloxM1);
        c[0][u] = (product1 >> 32) ^ c[1][u] ^ static_cast<uint64_t>(key0);
        c[1][u] = product1;
        c[2][u] = (product0 >> 32) ^ c[3][u] ^ static_cast<uint64_t>(key1);
        c[3][u] = product0;
      }
      key0 += kPhiloxW0;
      key1 += kPhiloxW1;
    }
  }

  // Words of the call for the lanes of queries first .. first + kLanes - 1.
  void draw(int64_t call, int64_t first, IntegerVector<A> (&words)[4]) const {
    constexpr int parts = sizeof(CounterVector) / (8 * kLanes<A>) == 1 ? 1 : 2;  // counters have 64-bit lanes
    CounterVector c[4][parts];
    for (int u = 0; u < parts; ++u) {
      c[0][u] = CounterVector{} + static_cast<uint64_t>(call);
      c[1][u] = lane_numbers() * parts + static_cast<uint64_t>(first + u);
      c[2][u] = CounterVector{} + static_cast<uint64_t>(head);
      c[3][u] = CounterVector{} + static_cast<uint64_t>(batch);
    }
    rounds(c);
    for (int w = 0; w < 4; ++w)
      words[w] =
          reinterpret_cast<IntegerVector<A>>(parts == 1 ? c[w][0] : (c[w][0] & 0xffffffff) | (c[w][parts - 1] << 32));
  }

  // body(row, parity, kept) over the rows of a tile whose first key is first_key, a multiple of 32; parity: of the row, a
  // constant; kept: all ones or zeros.
  template <typename Body>
  void for_rows(int64_t rows, int64_t first_key, int64_t first_query, Body body) const {
    const IntegerLane<A> threshold = dropout.rate.threshold;
    IntegerVector<A> words[4];
    for (int64_t group = 0; group < rows; group += 32)
      for (int64_t pair = 0; pair < 4 && group + 2 * pair < rows; ++pair) {
        draw((first_key + group) / 32 * 4 + pair, first_query, words);
        for (int w = 0; w < 4; ++w) {
          const int64_t row = group + 8 * w + 2 * pair;
          if (row < rows) body(row, Even{}, (words[w] & 0xffff) >= threshold);
          if (row + 1 < rows) body(row + 1, Odd{}, ((words[w] >> 16) & 0xffff) >= threshold);
        }
      }
  }
};

// Replaces `kept` without dropout.
struct AllKept {};

template <typename A>
inline Vector<A> where_kept(AllKept, Vector<A> v, Vector<A> = Vector<A>{}) {
  return v;
}

template <typename A>
inline Vector<A> where_kept(IntegerVector<A> kept, Vector<A> v, Vector<A> otherwise = Vector<A>{}) {
  return kept ? v : otherwise;
}

template <typename A, typename Body>
inline void for_rows(const std::optional<TileDropout<A>>& dropout, int64_t rows, int64_t first_key, int64_t first_query,
                     Body body) {
  if (dropout)
    dropout->for_rows(rows, first_key, first_query, body);
  else
    for (int64_t row = 0; row < rows; row += 2) {
      body(row, Even{}, AllKept{});
      if (row + 1 < rows) body(row + 1, Odd{}, AllKept{});
    }
}

}  // namespace
}  // namespace transformer_fast
