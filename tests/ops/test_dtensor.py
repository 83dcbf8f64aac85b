"""Swapped modules with DTensors as arguments and as parameters give the results of torch.nn's class."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import OLD_TORCH
from subprocesses import ROOT, python
from swapped_modules import (
    KINDS,
    VOCABULARY,
    E,
    L,
    N,
    assert_as_torch,
    every_kind,
    inputs,
    make,
    outcome,
    swapped,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

import transformer_fast as tfast


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of this process only, which uses all of DTensor's code."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def plain(t: Tensor) -> Tensor:
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t


PLACEMENTS = {"replicated": Replicate(), "batch": Shard(0), "sequence": Shard(1)}
ROWS = [kind for kind in KINDS.values() if "Transformer" not in kind.__name__ and "Attention" not in kind.__name__]
"""Modules that torch computes row by row; for others it refuses many placements, slowly."""
CASES = [("replicated", kind) for kind in KINDS.values()] + [(name, k) for name in ("batch", "sequence") for k in ROWS]


def trained(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return the output and the gradients of the parameters."""
    options = {"need_weights": False} if isinstance(module, nn.MultiheadAttention) else {}
    out = module(*args, **options, **kwargs)
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    parameters = list(module.parameters())
    return (*outs, *(torch.autograd.grad(outs[0].sum(), parameters) if parameters else ()))


@pytest.mark.parametrize("placement, kind", CASES)
@pytest.mark.parametrize("parameters", ["plain parameters", "parameters that are DTensors"])
def test_arguments(kind: type[nn.Module], parameters: str, placement: str, mesh: DeviceMesh) -> None:
    module, args = make(kind), [distribute_tensor(t, mesh, [PLACEMENTS[placement]]) for t in inputs(kind)]
    fast = swapped(module)
    if OLD_TORCH and kind is nn.Linear and placement == "sequence":
        pytest.skip("DTensor of PyTorch 2.11 has no view of a sharded sequence")
    if parameters != "plain parameters":
        module, fast = distribute_module(module, mesh), distribute_module(fast, mesh)
        if kind in ROWS:
            assert isinstance(trained(fast, *args)[0], DTensor)
    assert_as_torch(module, lambda m: trained(m, *args), plain, fast=fast)


@pytest.mark.parametrize("training", [True, False])
@every_kind
def test_parameters_alone(kind: type[nn.Module], training: bool, mesh: DeviceMesh) -> None:
    """Plain arguments with DTensor parameters: torch refuses the mixture, and so must swapped modules."""
    module, args = make(kind).train(training), inputs(kind)
    fast = distribute_module(swapped(module), mesh)
    module = distribute_module(module, mesh)
    assert_as_torch(module, lambda m: trained(m, *args), plain, fast=fast)


def into(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a hook that converts plain arguments to DTensors."""
    make_one = lambda t: DTensor.from_local(t, MESHES[0]) if isinstance(t, Tensor) else t  # noqa: E731
    return tuple(map(make_one, args)), {name: make_one(t) for name, t in kwargs.items()}


def out_of(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    """Return a hook that converts results to plain tensors."""
    return out.to_local() if isinstance(out, Tensor) else (out[0].to_local(), *out[1:])


MESHES: list[DeviceMesh] = []


@pytest.mark.parametrize("part", ["norm1", "norm2", "linear1", "linear2", "self_attn"])
@pytest.mark.parametrize("padded", [True, False])
def test_one_part_of_a_layer(part: str, padded: bool, mesh: DeviceMesh) -> None:
    """One part is sharded, between hooks as ``parallelize_module`` makes them. Without hooks torch and swapped
    modules refuse it."""
    if OLD_TORCH and part == "self_attn":
        pytest.skip("DTensor of PyTorch 2.11 has no rule for attention on a CPU")
    MESHES[:] = [mesh]
    blocked = torch.arange(L) >= torch.tensor([[L], [L - 2], [1]])
    masks = {"src_key_padding_mask": blocked} if padded else {}
    module, args = make(nn.TransformerEncoder).eval(), inputs(nn.TransformerEncoder)
    expected, fast = module(*args, **masks), swapped(module)
    inner = distribute_module(getattr(fast.layers[1], part), mesh)
    with torch.no_grad():
        assert outcome(lambda: fast(*args, **masks)) == [RuntimeError]
        inner.register_forward_pre_hook(into, with_kwargs=True)
        inner.register_forward_hook(out_of)
        out = fast(*args, **masks)
    torch.testing.assert_close(out[~blocked], expected[~blocked])


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_takes_the_sum_along(kind: type[nn.Module], mesh: DeviceMesh) -> None:
    norm = make(kind)
    x, y = (distribute_tensor(torch.randn(N, L, E), mesh, [Shard(1)]) for _ in range(2))
    fast = distribute_module(copy.deepcopy(norm), mesh)
    tfast.accelerate(fast)
    out, summed = fast(y, residual=x)
    torch.testing.assert_close(summed.full_tensor(), x.full_tensor() + y.full_tensor())
    torch.testing.assert_close(plain(out), norm(summed.full_tensor()).detach())


class Model(nn.Module):
    """Model with parts that tensor parallelism shards by sequence and by vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.rms = make(nn.Embedding), make(nn.LayerNorm), make(nn.RMSNorm)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rms(self.norm(self.embed(ids)).tanh())


def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    return parallelize_module(model, mesh, {"embed": embedding, "norm": SequenceParallel(), "rms": SequenceParallel()})


def check_parallel(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(0, VOCABULARY, (N, 4))
    expected = trained(model, ids)
    results: list[Callable[[], Any]] = []
    for fast in (True, False):
        sharded = copy.deepcopy(model)
        if fast:
            assert len(tfast.accelerate(sharded).swapped) == 3
        found = trained(parallel(sharded, mesh), ids)
        assert all(isinstance(t, DTensor) for t in found)
        results.append([t.full_tensor().detach() for t in found])
    for ours, theirs, alone in zip(*results, expected):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, alone.detach(), atol=1e-5, rtol=1e-5)


def test_sequence_and_rowwise_parallel(mesh: DeviceMesh) -> None:
    check_parallel(mesh)


@pytest.mark.slow("three processes import torch")
def test_sequence_and_rowwise_parallel_in_two_processes() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__)
    done = python(*launcher, PYTHONPATH=f"{ROOT}:{ROOT / 'tests/support'}", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_parallel(init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()
