// The mask of a block of queries, lowered to an interval of keys per query, and to bits for what is no interval. Lengths, diagonals, and documents whose tokens follow each other are intervals.
#pragma once

#include "../simd/vector_types.h"
#include "attention_params.h"

namespace transformer_fast {
namespace {

// Number of keys of query i of batch entry b, by its length.
template <typename T, typename A>
int64_t key_length(const AttentionKernelParams<T, A>& params, int64_t b, int64_t i) {
  return params.lengths.data ? std::min<int64_t>(params.Lk, *params.lengths.at(b, 0, i)) : params.Lk;
}

// The key at distance 0 from query i, on the main diagonal.
template <typename T, typename A>
int64_t own_key(const AttentionKernelParams<T, A>& params, int64_t b, int64_t i) {
  return params.bottom_right ? i + key_length(params, b, i) - params.Lq : i;
}

// Upper limit of the keys between the first and the last one that the queries of a batch entry see.
template <typename T, typename A>
int64_t most_keys(const AttentionKernelParams<T, A>& params) {
  return std::min(params.Lk, params.upper - params.lower + params.Lq);
}

template <typename A>
struct Lowered {
  using Lane = IntegerLane<A>;

  int64_t first_query, queries, lanes;
  // The i-th query sees keys begins[i] .. ends[i] - 1. Lanes past the last query repeat it.
  Lane begins[kQueryTile], ends[kQueryTile];
  Range hull, shared;         // from the first to the last key of any query; the keys that all see
  bool compares_ids = false;  // some keys of the intervals are of other documents

  template <typename T>
  Lowered(const AttentionKernelParams<T, A>& params, int64_t b, int64_t first_query)
      : first_query(first_query), queries(std::min(kQueryTile, params.Lq - first_query)),
        lanes(round_up(queries, kLanes<A>)) {
    // Where the diagonals begin; far from all keys the number itself does not matter.
    const auto first_key = [&](int64_t diagonal) {
      return std::clamp<int64_t>(own_key(params, b, first_query) + diagonal, -kQueryTile, params.Lk);
    };
    const Lane begin = first_key(params.lower), end = first_key(params.upper + 1), last = queries - 1;
    const bool own_lengths = params.lengths.stride[2] != 0;
    const Lane length = own_lengths ? params.Lk : key_length(params, b, first_query);
    for (Lane first = 0; first < lanes; first += kLanes<A>)
      for (Lane i = first; i < first + kLanes<A>; ++i) {
        begins[i] = std::max<Lane>(0, begin + std::min(i, last));
        ends[i] = std::max<Lane>(0, std::min(length, end + std::min(i, last)));
      }
    for (Lane i = 0; i < lanes && own_lengths; ++i)
      ends[i] = std::min<Lane>(ends[i], key_length(params, b, first_query + std::min(i, last)));
    if (params.query_ids.data) narrow(params.query_ids.at(b, 0, first_query), params.key_ids.at(b, 0, 0));
    // Both rise from query to query, but for lengths of their own and documents.
    Lane first_begin = begins[0], last_begin = begins[last], first_end = ends[0], last_end = ends[last];
    for (Lane i = 0; i < lanes && (own_lengths || params.query_ids.data); ++i) {
      first_begin = std::min(first_begin, begins[i]), last_begin = std::max(last_begin, begins[i]);
      first_end = std::min(first_end, ends[i]), last_end = std::max(last_end, ends[i]);
    }
    hull = {first_begin, last_end}, shared = {last_begin, first_end};
  }

  Range keys_of(int64_t i) const { return {begins[i], ends[i]}; }

 private:
  // The keys of `within` from the first to the last one with an id from `low` to `high`.
  static Range find(const int32_t* ids, Range within, int32_t low, int32_t high) {
    const int32_t begin = within.begin, end = within.end;
    int32_t first = end, after = begin;
    for (int32_t j = begin; j < end; ++j) {
      const bool own = low <= ids[j] && ids[j] <= high;
      first = std::min(first, own ? j : end), after = std::max(after, own ? j + 1 : begin);
    }
    return {std::min(first, after), after};
  }

  // Narrows the intervals to the documents of the queries, until one of them is scattered.
  void narrow(const int32_t* query_ids, const int32_t* key_ids) {
    const auto [low, high] = std::minmax_element(query_ids, query_ids + queries);
    const Range all = find(key_ids, {begins[0], *std::max_element(ends, ends + lanes)}, *low, *high);
    Range own;
    for (int64_t i = 0; i < lanes; ++i) {
      const int32_t id = query_ids[std::min(i, queries - 1)];
      if (i == 0 || (i < queries && id != query_ids[i - 1])) {
        own = compares_ids ? all : find(key_ids, all, id, id);
        compares_ids |= std::any_of(key_ids + own.begin, key_ids + own.end, [&](int32_t other) { return other != id; });
      }
      begins[i] = std::max<Lane>(begins[i], own.begin), ends[i] = std::min<Lane>(ends[i], own.end);
    }
  }
};

}  // namespace
}  // namespace transformer_fast
