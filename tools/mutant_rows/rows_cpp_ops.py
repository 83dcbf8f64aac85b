"""Faults in the ops of C++: what stands between tensors and kernels."""

from .fault import Fault

PARTS = ("tests/ops/test_attention_parts.py",)
LOSS = ("tests/ops/test_cross_entropy.py", "tests/ops/test_every_op.py")
NORM = ("tests/ops/test_norm.py", "tests/ops/test_every_op.py")
DROPOUT = ("tests/ops/test_dropout.py", "tests/ops/test_every_op.py")
LAUNCHING = (
    "tests/ops/test_launching.py",
    "tests/ops/test_launching.py",
    "tests/ops/test_launching_attention.py",
)
SEARCH = ("tests/generation/test_search_steps.py", "tests/generation/test_fused.py")

ROWS = (
    Fault(
        name="the gradient of sinks forgets that of the logsumexp",
        path="csrc/ops/attention.cpp",
        old="if (grad_logsumexp) grad = grad - *grad_logsumexp;",
        new="",
        tests=PARTS,
    ),
    Fault(
        name="weights are kept for the backward though scores are capped",
        path="csrc/ops/attention_cpu.cpp",
        old="params.distance_bias || params.softcap || bias->size(2) == 1",
        new="params.distance_bias || bias->size(2) == 1",
        tests=PARTS,
    ),
    Fault(
        name="the gradient of a bias beside a softcap goes through the cap",
        path="csrc/ops/attention_cpu.cpp",
        old="scores <= kMaxSavedScores && !params.softcap)",
        new="scores <= kMaxSavedScores)",
        tests=PARTS,
    ),
    Fault(
        name="distances of a packed batch are counted from the end of each sequence",
        path="csrc/ops/attention_cpu.cpp",
        old="distance_view<const A>(params.distance_bias, params.packed.max_q.expect_int() - 1)",
        new="distance_view<const A>(params.distance_bias, p.Lq - 1)",
        tests=PARTS,
    ),
    Fault(
        name="distances in a cache are counted from its longest sequence",
        path="csrc/ops/attention_decode.cpp",
        old="distance_view<const A>(params.distance_bias, params.capacity() - 1)",
        new="distance_view<const A>(params.distance_bias, p.Lk - 1)",
        tests=("tests/ops/test_attention_decode.py", "tests/ops/test_attention_parts.py"),
    ),
    Fault(
        name="a launch of decoding is replayed with another softcap",
        path="csrc/ops/attention_decode.cpp",
        old="    call.scalar(params.softcap);\n",
        new="",
        tests=LAUNCHING,
    ),
    Fault(
        name="the key of a launch forgets strides",
        path="csrc/triton/launch_cache.cpp",
        old="{tensor.sizes(), tensor.strides()}",
        new="{tensor.sizes(), tensor.sizes()}",
        tests=LAUNCHING,
    ),
    Fault(
        name="a launch is replayed after its mask was written to",
        path="csrc/triton/launch_cache.cpp",
        old="== base.unsafeGetTensorImpl() && source.version == base._version();",
        new="== base.unsafeGetTensorImpl();",
        tests=LAUNCHING,
    ),
    Fault(
        name="a launch of attention is replayed with another window",
        path="csrc/triton/attention.cpp",
        old="  call.scalar(known(params.window));\n",
        new="",
        tests=LAUNCHING,
    ),
    Fault(
        name="the gradient of the output layer is that of the last chunk",
        path="csrc/ops/cross_entropy.cpp",
        old="accumulate(grad_weight, logits.t(), chunk, scale, start > 0);",
        new="accumulate(grad_weight, logits.t(), chunk, scale, false);",
        tests=LOSS,
    ),
    Fault(
        name="a target one past the vocabulary is read",
        path="csrc/ops/cross_entropy.cpp",
        old="targets[r] >= 0 && targets[r] < vocabulary,",
        new="targets[r] >= 0 && targets[r] <= vocabulary,",
        tests=LOSS,
    ),
    Fault(
        name="a second backward of the loss is scaled twice",
        path="csrc/ops/cross_entropy.cpp",
        old="scaled ? gradient : ends ? gradient.mul_(scale) : gradient * scale;",
        new="scaled ? gradient : gradient.mul_(scale);",
        tests=LOSS,
    ),
    Fault(
        name="with ReLU the residual is lost",
        path="csrc/ops/dropout.cpp",
        old="return relu && residual ? residual->add(out) : out;",
        new="return out;",
        tests=DROPOUT,
    ),
    Fault(
        name="a bias of another width before dropout passes the fast path",
        path="csrc/ops/dropout.cpp",
        old="if (bias && (bias->dim() != 1 || bias->size(0) != x.size(-1))) return py::none();",
        new="if (bias && bias->dim() != 1) return py::none();",
        tests=("tests/ops/test_dropout.py", "tests/ops/test_wrong_inputs.py"),
    ),
    Fault(
        name="a residual gets no gradient where the rows before the norm need none",
        path="csrc/ops/norm.cpp",
        old="{needs[0] || needs[1], needs[2], needs[3]}",
        new="{needs[0], needs[2], needs[3]}",
        tests=NORM,
    ),
    Fault(
        name="the residual before a norm gets the gradient through the dropout",
        path="csrc/ops/norm.cpp",
        old="options.dropout_p > 0 ? grad_residual",
        new="false ? grad_residual",
        tests=NORM,
    ),
    Fault(
        name="steps of a search go on behind EOS",
        path="csrc/ops/search_steps.cpp",
        old="open = open && chosen[row] != eos && std::isfinite",
        new="open = open && std::isfinite",
        tests=SEARCH,
    ),
    Fault(
        name="rows of their own lengths stand still over several steps",
        path="csrc/ops/search_steps.cpp",
        old="    if (keys) keys->add_(1);\n",
        new="",
        tests=("tests/generation/test_speculative.py", "tests/generation/test_continuous.py"),
    ),
    Fault(
        name="values join the cache a position too late",
        path="csrc/ops/decoder_step.cpp",
        old="const int64_t position = keys ? keys[r] - 1 : length, s = r / span;",
        new="const int64_t position = keys ? keys[r] : length, s = r / span;",
        tests=("tests/generation/test_speculative.py", "tests/generation/test_continuous.py"),
    ),
    Fault(
        name="a fused step of post-norm layers leaves out the last residual",
        path="csrc/ops/decoder_step.cpp",
        old="return norm(kNorm3, linear(kFeedOut, activated(linear(kFeedIn, x, relu()))), x).out;",
        new="return norm(kNorm3, linear(kFeedOut, activated(linear(kFeedIn, x, relu()))), {}).out;",
        tests=("tests/generation/test_fused.py",),
    ),
    Fault(
        name="gelu is taken for swish in a fused step",
        path="csrc/ops/decoder_step.cpp",
        old='return activation == "swish" ? at::silu(inner) : at::gelu(inner);',
        new="return at::silu(inner);",
        tests=("tests/generation/test_fused.py",),
    ),
    Fault(
        name="the table of positions gets its gradient at the wrong rows",
        path="csrc/ops/embedding.cpp",
        old="{0, 0, offset, length - offset - rows}",
        new="{0, 0, 0, length - rows}",
        tests=("tests/ops/test_embedding.py",),
    ),
    Fault(
        name="the gradient of the table of positions forgets dropout",
        path="csrc/ops/embedding.cpp",
        old="table.gradient(dropped(grads[0], p, seed), offsets);",
        new="table.gradient(grads[0], offsets);",
        tests=("tests/ops/test_embedding.py",),
    ),
    Fault(
        name="seeds are never negative",
        path="csrc/ops/seed.cpp",
        old="constexpr int64_t low = std::numeric_limits<int64_t>::min();",
        new="constexpr int64_t low = 0;",
        tests=("tests/ops/test_eager.py", "tests/ops/test_dropout.py"),
    ),
    Fault(
        name="attention of torch.nn takes the keys' projection for the values",
        path="csrc/ops/multihead.cpp",
        old="append(project(value, 2, 1));",
        new="append(project(value, 1, 1));",
        tests=("tests/layers/test_multihead.py",),
    ),
    Fault(
        name="a tensor that forward-mode differentiation follows counts as plain",
        path="csrc/ops/eager_call.h",
        old="return is_plain(tensor, any_device_) && !has_tangent(tensor) ? tensor : refused();",
        new="return is_plain(tensor, any_device_) ? tensor : refused();",
        tests=("tests/ops/test_eager.py", "tests/ops/test_tensor_transforms.py"),
    ),
    Fault(
        name="the gradients of a kernel may be differentiated again, to nothing",
        path="csrc/ops/node.h",
        old="if (at::GradMode::is_enabled()) refuse_second_derivative(name(), gradients, grads, saved);",
        new="",
        tests=("tests/ops/test_eager.py", "tests/ops/test_every_op.py"),
    ),
    Fault(
        name="a tensor of inference mode is saved as it is",
        path="csrc/ops/node.h",
        old="if (!tensor.defined() || !tensor.is_inference()) return tensor;",
        new="return tensor;",
        tests=("tests/ops/test_inference_mode.py",),
    ),
)
