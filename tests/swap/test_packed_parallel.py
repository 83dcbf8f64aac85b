"""``accelerate(model, packed=True)`` under PyTorch's wrappers for several devices, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
import packed_models as packed

MODELS = ("BertForMaskedLM", "GPT2LMHeadModel", "BartForConditionalGeneration")


@pytest.fixture(autouse=True, scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path: Path = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "fully_shard"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_plain_model(name: str, wrapper: str) -> None:
    (plain, model, report), call = packed.pair(name), packed.batch(name, "right")
    expected = packed.step(plain, call)
    if wrapper == "fully_shard":
        from torch.distributed.fsdp import fully_shard  # seconds, which each process that collects would spend

        for module in [m for m in model.modules() if hasattr(m, "self_attn")]:
            fully_shard(module)
        fully_shard(model)
        loss = model(**call.given).loss
        loss.backward()
        gradients = {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.grad is not None}
    else:
        loss = DistributedDataParallel(model)(**call.given).loss
        loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(loss.detach(), expected["loss"])
    packed.close(gradients, {key: expected[key] for key in gradients}, atol=1e-5)
    assert gradients.keys() == expected.keys() & dict(plain.named_parameters()).keys()
    assert not report.padded_calls.reasons
