"""Fast launches of Triton kernels against Triton's launcher, without a GPU: the driver only records.

A call of a launcher that repeats an earlier one only gets other pointers: what is kept, and when it is forgotten.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import pytest
import torch

from transformer_fast.triton import configs

recording = pytest.importorskip("recording_driver")
triton = pytest.importorskip("triton")
launching = pytest.importorskip("transformer_fast.triton.launcher")
cached = pytest.importorskip("transformer_fast.triton.launch_cache")
launched, seen, floats, launch_of = recording.launched, recording.seen, recording.floats, recording.launch_of
outcomes = recording.outcomes
run, STREAM, Launch = launching.run, recording.STREAM, launching.Launch
launch_cache, extension = cached.launch_cache, cached.extension


def run_kept(scalars, inputs, outputs, prepare, sources=(), derived=frozenset()):
    """Call a launcher of these inputs, whose launches are `prepare(*inputs, *outputs)`."""
    call = cached.LaunchCall(repr(scalars), inputs, sources)
    cached.run_kept(call, outputs, lambda: prepare(*inputs, *outputs), derived)


def by_both(launches, launched):
    """Return the driver calls of replayed launches, and those of Triton."""
    replayed, by_triton = [], []
    for number, launch in enumerate(launches):

        def prepare(x, y, out, launch=launch):
            return [dataclasses.replace(launch, arguments=launch.arguments | {"x": x, "y": y, "out": out})]

        x, y, out = (launch.arguments[name] for name in ("x", "y", "out"))
        for calls in (by_triton, replayed):
            launched.clear()
            run_kept((number,), (x, y), (out,), prepare)
            calls += launched
    return replayed, by_triton


def test_the_driver_gets_what_triton_gives_it(launched):
    """Arguments of every kind keep their order and value."""
    x = floats(64)
    integers = (0, 1, 2, 15, 16, 17, 33, -16, 2**31 - 1, -(2**31), 2**31, 2**40, -(2**40), 2**63)
    launches = [launch_of(x, y, x) for y in (x, floats(64), None)]
    launches += [launch_of(x.to(kind), x, x) for kind in (torch.float16, torch.bfloat16, torch.int64)]
    launches += [launch_of(x, x, x, **{name: n}) for name in ("count", "step", "wide") for n in integers[:-1]]
    launches += [launch_of(x, x, x, count=integers[-1])]
    launches += [launch_of(x, x, x, factor=2.0), launch_of(x, x, x, SIZE=32), launch_of(x, x, x, DOUBLE=True)]
    launches += [launch_of(x, x, x, another=1)]
    launches += [
        Launch("test", recording.kernel, 3, launches[0].arguments, *options) for options in ((2, 2), (4, 1, 64))
    ]
    replayed, by_triton = by_both(launches, launched)
    assert len(replayed) == len(by_triton) == len(launches)
    assert all(call[6:9] == (None, None, None) for call in replayed), "not replayed"
    for launch, short, long in zip(launches, replayed, by_triton, strict=True):
        assert seen(short) == seen(long), launch.arguments


def test_sums_of_products_are_fused_whatever_triton_does_by_default():
    """Triton 3.9 warns where a launch leaves it open, and 3.10 is to decide otherwise."""
    assert Launch("one", recording.kernel, 1, {}, 4, 1).options()["enable_fp_fusion"] is True


def test_a_new_length_compiles_no_norm_and_no_dropout(launched):
    from transformer_fast.triton import dropout, norm

    seed, functions = torch.tensor([3]), []
    for rows in (24, 37):
        x, vector, sums = floats(rows, 64), floats(64), floats(rows)
        launched.clear()
        run([norm.forward_launch(x, x, vector, vector, x, x, sums, sums, 1e-5, False, 0.1, seed)], x)
        run([dropout.forward_launch(x, None, None, x, True, 0.1, seed)], x)
        functions.append([call[4] for call in launched])
    assert functions[0] == functions[1]


def test_another_set_of_wanted_outputs_is_another_call(launched):
    """A gradient with a bias, after the same gradient without one: on a GPU the bias gradient was never computed."""
    launch_cache.clear()
    grad, y, counts = floats(77, 100), floats(77, 100), []
    for has_bias in (False, True, False, True):
        launched.clear()
        torch.ops.transformer_fast.dropout_backward(grad, y, True, 0.3, torch.tensor([3]), has_bias)
        counts.append(len(launched))
    assert counts == [1, 2, 1, 2]


def call_twice(launched, first, second, scalars=(), prepare=None):
    """Call a launcher twice on inputs (x, y) and an output; return the second launch, and the number of preparations
    per call."""
    prepared = []

    def counted(*tensors):
        prepared.append(tensors)
        return prepare(*tensors) if prepare else [launch_of(*tensors), launch_of(tensors[1], None, tensors[2])]

    run_kept(scalars, first[:2], first[2:], counted)
    launched.clear()
    run_kept(scalars, second[:2], second[2:], counted)
    return [seen(call)[-1][:3] for call in launched], len(prepared)


def test_a_call_like_an_earlier_one_only_gets_new_pointers(launched):
    a, b, c, d, e, f = (floats(64) for _ in range(6))
    calls, prepared = call_twice(launched, (a, b, c), (d, e, f))
    x, y, out = (t.data_ptr() for t in (d, e, f))
    assert prepared == 1 and calls == [[x, y, out], [y, None, out]]
    assert all(call[:4] == (7, 1, 1, STREAM) and call[6:9] == (None, None, None) for call in launched)


@pytest.mark.parametrize("second", ["one tensor", "two tensors"])
@pytest.mark.parametrize("first", ["one tensor", "two tensors"])
def test_one_tensor_given_twice_is_not_two_forever(launched, first, second):
    """Launches know their tensors by address: q as k in one call, and not in the next."""
    calls = [[floats(64), floats(64), floats(64)] for _ in range(2)]
    for call, kind in zip(calls, (first, second), strict=True):
        call[1] = call[0].view(64) if kind == "one tensor" else call[1]
    found, prepared = call_twice(launched, *map(tuple, calls))
    assert prepared == (1 if first == second else 2) and found[0] == [t.data_ptr() for t in calls[1]]


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
    """A map of a mask is made once for many calls, and anew for another mask or after a write to it."""
    x, mask, other = floats(64), floats(64), floats(64)
    made = []

    def prepare(x, mask, out):
        made.append(mask.clone())
        return [launch_of(x, made[-1], out)]

    def call(mask, derived):
        out = floats(64)
        run_kept((), (x, mask), (out,), prepare, (mask,), derived)
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
    """Call a launch with a tensor that is derived from a mask and cached on the mask."""
    x, derived = floats(64), []

    def prepare(x, mask, out):
        derived.append(weakref.ref(copied := mask.clone()))
        return [launch_of(x, copied, out)]

    run_kept((), (x, mask), (floats(64),), prepare, (mask,), frozenset({"y"}))
    return derived[0]


def test_what_is_derived_from_a_mask_is_freed_with_it(launched):
    mask = floats(64)
    derived = call_on(mask)
    launched.clear()
    assert derived() is not None
    del mask
    assert derived() is None


def test_a_compiled_kernel_lives_as_long_as_its_launches(launched):
    """Triton may forget it before, and from 3.8 on unloads its machine code then."""
    x, caches = floats(64), recording.kernel.device_caches
    caches.clear()
    run_kept((), (x, None), (x,), lambda *tensors: [launch_of(*tensors)])
    (compiled,) = map(weakref.ref, caches[recording.DEVICE][0].values())
    caches.clear()
    gc.collect()
    assert compiled() is not None
    launch_cache.clear()
    gc.collect()
    assert compiled() is None


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
        run_kept((), (floats(length),), (floats(length),), lambda x, out: [launch_of(x, None, out)])
        assert len(launch_cache) <= 3


@pytest.mark.parametrize("why", ["enter hook", "exit hook", "debug", "pre-run hook", "another Triton"])
def test_where_nothing_is_replayed(launched, monkeypatch, why):
    """All launches go through Triton if a hook is set, and with an unknown version of Triton."""
    x = floats(64)

    def again():
        run_kept((), (x,), (x,), lambda x, out: [launch_of(x, None, out)])

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


def layer(name, seed=2**40):
    """Call an op on new tensors; return the call, and the tensors by name."""
    from transformer_fast.triton.cross_entropy import cross_entropy_rows

    ops = torch.ops.transformer_fast
    x, y, weight, bias = floats(24, 64), floats(24, 64), floats(64), floats(64)
    mean, rstd, target, drawn = floats(24), floats(24), torch.zeros(24, dtype=torch.int64), torch.tensor([seed])
    dropped = 0.1, drawn
    calls = {
        "norm": lambda: ops.layer_norm(x, y, weight, bias, 1e-5, "layer", *dropped),
        "norm backward": lambda: ops.layer_norm_backward(x, None, y, weight, mean, rstd, "std", *dropped, True),
        "dropout": lambda: ops.dropout(x, bias, y, True, *dropped),
        "dropout backward": lambda: ops.dropout_backward(x, y, True, *dropped, True),
        "loss": lambda: cross_entropy_rows(x, target, 0.1, -100, True),
        "norm, seed on the host": lambda: extension.layer_norm(
            True, x, y, weight, bias, 1e-5, "layer", dropped[0], torch.tensor([seed])
        ),
        "dropout, seed on the host": lambda: extension.dropout(
            True, x, bias, y, False, dropped[0], torch.tensor([seed])
        ),
    }
    tensors = {"x": x, "y": y, "weight": weight, "bias": bias, "mean": mean, "rstd": rstd, "seed": drawn}
    return calls[name], tensors | {"target": target}


LAYERS = (
    "norm", "norm backward", "dropout", "dropout backward", "loss", "norm, seed on the host",
    "dropout, seed on the host",
)  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_launchers_do_again_what_they_did(launched, monkeypatch, name):
    """The second call, on other tensors of the same layouts, prepares nothing and launches the same kernels."""
    monkeypatch.setattr(launch_cache, "enabled", False)
    call, given = layer(name)
    call()
    long, long_given = list(launched), given
    monkeypatch.setattr(launch_cache, "enabled", True)
    layer(name)[0]()
    monkeypatch.setattr(cached, "_run_and_record", None)
    launched.clear()
    call, given = layer(name)
    call()
    assert outcomes(launched, given) == outcomes(long, long_given)
    assert launched and all(call[6:9] == (None, None, None) for call in launched)


@pytest.mark.parametrize("name", ["norm", "dropout"])
def test_a_seed_on_the_host_changes_from_call_to_call(launched, name):
    """No kernel is compiled for a seed, such as one divisible by 16."""
    launch_cache.clear()
    found = []
    for seed in (2**40, 2**40 + 1, -(2**62), 2**63 - 1):
        launched.clear()
        layer(f"{name}, seed on the host", seed)[0]()
        (call,) = launched
        found.append((call[4], [value for value in call if type(value) is int and value == seed]))
    assert len({function for function, _ in found}) == 1 and all(seeds for _, seeds in found)
