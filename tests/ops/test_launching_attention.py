"""Whole attention calls as on a GPU, on CPU tensors with a recording driver."""

from __future__ import annotations

import functools
import sys

import pytest
import test_attention_wrong_inputs
import test_wrong_inputs
import torch

import transformer_fast as tfast

recording = pytest.importorskip("recording_driver")
attention_decode = pytest.importorskip("transformer_fast.triton.attention.decode")
cached = pytest.importorskip("transformer_fast.triton.launch_cache")
launched, on_a_gpu, seen, floats = recording.launched, recording.on_a_gpu, recording.seen, recording.floats
outcomes = recording.outcomes


def masks():
    lengths = torch.tensor([9, 17])
    return {
        "no mask": None,
        "lengths": tfast.AttentionMask.lengths(lengths),
        "padding": tfast.AttentionMask.keep((torch.arange(24) < lengths[:, None])[:, None, None]),
        "causal": tfast.AttentionMask.causal(),
    }


@pytest.mark.cover(4)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("name", masks())
def test_a_whole_call_of_attention_is_replayed(on_a_gpu, monkeypatch, name, dropout_p):
    """From the second call on, nothing is checked in Python or prepared, and the gradient is computed in C++."""
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
    call()  # tensors derived from the mask are made once, and found by the next call
    monkeypatch.setattr(attention, "padded_params", None)
    monkeypatch.setattr(cached, "_run_and_record", None)
    node, forward, both = call()
    assert node == "transformer_fast::attention_backward" and (forward, both) == (1, 3)
    assert all(driver_call[6:9] == (None, None, None) for driver_call in on_a_gpu)


DENSE = tfast.AttentionMask.keep(torch.ones(2, 1, 24, 24, dtype=torch.bool))
PADDING = tfast.AttentionMask.keep((torch.arange(24) < torch.tensor([[9], [17]]))[:, None, None])
DOCUMENTS = tfast.AttentionMask.documents(((torch.arange(24) // 7).expand(2, -1)).int())
PACKED_DOCUMENTS = tfast.AttentionMask.documents((torch.arange(24) // 7)[None].int())
ALIBI = tfast.AttentionMask.alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625]))
# In int32, as kernels take them: on a CPU wider ones are made anew in every call, and nothing is kept of those.
LONG_LENGTHS = tfast.AttentionMask.lengths(torch.tensor([600, 9], dtype=torch.int32))
BIAS = torch.zeros(1, 4, 24, 24)
ENDS = {rows: torch.tensor([0, rows // 3, rows], dtype=torch.int32) for rows in (24, 600, 1500)}
KINDS = {
    "no mask": {},
    "half precision": {"dtype": torch.float16},
    "causal, lengths, scale": {"mask": tfast.AttentionMask.lengths(torch.tensor([9, 17])), "causal": 3, "scale": 0.5},
    "dense": {"mask": DENSE, "empty_rows": "zero"},
    "padding": {"mask": PADDING},
    "bias": {"bias": BIAS},
    "documents": {"mask": DOCUMENTS},
    "distances, softcap": {"mask": ALIBI, "softcap": 5.0},
    "sinks": {"sinks": torch.zeros(4)},
    "window": {"mask": tfast.AttentionMask.window(4, 2)},
    "long lengths": {"mask": LONG_LENGTHS, "rows": 600},
    "kept bits": {"mask": LONG_LENGTHS, "rows": 600, "D": 64, "dtype": torch.float16},
    "packed": {"cu_seqlens": ENDS[24], "causal": True},
    "packed window": {"cu_seqlens": ENDS[24], "mask": tfast.AttentionMask.window(4), "causal": True},
    "packed documents, distances, sinks": {
        "cu_seqlens": ENDS[24],
        "mask": PACKED_DOCUMENTS & ALIBI,
        "sinks": torch.zeros(4),
    },
    "long packed": {"cu_seqlens": ENDS[600], "rows": 600, "empty_rows": "zero"},
    "packed kept bits": {"cu_seqlens": ENDS[1500], "rows": 1500, "D": 64, "dtype": torch.float16},
}


def trained(D=32, rows=24, dtype=torch.float32, cu_seqlens=None, **options):
    """Call attention and its gradients on new tensors; return them by name."""
    shape = (2, 4, rows, D) if cu_seqlens is None else (rows, 4, D)
    q, k, v = (floats(*shape).to(dtype).requires_grad_() for _ in range(3))
    if cu_seqlens is None:
        out = tfast.attention(q, k, v, dropout_p=0.1, **options)
    else:
        out = tfast.attention_packed(q, k, v, cu_seqlens, cu_seqlens, dropout_p=0.1, **options)
    grad = torch.ones_like(q)
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    assert [t.shape for t in (out, *gradients)] == [q.shape] * 4 and {t.dtype for t in gradients} == {dtype}
    return {"q": q, "k": k, "v": v, "grad": grad, "out": out, **dict(zip(("dq", "dk", "dv"), gradients))}


def gradient_of_a_bias():
    q, bias = floats(2, 4, 24, 32), torch.zeros(1, 4, 24, 24, requires_grad=True)
    torch.autograd.grad(tfast.attention(q, q, q, bias=bias).sum(), bias)
    return {"q": q, "bias": bias}


def gradient_of_slopes():
    q, slopes = floats(2, 4, 24, 32), torch.full((4,), 0.5, requires_grad=True)
    torch.autograd.grad(tfast.attention(q, q, q, tfast.AttentionMask.alibi(slopes)).sum(), slopes)
    return {"q": q}


def weights():
    q = floats(2, 4, 24, 32)
    return {"q": q, "weights": tfast.attention(q, q, q, return_weights=True)[1]}


def decoded(rows=600, in_pages=False):
    q, k, v, options = floats(2, 8, 1, 40), floats(2, 4, rows, 40), floats(2, 4, rows, 40), {}
    if in_pages:
        k, v = (t.view(-1, 16, 4, 40) for t in (k, v))
        options["page_table"] = torch.arange(74, dtype=torch.int32).view(2, 37)
    lengths = torch.tensor([min(rows, 592), 9], dtype=torch.int32)
    out = tfast.attention_decode(q, k, v, lengths, **options)
    assert out.shape == q.shape
    return {"q": q, "k": k, "v": v, "lengths": lengths, "out": out}


CALLS = {name: functools.partial(trained, **options) for name, options in KINDS.items()} | {
    "gradient of a bias": gradient_of_a_bias,
    "gradient of slopes": gradient_of_slopes,
    "weights": weights,
    "decode": functools.partial(decoded, rows=32),
    "decode in parts": decoded,
    "decode pages": functools.partial(decoded, in_pages=True),
}


@pytest.mark.cover(10)
@pytest.mark.parametrize("name", CALLS)
def test_an_equal_call_launches_again_what_the_first_did(on_a_gpu, monkeypatch, name):
    """On new tensors: equal kernels, grids, scalars and tensors, and nothing is prepared."""

    def call():
        on_a_gpu.clear()
        torch.manual_seed(8)
        return CALLS[name](), list(on_a_gpu)

    def compared():
        with monkeypatch.context() as patch:
            patch.setattr(cached.launch_cache, "enabled", False)
            given, first = call()
            call()
        kernels = [driver_call[4] for driver_call in call()[1]]
        # Without the launches that made the tile map, which is kept with the call.
        by_launchers = outcomes([driver_call for driver_call in first if driver_call[4] in kernels], given)
        with monkeypatch.context() as patch:
            patch.setattr(cached, "_run_and_record", None)
            given, again = call()
        return by_launchers, outcomes(again, given), again

    # Memory that one operator frees may be given to the next, by chance: then one name stands for two tensors.
    tries = (compared() for _ in range(5))
    again = next((again for expected, found, again in tries if found == expected), None)
    assert again and all(driver_call[6:9] == (None, None, None) for driver_call in again)


OTHERS = {
    "distances, softcap": [{"scale": 0.25}, {"softcap": 6.0}, {"dropout_p": 0.2}],
    "window": [{"mask": tfast.AttentionMask.window(*bounds)} for bounds in ((5, 2), (4, 1))],
    "packed window": [{"scale": 0.25}, {"dropout_p": 0.2}, {"mask": tfast.AttentionMask.window(5)}],
    "decoding": [{"scale": 0.25}, {"softcap": 6.0}],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_value_of_an_option_is_another_launch(on_a_gpu, kind):
    """Each value has its own scalars, forward and backward, however often the values alternate."""
    q = floats(2, 4, 24, 32).requires_grad_()
    given = {"scale": 0.5, **({"softcap": 5.0} if kind == "decoding" else KINDS[kind] | {"dropout_p": 0.1})}

    def launches(cu_seqlens=None, **options):
        on_a_gpu.clear()
        torch.manual_seed(8)
        if kind == "decoding":
            tfast.attention_decode(q.detach()[:, :, :1], *[q.detach()] * 2, torch.tensor([24, 9]).int(), **options)
        elif cu_seqlens is None:
            torch.autograd.grad(tfast.attention(q, q, q, **options).sum(), q)
        else:
            rows = q[0].transpose(0, 1)
            torch.autograd.grad(tfast.attention_packed(rows, rows, rows, cu_seqlens, cu_seqlens, **options).sum(), q)
        return [[a for a in seen(call)[-1] if isinstance(a, int | float) and abs(a) < 2**31] for call in on_a_gpu]

    calls = [given, *(given | other for other in OTHERS[kind])]
    first = [launches(**options) for options in calls]
    assert [launches(**options) for options in calls] == first
    assert all(found != first[0] for found in first[1:])


def test_temporaries_of_a_repeated_call_do_not_overlap(on_a_gpu):
    decoded()
    on_a_gpu.clear()
    decoded()
    arguments = recording.arguments_of(attention_decode._join_kernel, on_a_gpu[1])
    outs, maxes, sums = (arguments[name] for name in ("part_outs", "part_maxes", "part_sums"))
    rows = 4 * arguments["parts"] * arguments["rows"]
    assert maxes - outs >= rows * 40 and sums - maxes >= rows and maxes % 16 == sums % 16 == 0


def test_what_was_derived_from_a_mask_is_not_used_after_it_was_written_to(on_a_gpu):
    """The tile map is on the device and is not compared; only the version counter shows the write."""
    keep = torch.ones(2, 1, 24, 24, dtype=torch.bool)
    q = floats(2, 4, 24, 32)

    def launches():
        on_a_gpu.clear()
        tfast.attention(q, q, q, keep)
        return len(on_a_gpu)

    first = launches()
    assert first > 1 and launches() == 1
    keep[0, 0, :, 3] = False
    assert launches() == first


def test_the_seed_of_a_launch_is_a_number_that_backward_gets_again(on_a_gpu):
    from transformer_fast.ops import seeds

    q, k, v = (floats(2, 4, 24, 32).requires_grad_() for _ in range(3))
    for _ in range(2):
        torch.manual_seed(6)
        on_a_gpu.clear()
        out = tfast.attention(q, k, v, dropout_p=0.1)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.manual_seed(6)
        number = seeds.draw_seed(torch.device("cpu")).item()
        launches = [seen(driver_call)[-1] for driver_call in on_a_gpu]
        assert [number in arguments for arguments in launches] == [True, True, True]


def test_a_captured_graph_draws_its_seed_on_the_device(monkeypatch):
    """A seed from the host would repeat one mask in every replay."""
    from transformer_fast.ops import seeds

    drawn = torch.tensor([5])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    asked: list[torch.device] = []
    monkeypatch.setattr(seeds, "draw_seed", lambda device: asked.append(device) or drawn)
    assert seeds.draw_launch_seed(torch.device("cuda")) is drawn
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert seeds.draw_launch_seed(torch.device("cuda")) is drawn
    assert asked == [torch.device("cuda"), torch.device("cpu")]


def test_new_lengths_compile_nothing(on_a_gpu):
    """Sentences of any length, with and without a mask, start the functions of the first call."""
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


def wrong_calls():
    """Wrong inputs of every public attention function, by name: (call, error, message)."""
    rows = {name: tuple(row) for name, row in (test_wrong_inputs.ATTENTION | test_wrong_inputs.MASKS).items()}
    rows = {name: row for name, row in rows.items() if not name.startswith(("triton on CPU", "layer"))}
    for name, calls in (("packed", test_attention_wrong_inputs.PACKED), ("decode", test_attention_wrong_inputs.DECODE)):
        function = getattr(tfast, f"attention_{name}")
        for what, (arguments, options, error, says) in calls.items():
            rows[f"{name}: {what}"] = functools.partial(function, *arguments, **options), error, says
    wide, ends = floats(1, 1, 2, 257), torch.tensor([0, 2], dtype=torch.int32)
    too_wide = ValueError, r"head_dim up to 256.*257\]"
    rows["d over 256"] = functools.partial(tfast.attention, wide, wide, wide), *too_wide
    packed = wide.view(2, 1, 257)
    rows["packed d over 256"] = functools.partial(tfast.attention_packed, packed, packed, packed, ends, ends), *too_wide
    return rows


@pytest.mark.parametrize("name", wrong_calls())
def test_a_wrong_call_raises_the_same_where_launches_are_checked_in_cpp(on_a_gpu, name):
    call, error, says = wrong_calls()[name]
    with pytest.raises(error, match=says):
        call()
    assert not on_a_gpu


def test_a_mode_that_records_a_call_records_the_draw():
    """Each run of the recorded graph draws anew. A mode that only watches gets the seed that a recomputation outside of
    it gets."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    from transformer_fast.ops import seeds

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return x + seeds.draw_launch_seed(x.device)

    for settings in ({}, {"tracing_mode": "fake"}):
        recorded = make_fx(drawn, **settings)(torch.zeros(1, dtype=torch.int64))
        assert not torch.equal(*(recorded(torch.zeros(1, dtype=torch.int64)) for _ in range(2)))
    torch.manual_seed(3)
    with FlopCounterMode(display=False):
        watched = seeds.draw_launch_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(watched, seeds.draw_launch_seed(torch.device("cpu")))
