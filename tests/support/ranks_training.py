"""Program of each process of test_ranks.py: `python ranks_training.py WHAT OUT`, started by torchrun or alone."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import transformer_fast as tfast
from transformer_fast.reference import layers as reference

VOCABULARY, D, STEPS = 20, 16, 4


class Stock(nn.Module):
    """Accelerated nn.Transformer between embeddings and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        self.layers = nn.Transformer(D, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.out = nn.Linear(D, VOCABULARY)
        tfast.accelerate(self)

    def forward(self, src: Tensor, trg: Tensor, src_keep: Tensor, trg_keep: Tensor) -> Tensor:
        blocked = ~src_keep[:, 0]
        options = {"src_key_padding_mask": blocked, "memory_key_padding_mask": blocked}
        return self.out(self.layers(self.embed(src), self.embed(trg), tgt_mask=~trg_keep[0], **options))


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "stock":
        return Stock()
    if kind == "ours":
        return tfast.Transformer(VOCABULARY, VOCABULARY, D, 1, 2, 0.0, d_ff=24, tie_weights=True)
    model = reference.Transformer(VOCABULARY, VOCABULARY, D, 1, 2, 0.0)
    assert len(tfast.accelerate(model).swapped) > 10
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, each of which is sharded by itself."""
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return [layer for stack in stacks for layer in stack]


def train_layers(kind: str, how: str, out: Path) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = build(kind)
    if how == "ddp" and world > 1:
        model = DistributedDataParallel(model)
    elif how == "fsdp" and world > 1:
        for block in blocks(model):
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        src, trg = (torch.randint(1, VOCABULARY, (4, n), generator=generator)[rank::world] for n in (7, 7))
        keep = torch.arange(7) < torch.tensor([7, 4, 5, 1])[rank::world].unsqueeze(1)
        logits = model(src, trg[:, :-1], keep.unsqueeze(1), torch.ones(1, 6, 6, dtype=torch.bool).tril())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), trg[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"losses": losses, "state": state}, out)


def train_command(options: str, out: Path) -> None:
    """Train with each of the settings, one after the other, in one group of processes."""
    from transformer_fast.translation import TrainConfig, train
    from transformer_fast.translation.progress import Silent

    gc.disable()
    results = []
    for settings in json.loads(options):
        results.append(train(TrainConfig(**settings), Silent()))
        # Freed after the group of processes is destroyed, it may never return.
        assert not any(type(thing) is DistributedDataParallel for thing in gc.get_objects())
    own = [{name: getattr(r, name) for name in ("step", "scores", "tokens", "average_scores")} for r in results]
    out.with_suffix(f".{os.environ.get('RANK', '0')}.json").write_text(json.dumps(own))


def main(what: str, *args: str) -> None:
    if what == "command" and len(json.loads(args[0])) == 1:
        train_command(args[0], Path(args[1]))  # which joins its processes by itself
        return
    with contextlib.ExitStack() as stack:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        if what == "command":
            train_command(args[0], Path(args[1]))
            return
        for kind in ("ours", "classic", "stock"):
            for how in ("ddp", "fsdp"):
                train_layers(kind, how, Path(args[0]) / f"{kind}-{how}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
