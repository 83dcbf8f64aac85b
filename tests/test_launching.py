"""The short ways to launch a Triton kernel against Triton's own, without a GPU: a driver that only records.

The device number is one that no machine has, so that nothing compiled here is mistaken for a real GPU's.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from types import SimpleNamespace

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import configs

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are not launched", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
launching = pytest.importorskip("transformer_fast.kernels.launching")

run, run_again, Launch = launching.run, launching.run_again, launching.Launch

DEVICE, STREAM = 77, 4321


@triton.jit(do_not_specialize=["count"])
def _kernel(x, y, out, count, step, wide: tl.int64, factor, SIZE: tl.constexpr, DOUBLE: tl.constexpr):
    place = tl.arange(0, SIZE)
    value = tl.load(x + place * step + wide, mask=place < count, other=0.0) * factor
    if y is not None:
        value += tl.load(y + place)
    if DOUBLE:
        value *= 2
    tl.store(out + place, value)


CALLS: list[tuple] = []
FUNCTIONS = itertools.count(1)


class Launcher:
    """In place of Triton's: what a compiled kernel is started by."""

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        CALLS.append(arguments)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The driver calls made, each as the launcher of a compiled kernel gets it."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    utils = SimpleNamespace(
        load_binary=lambda *binary: ("module", next(FUNCTIONS), 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        unload_module=lambda module: None,
    )
    fake = SimpleNamespace(
        utils=utils,
        launcher_cls=Launcher,
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: STREAM,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(launching, "_CALLS", {})
    CALLS.clear()
    return CALLS


def seen(call):
    """What a driver call does: grid, stream, function, options and arguments; tensors as the pointers they become."""
    return (*call[:6], [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in call[9:]])


def launch_of(x, y, out, **changes):
    arguments = {"x": x, "y": y, "out": out, "count": 5, "step": 2, "wide": 3, "factor": 0.5, "SIZE": 16}
    return Launch("test", _kernel, 7, arguments | {"DOUBLE": False} | changes, num_warps=4, num_stages=1)


def floats(*shape, offset=0):
    return torch.zeros(torch.Size(shape).numel() + 4)[offset:][: torch.Size(shape).numel()].view(shape)


def test_the_driver_gets_what_triton_gives_it(launched):
    """Whatever Triton specialises on: no two of its kernels are taken for one, and arguments keep their order."""
    x, aside = floats(64), floats(64, offset=1)
    assert x.data_ptr() % 16 == 0 and aside.data_ptr() % 16 == 4
    integers = (0, 1, 2, 15, 16, 17, 33, -16, 2**31 - 1, -(2**31), 2**31, 2**40, -(2**40), 2**63)
    launches = [launch_of(*given) for given in itertools.product((x, aside), (x, aside, None), (x, aside))]
    launches += [launch_of(x.to(kind), x, x) for kind in (torch.float16, torch.bfloat16, torch.int64)]
    launches += [launch_of(x, x, x, **{name: n}) for name in ("count", "step", "wide") for n in integers[:-1]]
    launches += [launch_of(x, x, x, count=integers[-1])]
    launches += [launch_of(x, x, x, factor=2.0), launch_of(x, x, x, SIZE=32), launch_of(x, x, x, DOUBLE=True)]
    launches += [launch_of(x, x, x, another=1)]
    launches += [Launch("test", _kernel, 3, launches[0].arguments, *options) for options in ((2, 2), (4, 1, 64))]
    run(launches, x)
    launched.clear()
    run(launches, x)
    ours = list(launched)
    launched.clear()
    for launch in launches:
        arguments = {name: value for name, value in launch.arguments.items() if name != "another"}
        launch.kernel[(launch.grid,)](**arguments, **launch.options())
    assert len(ours) == len(launches)
    assert all(call[6:9] == (None, None, None) for call in ours), "the long way was taken"
    for launch, short, long in zip(launches, ours, launched, strict=True):
        assert seen(short) == seen(long), launch.arguments


def test_the_package_kernels_too(launched):
    """As above, for a kernel of each file that launches often, in two lengths that must not compile twice."""
    from transformer_fast.kernels import attention_backward, dropout, norm

    seed, first = torch.tensor([3]), None
    for rows in (24, 37):
        x, vector, sums = floats(rows, 64), floats(64), floats(rows)
        q, logsumexp = floats(1, 2, rows, 16), floats(1, 2, rows)
        mask = {"keep": None, "key_keep": None, "lengths": None, "bias": None, "causal": 0, "scale": 0.5}
        mask |= {"dropout_p": 0.0, "seed": None, "zero_empty_rows": False}
        backward = attention_backward.backward_launches(
            q, q, q, q, logsumexp, (q, q), (q, q, q), attention_backward.row_buffers(q, logsumexp, None), "sm90", mask
        )
        launches = [
            norm.forward_launch(x, x, vector, vector, x, x, sums, sums, 1e-5, False, 0.1, seed),
            dropout.forward_launch(x, None, None, x, True, 0.1, seed),
            backward[0],
        ]
        run(launches, x)
        launched.clear()
        run(launches, x)
        ours = list(launched)
        launched.clear()
        for launch in launches:
            launch.kernel[(launch.grid,)](**launch.arguments, **launch.options())
        assert list(map(seen, ours)) == list(map(seen, launched))
        kernels = [call[4] for call in ours]
        assert first in (None, kernels), "a new length compiled something"
        first = kernels


def call_twice(launched, first, second, scalars=(), prepare=None):
    """Two calls of run_again on inputs (x, y) and an output; what the second launched, and how often each prepared."""
    prepared = []

    def counted(*tensors):
        prepared.append(tensors)
        return prepare(*tensors) if prepare else [launch_of(*tensors), launch_of(tensors[1], None, tensors[2])]

    run_again(scalars, first[:2], first[2:], counted)
    launched.clear()
    run_again(scalars, second[:2], second[2:], counted)
    return [seen(call)[-1][:3] for call in launched], len(prepared)


def test_a_call_like_an_earlier_one_only_gets_new_pointers(launched):
    a, b, c, d, e, f = (floats(64) for _ in range(6))
    calls, prepared = call_twice(launched, (a, b, c), (d, e, f))
    x, y, out = (t.data_ptr() for t in (d, e, f))
    assert prepared == 1 and calls == [[x, y, out], [y, None, out]]
    assert all(call[:4] == (7, 1, 1, STREAM) and call[6:9] == (None, None, None) for call in launched)


def test_one_tensor_given_twice_is_not_two_forever(launched):
    a, b, c, d, e = (floats(64) for _ in range(5))
    calls, prepared = call_twice(launched, (a, a, b), (c, d, e))
    assert prepared == 1 and calls[0] == [t.data_ptr() for t in (c, d, e)]


@pytest.mark.parametrize("what", ["shape", "stride", "dtype", "None", "alignment"])
def test_another_layout_is_another_call(launched, what):
    a, b, c, d = (floats(8, 8) for _ in range(4))
    other = {
        "shape": floats(4, 16),
        "stride": d.t(),
        "dtype": d.half(),
        "None": None,
        "alignment": floats(8, 8, offset=1),
    }[what]
    calls, prepared = call_twice(launched, (a, b, c), (d, other, c), prepare=lambda x, y, out: [launch_of(x, y, out)])
    assert prepared == 2 and calls[0] == [d.data_ptr(), other if other is None else other.data_ptr(), c.data_ptr()]


def test_a_call_that_copies_is_prepared_each_time(launched):
    a, b, c = (floats(64) for _ in range(3))
    copies = []

    def prepare(x, y, out):
        copies.append(x.clone())
        return [launch_of(copies[-1], y, out)]

    calls, prepared = call_twice(launched, (a, b, c), (a, b, c), prepare=prepare)
    assert prepared == 2 and calls[0][0] == copies[-1].data_ptr()


def test_what_is_derived_from_contents_is_kept_until_they_change(launched):
    """A map of a mask is made once for many calls, and anew for another mask or when the mask was written to."""
    x, mask, other = floats(64), floats(64), floats(64)
    made = []

    def prepare(x, mask, out):
        made.append(mask.clone())
        return [launch_of(x, made[-1], out)]

    def call(mask, derived):
        out = floats(64)
        run_again((), (x, mask), (out,), prepare, sources=(mask,), derived=derived)
        assert seen(launched[-1])[-1][:3] == [x.data_ptr(), made[-1].data_ptr(), out.data_ptr()]
        return len(made)

    named = frozenset({"y"})
    assert [call(mask, named), call(mask, named), call(mask.view(64), named)] == [1, 1, 1]
    assert launched[-1][6:9] == (None, None, None)
    assert call(other, named) == 2
    mask.add_(1)
    assert [call(mask, named), call(mask, named)] == [3, 3]
    unnamed = floats(64)
    assert [call(unnamed, frozenset()), call(unnamed, frozenset())] == [4, 5], "any other tensor may be a copy"
    with torch.inference_mode():
        uncounted = floats(64)
        assert [call(uncounted, named), call(uncounted, named)] == [6, 7]


def test_a_changed_tile_table_forgets_what_was_prepared(launched, monkeypatch):
    a, b, c = (floats(64) for _ in range(3))
    assert call_twice(launched, (a, b, c), (a, b, c))[1] == 1
    monkeypatch.setitem(configs.NORM, ("forward", 64), configs.NORM["forward", 64])
    assert call_twice(launched, (a, b, c), (a, b, c))[1] == 1
    assert call_twice(launched, (a, b, c), (a, b, c), scalars=(2.0,))[1] == 1
    assert call_twice(launched, (a, b, c), (a, b, c))[1] == 0


def test_calls_remembered_are_bounded(launched, monkeypatch):
    monkeypatch.setattr(launching, "MOST_CALLS", 3)
    for length in range(16, 48):
        run_again((), (floats(length),), (floats(length),), lambda x, out: [launch_of(x, None, out)])
        assert len(launching._CALLS) <= 3


@pytest.mark.parametrize("why", ["enter hook", "exit hook", "debug", "pre-run hook", "another Triton"])
def test_where_the_short_ways_are_not_taken(launched, monkeypatch, why):
    """Everything goes through Triton while someone watches, and with a Triton that is not known."""
    x = floats(64)

    def again():
        run_again((), (x,), (), lambda x: [launch_of(x, None, x)])

    again()
    again()
    assert launched[-1][6:9] == (None, None, None)
    runtime, watched = triton.knobs.runtime, []
    if why == "enter hook":
        monkeypatch.setattr(runtime.launch_enter_hook, "calls", [watched.append])
    elif why == "exit hook":
        monkeypatch.setattr(runtime.launch_exit_hook, "calls", [watched.append])
    elif why == "debug":
        monkeypatch.setattr(runtime, "debug", True)
    elif why == "pre-run hook":
        monkeypatch.setattr(_kernel, "pre_run_hooks", [lambda *args, **kwargs: watched.append(args)])
    else:
        monkeypatch.setattr(launching, "SHORT_WAY", False)
    again()
    run([launch_of(x, None, x)], x)
    assert all(call[7] is runtime.launch_enter_hook for call in launched[-2:])
    assert len(watched) == (2 if why == "pre-run hook" else 0)  # the recording driver calls no other hook


def outcomes(calls, given):
    """Driver calls with every pointer named: the input it is of, or in what order it first came."""
    names = {t.data_ptr(): name for name, t in given.items()}
    return [
        [names.setdefault(v, f"new {len(names)}") if isinstance(v, int) and v > 2**32 else v for v in seen(call)[-1]]
        for call in calls
    ], [call[:5] for call in calls]


@functools.cache
def key_keep():
    """A mask that many calls share, and what is derived from it."""
    return torch.ones(1, 1, 1, 40, dtype=torch.bool)


def layer(name):
    """A call of a launcher on new tensors, which it gives by name."""
    from transformer_fast.kernels import (
        attention,
        attention_backward,
        attention_decode,
        attention_grad_bias,
        attention_weights,
        dropout,
        norm,
        norm_backward,
    )

    x, y, weight, bias = floats(24, 64), floats(24, 64), floats(64), floats(64)
    mean, rstd, seed = floats(24), floats(24), torch.tensor([3])
    q, k, lse, added = floats(1, 4, 8, 16), floats(1, 2, 40, 16), floats(1, 4, 8), floats(1, 4, 1, 40)
    lengths, pages = torch.tensor([33], dtype=torch.int32), torch.zeros(1, 9, dtype=torch.int32)
    mask = {"keep": None, "key_keep": None, "lengths": lengths, "bias": added, "causal": None, "scale": 0.5}
    mask |= {"dropout_p": 0.1, "seed": seed, "zero_empty_rows": False}
    padded = mask | {"bias": None, "lengths": None, "key_keep": key_keep()}
    rows, ends = [floats(24, 4, 16) for _ in range(5)], torch.tensor([0, 9, 24], dtype=torch.int32)
    ragged = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_q": 15, "max_k": 15, "causal": True, "scale": 0.5}
    ragged |= {"dropout_p": 0.0, "seed": None, "zero_empty_rows": False}
    back = attention_backward.attention_packed_backward
    calls = {
        "attention": lambda: attention.attention_forward(q, k, k, **padded),
        "attention backward": lambda: attention_backward.attention_backward(q, q, k, k, q, lse, **padded),
        "packed": lambda: attention.attention_packed_forward(*rows[:3], **ragged),
        "packed backward": lambda: back(*rows, lse, **ragged),
        "norm": lambda: norm.norm_forward(x, y, weight, bias, 1e-5, False, 0.1, seed),
        "norm backward": lambda: norm_backward.norm_backward(x, None, y, weight, mean, rstd, True, 0.1, seed, True),
        "dropout": lambda: dropout.dropout_forward(x, bias, y, True, 0.1, seed),
        "dropout backward": lambda: dropout.dropout_backward(x, y, True, 0.1, seed, True),
        "weights": lambda: attention_weights.attention_weights(q, k, lse, **mask),
        "grad_bias": lambda: attention_grad_bias.attention_grad_bias(q, q, k, k, q, lse, **mask),
        "decode": lambda: attention_decode.attention_decode(
            q, k.transpose(1, 2), k.transpose(1, 2), lengths=lengths, page_table=pages, causal=True, scale=0.5
        ),
    }
    return calls[name], {
        "x": x, "y": y, "weight": weight, "bias": bias, "mean": mean, "rstd": rstd, "seed": seed, "q": q, "k": k,
        **{f"rows {n}": t for n, t in enumerate(rows)}, "ends": ends, "lse": lse, "added": added,
        "lengths": lengths, "pages": pages,
    }  # fmt: skip


LAYERS = ("attention", "packed", "norm", "dropout")
FORWARD_ONLY = ("weights", "grad_bias", "decode")


@pytest.mark.parametrize("name", [*LAYERS, *(f"{name} backward" for name in LAYERS), *FORWARD_ONLY])
def test_launchers_do_again_what_they_did(launched, monkeypatch, name):
    """A launcher's second call, on other tensors of the same layouts, prepares nothing and launches the same."""
    monkeypatch.setattr(launching, "SHORT_WAY", False)
    call, given = layer(name)
    call()
    long, long_given = list(launched), given
    monkeypatch.setattr(launching, "SHORT_WAY", True)
    layer(name)[0]()
    monkeypatch.setattr(launching, "_prepare_and_run", None)
    launched.clear()
    call, given = layer(name)
    call()
    # The long way made what is derived from the mask first.
    assert outcomes(launched, given) == outcomes(long[-len(launched) :], long_given)
    assert launched and all(call[6:9] == (None, None, None) for call in launched)


@pytest.fixture
def on_a_gpu(launched, monkeypatch):
    """The doors take the Triton kernels, as on a GPU, on CPU tensors that only the recording driver gets."""
    from transformer_fast import backends

    monkeypatch.setattr(backends, "_obstacle", lambda *_: None)
    backends._resolved.cache_clear()
    with tfast.backend("triton"):
        yield launched
    backends._resolved.cache_clear()


def masks():
    lengths = torch.tensor([9, 17])
    return {
        "no mask": None,
        "lengths": tfast.AttentionMask.lengths(lengths),
        "padding": tfast.AttentionMask.keep((torch.arange(24) < lengths[:, None])[:, None, None]),
        "causal": tfast.AttentionMask.causal(),
    }


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("name", masks())
def test_a_whole_call_of_attention_takes_the_short_way(on_a_gpu, monkeypatch, name, dropout_p):
    """From the second call on: nothing is checked in Python, nothing prepared, and the gradient is found in C++."""
    attention = sys.modules["transformer_fast.ops.attention"]
    mask = masks()[name]
    q, k, v = (floats(2, 4, 24, 32).requires_grad_() for _ in range(3))

    def call():
        on_a_gpu.clear()
        out = tfast.attention(q, k, v, mask, dropout_p=dropout_p)
        forward = len(on_a_gpu)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return out.grad_fn.name(), forward, len(on_a_gpu)

    call()
    call()  # what is derived from the mask is made once, and the call after that finds it
    monkeypatch.setattr(attention, "check_inputs", None)
    monkeypatch.setattr(attention, "_autograd", None)
    monkeypatch.setattr(launching, "_prepare_and_run", None)
    node, forward, both = call()
    assert "Attention" in node and (forward, both) == (1, 4)
    assert all(driver_call[6:9] == (None, None, None) for driver_call in on_a_gpu)


def test_the_seed_of_a_launch_is_a_number_that_backward_gets_again(on_a_gpu):
    from transformer_fast.ops import _library

    q, k, v = (floats(2, 4, 24, 32).requires_grad_() for _ in range(3))
    for _ in range(2):
        torch.manual_seed(6)
        on_a_gpu.clear()
        out = tfast.attention(q, k, v, dropout_p=0.1)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.manual_seed(6)
        number = _library.draw_seed(torch.device("cpu")).item()
        launches = [seen(driver_call)[-1] for driver_call in on_a_gpu]
        assert [number in arguments for arguments in launches] == [True, False, True, True], "delta has no dropout"


def test_a_captured_graph_draws_its_seed_on_the_device(monkeypatch):
    """A number would be one mask for every replay."""
    from transformer_fast.ops import _library

    drawn = torch.tensor([5])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(_library, "draw_seed", lambda device: drawn)
    assert _library.draw_launch_seed(torch.device("cuda"), as_number=True) is drawn
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert isinstance(_library.draw_launch_seed(torch.device("cuda"), as_number=True), int)


def test_new_lengths_compile_nothing(on_a_gpu):
    """Sentences of any length, with and without a mask: the functions started are those of the first call."""
    started = {}
    for length in (17, 24, 31, 40, 64, 97):
        lengths = torch.tensor([length, length // 2])
        for name, mask in (("none", None), ("lengths", tfast.AttentionMask.lengths(lengths))):
            q, k, v = (floats(2, 4, length, 32).requires_grad_() for _ in range(3))
            on_a_gpu.clear()
            out = tfast.attention(q, k, v, mask, dropout_p=0.1)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            functions = [driver_call[4] for driver_call in on_a_gpu]
            assert started.setdefault(name, functions) == functions, f"length {length}"
