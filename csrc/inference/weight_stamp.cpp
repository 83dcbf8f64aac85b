#include "weight_stamp.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace transformer_fast {
namespace {

// As in tensor_cache.py.
constexpr int64_t kWhole = 4096, kBlock = 8, kColumn = kBlock * 31;
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
constexpr std::array<int64_t, 15> kPrimes{251, 127, 61, 47, 31, 29, 23, 19, 17, 13, 11, 7, 5, 3, 2};

// Sums of the integers (count, width) in memory, each mixed with its row, per column, modulo 2^64.
template <typename Integer, int64_t width>
void add_up(const char* data, int64_t count, int64_t stride, uint64_t* sums) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t factor = (2 * static_cast<uint64_t>(i) + 1) * kFactor;
    for (int64_t column = 0; column < width; ++column) {
      Integer value;
      std::memcpy(&value, data + (i * stride + column) * static_cast<int64_t>(sizeof(Integer)), sizeof(Integer));
      uint64_t bits = static_cast<uint64_t>(static_cast<int64_t>(value));
      bits = (bits ^ bits >> 29) * factor;
      sums[column] += bits ^ bits >> 32;
    }
  }
}

template <typename Integer>
WeightStamp stamp_as(const char* data, int64_t rows, int64_t width) {
  const int64_t count = rows * width;
  std::array<uint64_t, kBlock> sums{};
  int64_t numbers = 1;
  if (count <= kWhole || width < kBlock) {
    add_up<Integer, 1>(data, count, 1, sums.data());
  } else {
    const int64_t most = std::min(width - kBlock, std::max(rows, kColumn));
    const auto fits = [&](int64_t prime) { return kBlock * prime <= most && width % prime != 0; };
    const auto prime = std::find_if(kPrimes.begin(), kPrimes.end(), fits);
    const int64_t stride = kBlock * (prime == kPrimes.end() ? 1 : *prime);
    numbers = kBlock;
    add_up<Integer, kBlock>(data, 1 + (count - kBlock) / stride, stride, sums.data());
  }
  return WeightStamp(sums.begin(), sums.begin() + numbers);
}

}  // namespace

WeightStamp stamp_of(const at::Tensor& weight) {
  const at::Tensor dense = weight.is_contiguous()       ? weight
                           : weight.t().is_contiguous() ? weight.t()
                                                        : weight.contiguous();
  const int64_t size = dense.element_size(), start = size * dense.storage_offset(), row = size * dense.size(1);
  const int64_t rows = dense.size(0);
  const char* data = static_cast<const char*>(dense.const_data_ptr());
  const auto divides = [&](int64_t bytes) { return start % bytes == 0 && row % bytes == 0; };
  if (divides(8)) return stamp_as<int64_t>(data, rows, row / 8);
  if (divides(4)) return stamp_as<int32_t>(data, rows, row / 4);
  if (divides(2)) return stamp_as<int16_t>(data, rows, row / 2);
  return stamp_as<int8_t>(data, rows, row);
}

}  // namespace transformer_fast
