"""The fast path to launch a Triton kernel against Triton's own, without a GPU: a driver that only records."""

from __future__ import annotations

import itertools

import pytest
import torch

recording = pytest.importorskip("recording_driver")
launching = pytest.importorskip("transformer_fast.triton.launcher")
launched, seen, floats, launch_of = recording.launched, recording.seen, recording.floats, recording.launch_of
kernel = recording.kernel
run, Launch = launching.run, launching.Launch


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
    launches += [Launch("test", kernel, 3, launches[0].arguments, *options) for options in ((2, 2), (4, 1, 64))]
    run(launches, x)
    launched.clear()
    run(launches, x)
    ours = list(launched)
    launched.clear()
    for launch in launches:
        arguments = {name: value for name, value in launch.arguments.items() if name != "another"}
        launch.kernel[(launch.grid,)](**arguments, **launch.options())
    assert len(ours) == len(launches)
    assert all(call[6:9] == (None, None, None) for call in ours), "the fast path was not taken"
    for launch, short, long in zip(launches, ours, launched, strict=True):
        assert seen(short) == seen(long), launch.arguments


def test_the_package_kernels_too(launched):
    """As above, for a kernel of each file that launches often, in two lengths that must not compile twice."""
    from transformer_fast.attention_params import AttentionParams
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
