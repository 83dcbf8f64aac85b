// Division of a loop over rows among threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace transformer_fast {

// Rows of d elements that one thread should at least get: less is not worth waking it for.
inline int64_t grain(int64_t d) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, d)); }

}  // namespace transformer_fast
