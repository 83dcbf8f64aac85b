// Just enough of CUDA C++ to run the kernels of csrc/cuda on the CPU, one block after the other: the test compiles the
// very sources, with their launches rewritten to launch(). Each thread of a block is a fiber, so __syncthreads() works
// as it should: a thread that reaches it waits until all the others have, or have ended. Or a launch goes to an executor.
#pragma once

#include "recorded_memory.h"

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __restrict__
#define __shared__ static
#define C10_CUDA_KERNEL_LAUNCH_CHECK()

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::min;

inline float __int_as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void atomicAdd(float* address, float value) {
  *address += value;
}

namespace cuda_on_cpu {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 15);
  dim3 index;
  bool done = false;
};

inline ucontext_t scheduler;
inline Fiber* running = nullptr;
inline const std::function<void()>* body = nullptr;

inline void enter() {
  (*body)();
  running->done = true;
}

inline void run_block(std::vector<Fiber>& fibers, unsigned threads) {
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.done = false;
    fiber.index = dim3(t % blockDim.x, t / blockDim.x);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (unsigned t = 0; t < threads; ++t) {
      if (fibers[t].done) continue;
      any = true;
      running = &fibers[t];
      threadIdx = running->index;
      swapcontext(&scheduler, &running->context);
    }
  }
}

// Blocks are run from a capped grid, so that the strided loops over what is beyond a grid are walked too.
constexpr unsigned kGridCap = 3, kThreadCap = 256;

// Takes the launches, if it is set: the host's address of the kernel, grid and block, and the bytes of each argument.
using Executor = void (*)(const void* kernel, unsigned grid, const dim3* block, int count, const void* const* arguments,
                          const size_t* sizes);
inline Executor executor = nullptr;

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), unsigned grid, dim3 block, const Arguments&... arguments) {
  const unsigned threads = block.x * block.y * block.z;
  if (grid == 0 || threads == 0 || threads > kThreadCap) throw std::runtime_error("a launch that CUDA would refuse");
  if (executor) {
    const std::tuple<Parameters...> given(arguments...);
    std::apply(
        [&](const auto&... each) {
          const void* const places[] = {&each...};
          const size_t sizes[] = {sizeof(each)...};
          executor(reinterpret_cast<const void*>(kernel), std::min(grid, kGridCap), &block, sizeof...(each), places,
                   sizes);
        },
        given);
    return;
  }
  static std::vector<Fiber> fibers(kThreadCap);
  const std::function<void()> call = [&] { kernel(arguments...); };
  body = &call;
  blockDim = block;
  gridDim = dim3(std::min(grid, kGridCap));
  for (unsigned b = 0; b < gridDim.x; ++b) {
    blockIdx = dim3(b);
    run_block(fibers, threads);
  }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() {
  cuda_on_cpu::Fiber* self = cuda_on_cpu::running;
  swapcontext(&self->context, &cuda_on_cpu::scheduler);
  threadIdx = self->index;
}

extern "C" __attribute__((visibility("default"))) void set_executor(cuda_on_cpu::Executor executor) {
  cuda_on_cpu::executor = executor;
}
