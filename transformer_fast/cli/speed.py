"""The small speed table of `demo`: an op, layers and training steps beside eager.

Both sides take turns within one run, on the same inputs. The eager side is `transformer_fast.reference.layers`, plain
PyTorch with torch's own dropout, or the module of `torch.nn` itself. The full measurements are in `benchmarks/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import layers, models, reference
from ..masks import AttentionMask
from ..swap.accelerate import accelerate
from ..testing import Timing, interleaved

BATCH, LENGTH, WIDTH, HEADS, VOCAB = 32, 64, 256, 4, 2000


def speed(device: torch.device | str, seconds: float = 2.0) -> Iterator[tuple[str, Timing, Timing]]:
    """Time each row of the table on `device`, about `seconds` for each: name, fast and eager.

    Dropout is 0.1, and a quarter of the positions is padding.
    """
    device = torch.device(device)
    for name, make in (
        ("embedding + positions + dropout, forward", _embed),
        ("residual + dropout + LayerNorm, forward", _norm),
        ("attention with dropout, forward + backward", _attention),
        ("training step, 2 + 2 layers", _training_step),
        ("training step, 2 + 2 layers, packed", partial(_training_step, packed=True)),
        ("training step, nn.TransformerEncoder, packed", _encoder_step),
    ):
        calls = {}
        for side, source in (("fast", layers), ("eager", reference.layers)):
            torch.manual_seed(0)
            calls[side] = partial(_synchronized, make(source, device), device)
        timings = interleaved(calls, seconds / 2)
        yield name, timings["fast"], timings["eager"]


def format_speed(rows: Iterable[tuple[str, Timing, Timing]]) -> Iterator[str]:
    """Yield the table as lines of text, each row as soon as it is measured."""
    yield f"{'B 32, length 64, d 256, fp32, padded':44} {'fast ms':>9} {'eager ms':>9} {'ratio':>7}"
    for name, fast, eager in rows:
        yield f"{name:44} {1e3 * fast.median:9.3f} {1e3 * eager.median:9.3f} {eager.median / fast.median:6.2f}x"


def _synchronized(call: Callable[[], object], device: torch.device) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Each function below builds one side: `source` is `transformer_fast.layers` or `transformer_fast.reference.layers`.


def _embed(source: ModuleType, device: torch.device) -> Callable[[], object]:
    embedder = source.Embedder(VOCAB, WIDTH).to(device)
    positions = source.PositionalEncoder(WIDTH, 0.1).to(device)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), device=device)
    fused = getattr(embedder, "with_positions", None)
    run = (lambda: fused(ids, positions)) if fused else (lambda: positions(embedder(ids)))
    return torch.no_grad()(run)


def _norm(source: ModuleType, device: torch.device) -> Callable[[], object]:
    x, residual = torch.randn(2, BATCH, LENGTH, WIDTH, device=device)
    if source is layers:
        norm = layers.LayerNorm(WIDTH).to(device)
        return torch.no_grad()(lambda: norm(x, residual=residual, dropout_p=0.1))
    plain = nn.LayerNorm(WIDTH, device=device)
    return torch.no_grad()(lambda: plain(residual + F.dropout(x, 0.1)))


def _attention(source: ModuleType, device: torch.device) -> Callable[[], object]:
    shape = BATCH, HEADS, LENGTH, WIDTH // HEADS
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    mask, dropout = _keep(device).unsqueeze(1), nn.Dropout(0.1)

    def run() -> None:
        source.attention(q, k, v, shape[-1], mask, dropout).sum().backward()

    return run


def _keep(device: torch.device) -> Tensor:
    """A padding mask, bool (B, L), True at tokens."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,), device=device)
    return torch.arange(LENGTH, device=device) < lengths[:, None]


def _training_step(source: ModuleType, device: torch.device, packed: bool = False) -> Callable[[], object]:
    build = partial(models.Transformer, packed=packed) if source is layers else source.Transformer
    model: nn.Module = build(VOCAB, VOCAB, WIDTH, 2, HEADS, 0.1, d_ff=4 * WIDTH, tie_weights=True).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    src, trg = torch.randint(VOCAB, (2, BATCH, LENGTH), device=device)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (2, BATCH), device=device)
    masks = AttentionMask.lengths(lengths[0]), AttentionMask.lengths(lengths[1]) & AttentionMask.causal()
    dense = [mask.dense(LENGTH, LENGTH, device).squeeze(1) for mask in masks]  # the mask for eager code

    def run() -> None:
        logits = model(src, trg, *(masks if source is layers else dense))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), trg.flatten()).backward()
        optimizer.step()

    return run


def _encoder_step(source: ModuleType, device: torch.device) -> Callable[[], object]:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    if source is layers:
        accelerate(encoder, packed=True)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-4)
    x, padding = torch.randn(BATCH, LENGTH, WIDTH, device=device), ~_keep(device)

    def run() -> None:
        out = encoder(x, src_key_padding_mask=padding)
        optimizer.zero_grad()
        out[~padding].square().mean().backward()
        optimizer.step()

    return run
