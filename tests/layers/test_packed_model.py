"""``Transformer(..., packed=True)`` gives the padded model's results and never computes padding."""

import copy
from unittest import mock

import pytest
import torch
from dialect_parity import hold
from torch import nn

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.layers.attention import _padded_attention, packed_attention
from transformer_fast.masks.packing import PackedMask, packing_of, packings_of
from transformer_fast.models import packed as packed_module

VOCAB, D, B, L_SRC, L_TRG = 11, 16, 4, 7, 6
SRC_LENGTHS, TRG_LENGTHS = torch.tensor([7, 3, 1, 5]), torch.tensor([2, 6, 1, 4])
SRC_KEEP = torch.arange(L_SRC) < SRC_LENGTHS[:, None]
TRG_KEEP = torch.arange(L_TRG) < TRG_LENGTHS[:, None]
HOLES = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [1] * 7, [0, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0]]).bool()
LOOK_AHEAD = layers.subsequentmask(L_TRG)


def masks(device):
    """Return (src_mask, trg_mask, real targets), by name."""
    real, all_real = TRG_KEEP.to(device), torch.ones_like(TRG_KEEP).to(device)
    lengths, keep, holes, trg_lengths = (t.to(device) for t in (SRC_LENGTHS, SRC_KEEP, HOLES, TRG_LENGTHS))
    padded_causal = AttentionMask.lengths(trg_lengths) & AttentionMask.causal()
    look_ahead = LOOK_AHEAD.to(device)
    dense = real[:, None] & look_ahead
    return {
        "lengths": (AttentionMask.lengths(lengths), padded_causal, real),
        "lengths on the host": (AttentionMask.lengths(SRC_LENGTHS), padded_causal, real),
        "a keep mask with holes": (holes[:, None], padded_causal, real),
        "look-ahead alone": (keep[:, None].int(), AttentionMask.causal(), all_real),
        "a target keep mask": (keep[:, None], AttentionMask.keep(real[:, None, None]) & AttentionMask.causal(), real),
        "no masks": (None, None, all_real),
        "not causal": (keep[:, None], real[:, None], real),
        "a window": (keep[:, None], AttentionMask.lengths(trg_lengths) & AttentionMask.window(1), real),
        "dense": (keep[:, None], dense, real),
        "dense, rows of padding blocked": (keep[:, None], dense & real[:, :, None], real),
        "dense look-ahead for all": (keep[:, None], look_ahead, all_real),
        "dense look-ahead and lengths": (
            keep[:, None],
            AttentionMask.keep(look_ahead) & AttentionMask.lengths(trg_lengths),
            real,
        ),
    }


MASKS = list(masks(torch.device("cpu")))


def build(device, **options) -> tfast.Transformer:
    torch.manual_seed(4)
    model = tfast.Transformer(VOCAB, VOCAB, D, 2, 4, options.pop("dropout", 0.0), d_ff=24, padding_idx=0, **options)
    for parameter in model.parameters():  # no parameter at a value that hides a mistake
        nn.init.normal_(parameter, std=0.3)
    return model.to(device)


def ids(device):
    return (torch.randint(0, VOCAB, (B, length), device=device) for length in (L_SRC, L_TRG))


def step(model, src, trg, src_mask, trg_mask, real, packed, dtype=torch.float32):
    """Return the logits of the real targets, and the gradients of a loss over them."""
    model = copy.deepcopy(model).to(dtype)
    model.packed = packed
    torch.manual_seed(8)
    logits = model(src, trg, src_mask, trg_mask)
    if packed:
        assert logits.shape == (B, L_TRG, VOCAB) and torch.all(logits[~real] == 0)
    logits[real].square().mean().backward()
    return {"logits": logits[real].detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_same(model, inputs):
    """Compare packed and padded models in fp32, with fp64 as the truth."""
    runs = (True, torch.float32), (False, torch.float32), (False, torch.float64)
    hold(*(step(model, *inputs, packed, dtype) for packed, dtype in runs))


@pytest.mark.parametrize("name", MASKS)
def test_every_form_of_mask(name, device):
    src, trg = ids(device)
    src_mask, trg_mask, real = masks(device)[name]
    if name == "lengths on the host" and device.type != "cpu":
        # Padded attention needs lengths on the device of q; the packed model takes them from the host.
        on_device = step(build(device), src, trg, src_mask.to(device), trg_mask, real, True)
        for part, x in step(build(device), src, trg, src_mask, trg_mask, real, True).items():
            assert torch.equal(on_device[part], x)
        return
    if name.startswith("dense") and device.type != "cpu":  # To read a dense mask, the host would wait for the GPU.
        with pytest.raises(ValueError, match=rf"on {device.type}:0, .*without waiting for the GPU"):
            build(device, packed=True)(src, trg, src_mask, trg_mask)
        return
    assert_same(build(device), (src, trg, src_mask, trg_mask, real))


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("norm", ["std", "layer", "rms"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_every_style_of_layer(norm_first, norm, tie_weights, device):
    assert_same(
        build(device, norm_first=norm_first, norm=norm, tie_weights=tie_weights),
        (*ids(device), *masks(device)["lengths"]),
    )


def test_attention_dropout_draws_the_mask_of_the_padded_model(device):
    assert_same(build(device, attention_dropout=0.4).train(), (*ids(device), *masks(device)["lengths"]))


def test_training_with_every_dropout(device):
    model = build(device, dropout=0.3).train()
    found = step(model, *ids(device), *masks(device)["lengths"], True)
    assert all(x.isfinite().all() for x in found.values())
    assert not torch.equal(found["logits"], step(model.eval(), *ids(device), *masks(device)["lengths"], True)["logits"])


def test_no_layer_touches_padding_and_a_batch_is_packed_once():
    device = torch.device("cpu")
    model, rows = build(device, packed=True), set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, layers.Norm)):
            module.register_forward_hook(lambda _, inputs, out: rows.add(tuple(inputs[0].shape[:-1])))
    src_mask, trg_mask, _ = masks(device)["lengths"]
    with mock.patch.object(packed_module, "packings_of", side_effect=packings_of) as packings:
        model(*ids(device), src_mask, trg_mask)
    assert rows == {(int(SRC_LENGTHS.sum()),), (int(TRG_LENGTHS.sum()),)}
    assert packings.call_count == 1


def test_empty_sequences_and_empty_batches():
    model = build(torch.device("cpu"), packed=True)
    src, trg = ids("cpu")
    lengths = AttentionMask.lengths(torch.tensor([7, 0, 1, 5])), AttentionMask.lengths(torch.tensor([0, 6, 0, 4]))
    logits = model(src, trg, lengths[0], lengths[1] & AttentionMask.causal())
    assert logits.isfinite().all() and torch.all(logits[[0, 2]] == 0)
    logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    none = model(src[:0], trg[:0], None, AttentionMask.causal())
    assert none.shape == (0, L_TRG, VOCAB)


def test_packed_is_a_switch_and_generation_does_not_mind():
    model = build(torch.device("cpu"), packed=True).eval()
    src, _ = ids("cpu")
    assert model.packed and copy.deepcopy(model).packed and not build(torch.device("cpu")).packed
    answers = tfast.greedy(model, src, src_lengths=SRC_LENGTHS, bos=1, eos=2, max_length=4)
    model.packed = False
    assert answers == tfast.greedy(model, src, src_lengths=SRC_LENGTHS, bos=1, eos=2, max_length=4)


WRONG = {
    "a dense source mask": (torch.ones(B, L_SRC, L_SRC).bool().tril(), AttentionMask.causal(), "padding alone"),
    "a window in the source": (AttentionMask.window(1, 1), AttentionMask.causal(), r"padding alone.*is window\(1, 1\)"),
    "a window over a keep mask": (
        None,
        AttentionMask.keep(TRG_KEEP[:, None, None]) & AttentionMask.window(1),
        "with a window, the padding must be given as AttentionMask.lengths",
    ),
    "a causal source mask": (AttentionMask.causal(), AttentionMask.causal(), r"padding alone.*is causal\(\)"),
    "documents": (None, AttentionMask.documents(torch.zeros(B, L_TRG).long()), r"target's mask is documents\("),
    "a look-ahead with offset": (None, AttentionMask.causal(1), r"offset 0, got 1; pass AttentionMask.lengths"),
    "a dense target mask that is more": (
        None,
        torch.ones(B, L_TRG, L_TRG).bool(),
        r"\(4, 1, 6, 6\) is not padding and look-ahead alone.*pass AttentionMask.lengths.*packed=False",
    ),
    "a dense target mask of another length": (None, torch.ones(B, 5, 5).bool(), r"L_trg = 6, got shape \(4, 1, 5, 5\)"),
    "a dense mask off the CPU": (None, LOOK_AHEAD.to("meta"), r"on meta, .*without waiting"),
    "lengths beyond L": (AttentionMask.lengths(SRC_LENGTHS + 1), AttentionMask.causal(), r"\[0, L = 7\], got 2 to 8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_masks_that_cannot_be_packed(name):
    src_mask, trg_mask, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        build(torch.device("cpu"), packed=True)(*ids("cpu"), src_mask, trg_mask)


def test_packed_layers_print_no_weights():
    mask = PackedMask(*[packing_of(SRC_LENGTHS, B, L_SRC)] * 2)
    tokens = torch.randn(mask.queries.total, D)
    with pytest.raises(ValueError, match="verbose"):
        layers.MultiHeadAttention(4, D)(tokens, tokens, tokens, mask, verbose=True)


def test_a_dropout_that_must_see_the_weights_keeps_the_window():
    packing = packing_of(SRC_LENGTHS, B, L_SRC)
    mask = PackedMask(packing, packing, causal=True, window=AttentionMask.window(1))
    q, k, v = torch.randn(3, packing.total, 2, 8)
    seen = nn.Dropout(0.0)
    seen.register_forward_hook(lambda *_: None)
    found = _padded_attention(q, k, v, mask, seen, 0.5)
    torch.testing.assert_close(found, packed_attention(q, k, v, mask, scale=0.5))
