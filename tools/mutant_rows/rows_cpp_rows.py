"""Faults in the C++ kernels besides attention."""

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
        name="a bias before dropout starts anew in each chunk of a wide row",
        path="csrc/cpu/dropout.cpp",
        old="v += load(offsets + column + c, count);",
        new="v += load(offsets + c, count);",
        tests=DROPOUT,
    ),
    Fault(
        name="the gradient through ReLU and dropout is not scaled up",
        path="csrc/cpu/dropout.cpp",
        old="> 0 ? v * static_cast<A>(dropout.rate.scale) : Vector<A>{};",
        new="> 0 ? v : Vector<A>{};",
        tests=DROPOUT,
    ),
    Fault(
        name="a row that ends with a chunk is not followed by the next one",
        path="csrc/cpu/dropout.cpp",
        old="if (column >= d) ++row, column = 0;",
        new="if (column > d) ++row, column = 0;",
        tests=DROPOUT,
    ),
    Fault(
        name="the gradient at the target forgets the smoothing",
        path="csrc/cpu/cross_entropy.cpp",
        old="* scale - even - (1 - smoothing));",
        new="* scale - even - 1);",
        tests=LOSS,
    ),
    Fault(
        name="the loss of a smoothed row is that of its sum, not of its mean",
        path="csrc/cpu/cross_entropy.cpp",
        old="smoothing * (lse - sum(sums) / vocabulary)",
        new="smoothing * (lse - sum(sums))",
        tests=LOSS,
    ),
    Fault(
        name="eps of the std stands under the root",
        path="csrc/cpu/norm/forward.cpp",
        old="(std::sqrt(squares / (p.d - 1)) + p.eps)",
        new="std::sqrt(squares / (p.d - 1) + p.eps)",
        tests=NORM,
    ),
    Fault(
        name="rows of a strided residual are added as if they were neighbours",
        path="csrc/cpu/norm/forward.cpp",
        old="if (x.stride == d && residual.stride == d && ",
        new="if (x.stride == d && ",
        tests=NORM,
    ),
    Fault(
        name="the slope of the std's gradient is that of the biased one",
        path="csrc/cpu/norm/backward.cpp",
        old="std::sqrt(hh[i] * (d - 1))",
        new="std::sqrt(hh[i] * d)",
        tests=NORM,
    ),
    Fault(
        name="the last rows add nothing to the gradient of the weight",
        path="csrc/cpu/norm/backward.cpp",
        old="for (; r < end; ++r) add_weights<1>(r, first, last, dw, db);",
        new="",
        tests=NORM,
    ),
    Fault(
        name="with dropout the gradient of the sum is lost",
        path="csrc/cpu/norm/backward.cpp",
        old="if constexpr (has_summed) gradient += load(summed_row + c, count);",
        new="if constexpr (has_summed && !kDrop) gradient += load(summed_row + c, count);",
        tests=NORM,
    ),
    Fault(
        name="a token that fills a segment exactly gets no gradient",
        path="csrc/cpu/embedding/backward.cpp",
        old="else if (count <= kSegment)",
        new="else if (count < kSegment)",
        tests=EMBEDDING,
    ),
    Fault(
        name="the scale of a frequent token's gradient is applied twice",
        path="csrc/cpu/embedding/backward.cpp",
        old="std::min(kSegment, count - s * kSegment), A(1));",
        new="std::min(kSegment, count - s * kSegment), scale);",
        tests=EMBEDDING,
    ),
    Fault(
        name="every sequence begins at the position of the first",
        path="csrc/cpu/embedding/forward.cpp",
        old="call.first_positions[sequence] : 0)",
        new="call.first_positions[0] : 0)",
        tests=EMBEDDING,
    ),
    Fault(
        name="an id one past the vocabulary is looked up",
        path="csrc/cpu/embedding/forward.cpp",
        old="if (id >= 0 && id < call.vocabulary) return id;",
        new="if (id >= 0 && id <= call.vocabulary) return id;",
        tests=EMBEDDING,
    ),
    Fault(
        name="of equal logits the last is the best",
        path="csrc/cpu/generation/topk.cpp",
        old="for (; place > 0 && row[i] > values[place - 1]; --place)",
        new="for (; place > 0 && row[i] >= values[place - 1]; --place)",
        tests=TOPK,
    ),
    Fault(
        name="of equal continuations that of the last slot comes first",
        path="csrc/cpu/generation/topk.cpp",
        old="std::upper_bound(",
        new="std::lower_bound(",
        tests=("tests/generation/test_topk.py", "tests/generation/test_search_steps.py"),
    ),
    Fault(
        name="ReLU is applied to sums of a part of the inputs",
        path="csrc/cpu/generation/step_linear.cpp",
        old="if (edges.last && edges.relu)",
        new="if (edges.relu)",
        tests=("tests/generation/test_step_linear.py",),
    ),
    Fault(
        name="a row with a NaN is quantised to zeros",
        path="csrc/cpu/generation/quantized_rows.h",
        old="{std::isfinite(most) ? 0 : std::numeric_limits<float>::quiet_NaN(), 0}",
        new="{0, 0}",
        tests=("tests/generation/test_quantized_linear.py",),
    ),
    Fault(
        name="the threshold of dropout is rounded down",
        path="csrc/philox.h",
        old="static_cast<uint32_t>(std::nearbyint(p * 65536.0))",
        new="static_cast<uint32_t>(p * 65536.0)",
        tests=DROPOUT,
    ),
    Fault(
        name="a second chunk of random bits begins at the first column",
        path="csrc/cpu/norm/backward.cpp",
        old="gradient = mask.template apply<A>(gradient, bits + c - start);",
        new="gradient = mask.template apply<A>(gradient, bits);",
        tests=NORM,
    ),
)
