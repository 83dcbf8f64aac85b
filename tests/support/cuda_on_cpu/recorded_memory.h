// Which memory there is for a kernel: every allocation of tensors on the CPU, while they are recorded.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace cuda_on_cpu {

class RecordedMemory final : public c10::Allocator {
 public:
  static RecordedMemory& instance() {
    static auto* const memory = new RecordedMemory;  // tensors may outlive everything else
    return *memory;
  }

  void record(bool wanted) {
    if (wanted) base_ = c10::GetAllocator(c10::kCPU);
    c10::SetAllocator(c10::kCPU, wanted ? this : base_);
  }

  // The start and the size of the block that an address lies in; 0 of none.
  void find(uintptr_t address, uintptr_t* start, size_t* size) {
    const std::lock_guard<std::mutex> guard(mutex_);
    auto block = blocks_.upper_bound(address);
    *size = 0;
    if (block == blocks_.begin()) return;
    --block;
    if (address - block->first < block->second) *start = block->first, *size = block->second;
  }

  c10::DataPtr allocate(size_t bytes) override {
    auto* const owner = new Owner{base_->allocate(bytes)};
    void* const data = owner->memory.get();
    const std::lock_guard<std::mutex> guard(mutex_);
    if (bytes > 0) blocks_[reinterpret_cast<uintptr_t>(data)] = bytes;
    return {data, owner, &release, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { base_->copy_data(to, from, bytes); }

 private:
  struct Owner {
    c10::DataPtr memory;
  };

  static void release(void* context) {
    auto* const owner = static_cast<Owner*>(context);
    {
      const std::lock_guard<std::mutex> guard(instance().mutex_);
      instance().blocks_.erase(reinterpret_cast<uintptr_t>(owner->memory.get()));
    }
    delete owner;
  }

  c10::Allocator* base_ = nullptr;
  std::map<uintptr_t, size_t> blocks_;
  std::mutex mutex_;
};

}  // namespace cuda_on_cpu

extern "C" __attribute__((visibility("default"))) void record_memory(bool wanted) {
  cuda_on_cpu::RecordedMemory::instance().record(wanted);
}

extern "C" __attribute__((visibility("default"))) void find_memory(uintptr_t address, uintptr_t* start, size_t* size) {
  cuda_on_cpu::RecordedMemory::instance().find(address, start, size);
}
