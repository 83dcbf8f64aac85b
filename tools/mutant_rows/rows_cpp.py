"""Faults in the C++ kernels and in the ops around them."""

from .fault import Fault

ROWS = (
    Fault(
        name="a query sees one key past its end",
        path="csrc/cpu/attention/mask.h",
        old="(ends <= static_cast<IntegerLane<A>>(first_key_ + row))",
        new="(ends < static_cast<IntegerLane<A>>(first_key_ + row))",
        tests=("tests/ops/test_attention_native.py",),
    ),
    Fault(
        name="the first key of a window is masked",
        path="csrc/cpu/attention/mask.h",
        old="const auto blocked = begins > static_cast",
        new="const auto blocked = begins >= static_cast",
        tests=("tests/ops/test_attention_kernels.py",),
    ),
    Fault(
        name="the interval of a document lacks its last key",
        path="csrc/cpu/attention/lowered.h",
        old="after = std::max(after, own ? j + 1 : begin);",
        new="after = std::max(after, own ? j : begin);",
        tests=("tests/ops/test_attention_masks.py",),
    ),
    Fault(
        name="kept weights are not scaled up",
        path="csrc/cpu/attention/forward.cpp",
        old="const A rescale = dropout_ ? static_cast<A>(dropout_->dropout.rate.scale) : A(1);",
        new="const A rescale = A(1);",
        tests=("tests/ops/test_attention_native.py",),
    ),
    Fault(
        name="grouped heads share keys in another order",
        path="csrc/cpu/attention/forward.cpp",
        old="kv_head_(h / (params.H / params.Hkv))",
        new="kv_head_(h % params.Hkv)",
        tests=("tests/ops/test_attention_native.py",),
    ),
    Fault(
        name="the first range of keys gives the queries no gradient",
        path="csrc/cpu/attention/backward.cpp",
        old="for (int64_t range = 0; range < split.ranges.count; ++range)\n        total",
        new="for (int64_t range = 1; range < split.ranges.count; ++range)\n        total",
        tests=("tests/ops/test_attention_native.py",),
    ),
    Fault(
        name="the gradient of the logsumexp has the wrong sign",
        path="csrc/cpu/attention/gradients.h",
        old="delta_[i] -= grad_logsumexp_[i];",
        new="delta_[i] += grad_logsumexp_[i];",
        tests=("tests/ops/test_attention_outputs.py",),
    ),
    Fault(
        name="a NaN in the value of a blocked key reaches the gradients",
        path="csrc/cpu/attention/gradients.h",
        old="const Vector<A> grad = blocked ? Vector<A>{} : where_kept<A>(kept, load(grads) * rescale);",
        new="const Vector<A> grad = where_kept<A>(kept, load(grads) * rescale);",
        tests=("tests/ops/test_attention_kernels.py",),
    ),
    Fault(
        name="joined parts keep the sum of another maximum",
        path="csrc/cpu/attention/few_queries_forward.h",
        old="*joined.row_sum = *joined.row_sum * before + *part.row_sum * added;",
        new="*joined.row_sum = *joined.row_sum + *part.row_sum * added;",
        tests=("tests/ops/test_attention_decode.py",),
    ),
    Fault(
        name="a key of a page is taken from the next one at its edge",
        path="csrc/cpu/attention/few_queries.h",
        old="return std::min(count, p.page_size - slot);",
        new="return std::min(count, p.page_size - slot + 1);",
        tests=("tests/ops/test_attention_decode.py",),
    ),
    Fault(
        name="the gradient of a bias skips the last lanes of a block",
        path="csrc/cpu/attention/grad_bias.cpp",
        old="for (int64_t lane = 0; lane < queries; lane += kW) {",
        new="for (int64_t lane = 0; lane + kW <= queries; lane += kW) {",
        tests=("tests/ops/test_attention_kernels.py",),
    ),
    Fault(
        name="dropout of a packed batch forgets which sequence it is in",
        path="csrc/ops/attention_cpu.cpp",
        old="p.first_batch = b;",
        new="p.first_batch = 0;",
        tests=("tests/ops/test_attention_kernels_packed.py",),
    ),
    Fault(
        name="the key of a launch forgets strides",
        path="csrc/triton/launch_cache.cpp",
        old="{tensor.sizes(), tensor.strides()}",
        new="{tensor.sizes(), tensor.sizes()}",
        tests=(
            "tests/ops/test_launching.py",
            "tests/ops/test_launching_attention.py",
        ),
    ),
    Fault(
        name="an op takes a weight of any size",
        path="csrc/ops/norm.cpp",
        old='check("weight", weight).floating().on_device_of(x).sizes({x.sym_size(-1)});',
        new='check("weight", weight).floating().on_device_of(x);',
        tests=(
            "tests/ops/test_op_arguments.py",
            "tests/ops/test_op_arguments_in_graphs.py",
        ),
    ),
    Fault(
        name="a target one past the vocabulary is read",
        path="csrc/ops/cross_entropy.cpp",
        old="targets[r] >= 0 && targets[r] < vocabulary,",
        new="targets[r] >= 0 && targets[r] <= vocabulary,",
        tests=(
            "tests/ops/test_cross_entropy.py",
            "tests/ops/test_every_op.py",
        ),
    ),
    Fault(
        name="a residual gets no gradient where the rows before the norm need none",
        path="csrc/ops/norm.cpp",
        old="{needs[0] || needs[1], needs[2], needs[3]}",
        new="{needs[0], needs[2], needs[3]}",
        tests=(
            "tests/ops/test_norm.py",
            "tests/ops/test_every_op.py",
        ),
    ),
    Fault(
        name="values join the cache a position too late",
        path="csrc/ops/decoder_session.cpp",
        old="const int64_t position = keys ? keys[r] - 1 : cache.length, s = r / span;",
        new="const int64_t position = keys ? keys[r] : cache.length, s = r / span;",
        tests=("tests/generation/test_speculative.py",),
    ),
    Fault(
        name="attention of torch.nn takes the keys' projection for the values",
        path="csrc/ops/multihead.cpp",
        old="append(project(value, 2, 1));",
        new="append(project(value, 1, 1));",
        tests=("tests/layers/test_multihead.py",),
    ),
    Fault(
        name="the gradients of a kernel may be differentiated again, to nothing",
        path="csrc/ops/node.h",
        old="refuse_second_derivative(name(), gradients, grads, saved, std::move(edges));",
        new="",
        tests=(
            "tests/ops/test_eager.py",
            "tests/ops/test_every_op.py",
        ),
    ),
    Fault(
        name="the gradient through ReLU and dropout is not scaled up",
        path="csrc/cpu/dropout.cpp",
        old="> 0 ? v * static_cast<A>(dropout.rate.scale) : Vector<A>{};",
        new="> 0 ? v : Vector<A>{};",
        tests=(
            "tests/ops/test_dropout.py",
            "tests/ops/test_every_op.py",
        ),
    ),
    Fault(
        name="eps of the std stands under the root",
        path="csrc/cpu/norm/forward.cpp",
        old="(std::sqrt(squares / (p.d - 1)) + p.eps)",
        new="std::sqrt(squares / (p.d - 1) + p.eps)",
        tests=(
            "tests/ops/test_norm.py",
            "tests/ops/test_every_op.py",
        ),
    ),
    Fault(
        name="the last rows add nothing to the gradient of the weight",
        path="csrc/cpu/norm/backward.cpp",
        old="for (; r < end; ++r) add_weights<1>(r, first, last, dw, db);",
        new="",
        tests=(
            "tests/ops/test_norm.py",
            "tests/ops/test_every_op.py",
        ),
    ),
    Fault(
        name="a token that fills a segment exactly gets no gradient",
        path="csrc/cpu/embedding/backward.cpp",
        old="else if (count <= kSegment)",
        new="else if (count < kSegment)",
        tests=(
            "tests/ops/test_embedding.py",
            "tests/ops/test_every_op.py",
        ),
    ),
    Fault(
        name="an id one past the vocabulary is looked up",
        path="csrc/cpu/embedding/forward.cpp",
        old="if (id >= 0 && id < call.vocabulary) return id;",
        new="if (id >= 0 && id <= call.vocabulary) return id;",
        tests=(
            "tests/ops/test_embedding.py",
            "tests/ops/test_every_op.py",
        ),
    ),
)
