"""The fast path to launch a Triton kernel against Triton's own, without a GPU: a driver that only records.

A call of a launcher that repeats an earlier one only gets other pointers: what is kept, and when it is forgotten.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import weakref

import pytest
import torch

from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.triton import configs

recording = pytest.importorskip("recording_driver")
triton = pytest.importorskip("triton")
launching = pytest.importorskip("transformer_fast.triton.launcher")
cached = pytest.importorskip("transformer_fast.triton.launch_cache")
launched, seen, floats, launch_of = recording.launched, recording.seen, recording.floats, recording.launch_of
outcomes = recording.outcomes
run, run_cached, STREAM = launching.run, cached.run_cached, recording.STREAM
launch_cache, Launch = launching.launch_cache, launching.Launch


def by_both(launches, x, launched):
    """Return what the driver got from a repeated launch of each; in ``launched`` is then what it gets from Triton."""
    run(launches, x)
    launched.clear()
    run(launches, x)
    ours = list(launched)
    launched.clear()
    for launch in launches:
        arguments = {name: value for name, value in launch.arguments.items() if name != "another"}
        launch.kernel[(launch.grid,)](**arguments, **launch.options())
    return ours


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
    launches += [
        Launch("test", recording.kernel, 3, launches[0].arguments, *options) for options in ((2, 2), (4, 1, 64))
    ]
    ours = by_both(launches, x, launched)
    assert len(ours) == len(launches)
    assert all(call[6:9] == (None, None, None) for call in ours), "the fast path was not taken"
    for launch, short, long in zip(launches, ours, launched, strict=True):
        assert seen(short) == seen(long), launch.arguments


def test_the_package_kernels_too(launched):
    """As above, for a kernel of each file that launches often, in two lengths that must not compile twice."""
    from transformer_fast.triton import dropout, norm
    from transformer_fast.triton.attention import backward

    seed, first = torch.tensor([3]), None
    for rows in (24, 37):
        x, vector, sums = floats(rows, 64), floats(64), floats(rows)
        q, logsumexp = floats(1, 2, rows, 16), floats(1, 2, rows)
        inputs, outputs = (
            (q, q, q, q, q, logsumexp, None, None),
            (q, q, q, *backward.row_buffers(q, logsumexp, AttentionParams())),
        )
        grad_q, _ = backward.backward_launches(inputs, outputs, AttentionParams(causal=0, scale=0.5), "sm90")
        launches = [
            norm.forward_launch(x, x, vector, vector, x, x, sums, sums, 1e-5, False, 0.1, seed),
            dropout.forward_launch(x, None, None, x, True, 0.1, seed),
            grad_q,
        ]
        ours = by_both(launches, x, launched)
        assert list(map(seen, ours)) == list(map(seen, launched))
        kernels = [call[4] for call in ours]
        assert first in (None, kernels), "a new length compiled something"
        first = kernels


def call_twice(launched, first, second, scalars=(), prepare=None):
    """Two calls of run_cached on inputs (x, y) and an output; what the second launched, and how often each prepared."""
    prepared = []

    def counted(*tensors):
        prepared.append(tensors)
        return prepare(*tensors) if prepare else [launch_of(*tensors), launch_of(tensors[1], None, tensors[2])]

    run_cached(scalars, first[:2], first[2:], counted)
    launched.clear()
    run_cached(scalars, second[:2], second[2:], counted)
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
        run_cached((), (x, mask), (out,), prepare, sources=(mask,), derived=derived)
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


def call_on(mask):
    """A call that derives a tensor from a mask, which is kept on the mask."""
    x, derived = floats(64), []

    def prepare(x, mask, out):
        derived.append(weakref.ref(copied := mask.clone()))
        return [launch_of(x, copied, out)]

    run_cached((), (x, mask), (floats(64),), prepare, sources=(mask,), derived=frozenset({"y"}))
    return derived[0]


def test_what_is_derived_from_a_mask_is_freed_with_it(launched):
    mask = floats(64)
    derived = call_on(mask)
    launched.clear()
    assert derived() is not None
    del mask
    assert derived() is None


def test_a_mask_on_which_calls_are_kept_can_be_copied_and_saved(launched, tmp_path):
    mask = floats(64)
    call_on(mask)
    torch.save(mask, tmp_path / "mask.pt")
    for copied in (copy.deepcopy(mask), torch.load(tmp_path / "mask.pt")):
        assert torch.equal(copied, mask)
        derived = call_on(copied)
        launched.clear()
        assert derived() is not None


def test_a_changed_tile_table_forgets_what_was_prepared(launched, monkeypatch):
    a, b, c = (floats(64) for _ in range(3))
    assert call_twice(launched, (a, b, c), (a, b, c))[1] == 1
    monkeypatch.setitem(configs.NORM, ("forward", 64), configs.NORM["forward", 64])
    assert call_twice(launched, (a, b, c), (a, b, c))[1] == 1
    assert call_twice(launched, (a, b, c), (a, b, c), scalars=(2.0,))[1] == 1
    assert call_twice(launched, (a, b, c), (a, b, c))[1] == 0


def test_cached_calls_are_bounded(launched, monkeypatch):
    monkeypatch.setattr(launch_cache, "most_calls", 3)
    for length in range(16, 48):
        run_cached((), (floats(length),), (floats(length),), lambda x, out: [launch_of(x, None, out)])
        assert len(launch_cache) <= 3


@pytest.mark.parametrize("why", ["enter hook", "exit hook", "debug", "pre-run hook", "another Triton"])
def test_where_nothing_is_replayed(launched, monkeypatch, why):
    """Everything goes through Triton while someone watches, and with a Triton that is not known."""
    x = floats(64)

    def again():
        run_cached((), (x,), (), lambda x: [launch_of(x, None, x)])

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
        monkeypatch.setattr(recording.kernel, "pre_run_hooks", [lambda *args, **kwargs: watched.append(args)])
    else:
        monkeypatch.setattr(launch_cache, "enabled", False)
    again()
    run([launch_of(x, None, x)], x)
    assert all(call[7] is runtime.launch_enter_hook for call in launched[-2:])
    assert len(watched) == (2 if why == "pre-run hook" else 0)  # the recording driver calls no other hook


@functools.cache
def key_keep():
    """A mask that many calls share, and what is derived from it."""
    return torch.ones(1, 1, 1, 40, dtype=torch.bool)


def layer(name):
    """A call of a launcher on new tensors, which it gives by name."""
    from transformer_fast.triton import dropout, norm, norm_backward
    from transformer_fast.triton.attention import backward, decode, forward, grad_bias, weights

    x, y, weight, bias = floats(24, 64), floats(24, 64), floats(64), floats(64)
    mean, rstd, seed = floats(24), floats(24), torch.tensor([3])
    q, k, lse, added = floats(1, 4, 8, 16), floats(1, 2, 40, 16), floats(1, 4, 8), floats(1, 4, 1, 40)
    lengths, pages = torch.tensor([33], dtype=torch.int32), torch.zeros(1, 9, dtype=torch.int32)
    mask = AttentionParams(lengths=lengths, bias=added, scale=0.5, dropout_p=0.1, seed=seed)
    padded = dataclasses.replace(mask, bias=None, lengths=None, key_keep=key_keep())
    rows, ends = [floats(24, 4, 16) for _ in range(5)], torch.tensor([0, 9, 24], dtype=torch.int32)
    ragged = AttentionParams(causal=0, scale=0.5, packed=PackedBatch(ends, ends, 15, 15))
    calls = {
        "attention": lambda: forward.attention_forward(q, k, k, padded),
        "attention backward": lambda: backward.attention_backward(q, q, k, k, q, lse, padded),
        "packed": lambda: forward.attention_forward(*rows[:3], ragged),
        "packed backward": lambda: backward.attention_backward(*rows, lse, ragged),
        "norm": lambda: norm.norm_forward(x, y, weight, bias, 1e-5, "layer", 0.1, seed),
        "norm backward": lambda: norm_backward.norm_backward(x, None, y, weight, mean, rstd, "std", 0.1, seed, True),
        "dropout": lambda: dropout.dropout_forward(x, bias, y, True, 0.1, seed),
        "dropout backward": lambda: dropout.dropout_backward(x, y, True, 0.1, seed, True),
        "weights": lambda: weights.attention_weights(q, k, lse, mask),
        "grad_bias": lambda: grad_bias.attention_grad_bias(q, q, k, k, q, lse, mask),
        "decode": lambda: decode.attention_decode(
            q, k.transpose(1, 2), k.transpose(1, 2), lengths, pages, *(None,) * 4, 0, None, None, 0.5
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
    monkeypatch.setattr(launch_cache, "enabled", False)
    call, given = layer(name)
    call()
    long, long_given = list(launched), given
    monkeypatch.setattr(launch_cache, "enabled", True)
    layer(name)[0]()
    monkeypatch.setattr(cached, "_prepare_and_run", None)
    launched.clear()
    call, given = layer(name)
    call()
    # The call before made what is derived from the mask first.
    assert outcomes(launched, given) == outcomes(long[-len(launched) :], long_given)
    assert launched and all(call[6:9] == (None, None, None) for call in launched)
