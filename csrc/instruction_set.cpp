#include "instruction_set.h"

#include "cpu/kernels.h"
#include "kernels_config.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <cstring>

#include <dlfcn.h>

namespace transformer_fast {
namespace {

const Kernels* loaded = nullptr;

}  // namespace

std::vector<std::string> supported_instruction_sets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  std::vector<std::string> sets;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) sets.push_back("avx512_bf16");
  if (avx512) sets.push_back("avx512");
  if (avx2) sets.push_back("avx2");
  return sets;
#else
  return {"generic"};
#endif
}

void load_kernels(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, dlerror());
  const auto get = reinterpret_cast<const Kernels* (*)()>(dlsym(library, "transformer_fast_kernels"));
  TORCH_CHECK(get != nullptr, path, " has no kernels of transformer_fast");
  const Kernels* const kernels = get();
  TORCH_CHECK(std::strcmp(kernels->sources, TRANSFORMER_FAST_KERNELS) == 0, path,
              " comes from other sources: ", kernels->sources, ", where this library expects ",
              TRANSFORMER_FAST_KERNELS);
  loaded = kernels;
}

const Kernels& kernels() {
  TORCH_CHECK(loaded != nullptr, "transformer_fast: no kernels for the CPU were loaded");
  at::get_num_threads();  // once in each thread, this tells OpenMP the number of torch.set_num_threads()
  return *loaded;
}

}  // namespace transformer_fast
