"""Faults in the C++ kernels of attention."""

from .fault import Fault

ATTENTION = "csrc/cpu/attention/"
NATIVE = ("tests/ops/test_attention_native.py",)
PARTS = ("tests/ops/test_attention_parts.py",)
WINDOW = ("tests/ops/test_attention_kernels.py",)
EXTRAS = ("tests/ops/test_attention_kernels.py",)
OUTPUTS = ("tests/ops/test_attention_outputs.py",)
DECODE = ("tests/ops/test_attention_decode.py",)
NORM = ("tests/ops/test_norm.py", "tests/ops/test_every_op.py")
DROPOUT = ("tests/ops/test_dropout.py", "tests/ops/test_every_op.py")
EMBEDDING = ("tests/ops/test_embedding.py", "tests/ops/test_every_op.py")
LOSS = ("tests/ops/test_cross_entropy.py", "tests/ops/test_every_op.py")
TOPK = ("tests/generation/test_topk.py",)

ROWS = (
    Fault(
        name="the first key past the shortest length of a block is not masked",
        path=ATTENTION + "mask.h",
        old="std::max<int64_t>(0, visible_to_all_.end - first_key_);",
        new="std::max<int64_t>(0, visible_to_all_.end - first_key_ + 1);",
        tests=NATIVE,
    ),
    Fault(
        name="a query sees one key past its end",
        path=ATTENTION + "mask.h",
        old="(ends <= static_cast<IntegerLane<A>>(first_key_ + row))",
        new="(ends < static_cast<IntegerLane<A>>(first_key_ + row))",
        tests=NATIVE,
    ),
    Fault(
        name="the first key of a window is masked",
        path=ATTENTION + "mask.h",
        old="const auto blocked = begins > static_cast",
        new="const auto blocked = begins >= static_cast",
        tests=WINDOW,
    ),
    Fault(
        name="documents of a tile are not told apart where the first key's is the last query's",
        path=ATTENTION + "mask.h",
        old="key_ids.first != query_ids_.last || query_ids_.first != key_ids.last;",
        new="key_ids.first != query_ids_.last;",
        tests=PARTS,
    ),
    Fault(
        name="a tile is skipped whose first document is the last of the queries'",
        path=ATTENTION + "mask.h",
        old="query_ids_.last < key_ids.first;",
        new="query_ids_.last <= key_ids.first;",
        tests=PARTS,
    ),
    Fault(
        name="the bias by distance is read along the other diagonal",
        path=ATTENTION + "mask.h",
        old="load_some(distances + first_key_ + j - i, count)",
        new="load_some(distances + first_key_ + j + i, count)",
        tests=PARTS,
    ),
    Fault(
        name="a bias beside a softcap is left out in the backward alone",
        path=ATTENTION + "mask.h",
        old="if (has_pairs_) add_pairs(keys * lanes_, scores);",
        new="if (has_pairs_ && !buffers_.slopes) add_pairs(keys * lanes_, scores);",
        tests=PARTS,
    ),
    Fault(
        name="of a mask on keys the parts for every key are ignored",
        path=ATTENTION + "mask.h",
        old="for (const auto* mask : {&keep, &key_keep}) {",
        new="for (const auto* mask : {&keep}) {",
        tests=NATIVE,
    ),
    Fault(
        name="a strided keep mask is read as if it were dense",
        path=ATTENTION + "mask.h",
        old="for (int64_t i = 0; i < count; ++i) bytes[i] = p[i * stride];",
        new="for (int64_t i = 0; i < count; ++i) bytes[i] = p[i];",
        tests=NATIVE,
    ),
    Fault(
        name="the weight of a sink is missing in the sum",
        path=ATTENTION + "forward.cpp",
        old="std::fill(row_sum_, row_sum_ + lanes_, A(params_.sinks ? 1 : 0));",
        new="std::fill(row_sum_, row_sum_ + lanes_, A(0));",
        tests=PARTS,
    ),
    Fault(
        name="the logsumexp of a row without keys is 0",
        path=ATTENTION + "forward.cpp",
        old="row_sum_[i] == 0 ? kBlocked<A> : row_max_[i]",
        new="row_sum_[i] == 0 ? A(0) : row_max_[i]",
        tests=OUTPUTS,
    ),
    Fault(
        name="kept weights are not scaled up",
        path=ATTENTION + "forward.cpp",
        old="const A rescale = dropout_ ? static_cast<A>(dropout_->dropout.rate.scale) : A(1);",
        new="const A rescale = A(1);",
        tests=NATIVE,
    ),
    Fault(
        name="the last column is not brought to a new maximum",
        path=ATTENTION + "forward.cpp",
        old="for (int64_t d = 0; d < width_; ++d) sum_[i * width_ + d] *= shrink[i];",
        new="for (int64_t d = 0; d + 1 < params_.D; ++d) sum_[i * width_ + d] *= shrink[i];",
        tests=NATIVE,
    ),
    Fault(
        name="a row without keys is divided by the number of queries",
        path=ATTENTION + "forward.cpp",
        old="if (row_sum_[i] == 0) row_sum_[i] = static_cast<A>(params_.Lk);",
        new="if (row_sum_[i] == 0) row_sum_[i] = static_cast<A>(params_.Lq);",
        tests=NATIVE,
    ),
    Fault(
        name="grouped heads share keys in another order",
        path=ATTENTION + "forward.cpp",
        old="kv_head_(h / (params.H / params.Hkv))",
        new="kv_head_(h % params.Hkv)",
        tests=NATIVE,
    ),
    Fault(
        name="the slope of the softcap is missing in the backward",
        path=ATTENTION + "backward.cpp",
        old="if (params_.softcap > 0) gradients_.apply_slopes(keys);",
        new="if (params_.softcap < 0) gradients_.apply_slopes(keys);",
        tests=PARTS,
    ),
    Fault(
        name="the first range of keys gives the queries no gradient",
        path=ATTENTION + "backward.cpp",
        old="for (int64_t range = 0; range < split.ranges.count; ++range)\n        total",
        new="for (int64_t range = 1; range < split.ranges.count; ++range)\n        total",
        tests=NATIVE,
    ),
    Fault(
        name="the scale is missing in a gradient of q that ranges of keys share",
        path=ATTENTION + "backward.cpp",
        old="store_rows(grad_q_, width_, queries, p.scale, p.D, partial_q",
        new="store_rows(grad_q_, width_, queries, A(1), p.D, partial_q",
        tests=NATIVE,
    ),
    Fault(
        name="the gradient by distance is that of the first batch entry alone",
        path=ATTENTION + "backward.cpp",
        old="for (int64_t task = 0; task < p.B * p.Hkv * ranges; ++task)",
        new="for (int64_t task = 0; task < p.Hkv * ranges; ++task)",
        tests=PARTS,
    ),
    Fault(
        name="the sink is missing in the backward's sum of weights",
        path=ATTENTION + "gradients.h",
        old="if (params_.sinks) total += exponential(",
        new="if (false) total += exponential(",
        tests=PARTS,
    ),
    Fault(
        name="the gradient of the logsumexp has the wrong sign",
        path=ATTENTION + "gradients.h",
        old="delta_[i] -= grad_logsumexp_[i];",
        new="delta_[i] += grad_logsumexp_[i];",
        tests=OUTPUTS,
    ),
    Fault(
        name="kept weights are not scaled up in the gradient of the values",
        path=ATTENTION + "gradients.h",
        old="store(weights, where_kept<A>(kept, weight * rescale));",
        new="store(weights, where_kept<A>(kept, weight));",
        tests=NATIVE,
    ),
    Fault(
        name="a row without keys gives the values a share of the number of queries",
        path=ATTENTION + "gradients.h",
        old="uniform_[i] = A(1) / static_cast<A>(p.Lk);",
        new="uniform_[i] = A(1) / static_cast<A>(p.Lq);",
        tests=NATIVE,
    ),
    Fault(
        name="a NaN in the value of a blocked key reaches the gradients",
        path=ATTENTION + "gradients.h",
        old="const Vector<A> grad = blocked ? Vector<A>{} : where_kept<A>(kept, load(grads) * rescale);",
        new="const Vector<A> grad = where_kept<A>(kept, load(grads) * rescale);",
        tests=("tests/ops/test_attention_native.py", "tests/ops/test_attention.py"),
    ),
    Fault(
        name="the gradients by distance are summed along the other diagonal",
        path=ATTENTION + "gradients.h",
        old="for (int64_t i = 0; i < queries_; ++i) own[-i] += grads_[row * lanes_ + i];",
        new="for (int64_t i = 0; i < queries_; ++i) own[i] += grads_[row * lanes_ + i];",
        tests=PARTS,
    ),
    Fault(
        name="few queries leave the sink out of their sum",
        path=ATTENTION + "few_queries_forward.h",
        old="*part.row_sum = *part.row_sum * shrink + std::exp(sink - maximum);",
        new="*part.row_sum = *part.row_sum * shrink;",
        tests=PARTS,
    ),
    Fault(
        name="joined parts keep the sum of another maximum",
        path=ATTENTION + "few_queries_forward.h",
        old="*joined.row_sum = *joined.row_sum * before + *part.row_sum * added;",
        new="*joined.row_sum = *joined.row_sum + *part.row_sum * added;",
        tests=DECODE,
    ),
    Fault(
        name="a part of the keys of few queries lacks its last one",
        path=ATTENTION + "few_queries_forward.h",
        old="const int64_t end = std::min(visible.end, first_key + count);",
        new="const int64_t end = std::min(visible.end, first_key + count - 1);",
        tests=DECODE,
    ),
    Fault(
        name="few queries ignore the gradient of the logsumexp where they see all keys at once",
        path=ATTENTION + "few_queries_backward.h",
        old="lane_sum<A>(products) - number(row, kGradLogsumexp)",
        new="lane_sum<A>(products)",
        tests=OUTPUTS,
    ),
    Fault(
        name="few queries ignore the slope of the softcap",
        path=ATTENTION + "few_queries_backward.h",
        old="for (int64_t j = 0; p.softcap > 0 && j < keys; j += kW)",
        new="for (int64_t j = 0; p.softcap < 0 && j < keys; j += kW)",
        tests=PARTS,
    ),
    Fault(
        name="few queries ignore documents",
        path=ATTENTION + "few_queries.h",
        old="if (ids[j] != own) scores[j] = kBlocked<A>;",
        new="if (ids[j] > own) scores[j] = kBlocked<A>;",
        tests=PARTS,
    ),
    Fault(
        name="a key of a page is taken from the next one at its edge",
        path=ATTENTION + "few_queries.h",
        old="return std::min(count, p.page_size - slot);",
        new="return std::min(count, p.page_size - slot + 1);",
        tests=DECODE,
    ),
    Fault(
        name="dropout of a packed batch forgets which sequence it is in",
        path="csrc/ops/attention_cpu.cpp",
        old="p.first_batch = b;",
        new="p.first_batch = 0;",
        tests=("tests/ops/test_attention_kernels_packed.py",),
    ),
    Fault(
        name="returned weights leave out the sink",
        path=ATTENTION + "weights.cpp",
        old="if (params_.sinks) total += exponential(sink - origin);",
        new="",
        tests=PARTS,
    ),
    Fault(
        name="returned weights of a row without keys are never 0",
        path=ATTENTION + "weights.cpp",
        old="broadcast(params_.zero_empty_rows ? A(0) : rescale / static_cast<A>(Lk));",
        new="broadcast(rescale / static_cast<A>(Lk));",
        tests=OUTPUTS,
    ),
    Fault(
        name="the gradient of a bias skips the last lanes of a block",
        path=ATTENTION + "grad_bias.cpp",
        old="for (int64_t lane = 0; lane < queries; lane += kW) {",
        new="for (int64_t lane = 0; lane + kW <= queries; lane += kW) {",
        tests=EXTRAS,
    ),
    Fault(
        name="the gradient of a bias lies over that of the first block",
        path=ATTENTION + "grad_bias.cpp",
        old="(sizes_[2] == 1 ? 0 : first_query)) * columns;",
        new="0) * columns;",
        tests=EXTRAS,
    ),
    Fault(
        name="a saved weight of a blocked key lets a NaN through",
        path=ATTENTION + "saved_tile.h",
        old="const Vector<A> grad = weight == A(0) ? Vector<A>{} : load(grads + row * lanes + lane);",
        new="const Vector<A> grad = load(grads + row * lanes + lane);",
        tests=("tests/ops/test_attention_native.py",),
    ),
)
