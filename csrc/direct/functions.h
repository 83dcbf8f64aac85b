// The short ways, one for each door of transformer_fast/ops. Each returns the result, or None where it declines.
#pragma once

#include <pybind11/pybind11.h>

namespace transformer_fast::direct {

using pybind11::handle;
using pybind11::object;

object attention(handle q, handle k, handle v, handle keep, handle key_keep, handle lengths, handle bias, handle causal,
                 handle scale, handle dropout_p, handle seed, handle empty_rows);
object dropout(handle x, handle p, handle residual, handle relu, handle seed);
object layer_norm(handle x, handle weight, handle bias, handle eps, handle kind, handle residual, handle dropout_p,
                  handle seed);
object embed(handle ids, handle weight, handle table, handle scale, handle offset, handle padding_idx,
             handle dropout_p, handle seed);
object add_positional(handle x, handle table, handle offset, handle dropout_p, handle seed);

// One int64 from torch's generator for the CPU, the one that torch.randint(-2**63, 2**63 - 1, (1,)) draws.
object draw_seed();

}  // namespace transformer_fast::direct
