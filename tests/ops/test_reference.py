"""Oracle against PyTorch's own functions and against values computed by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import mask_parts

from transformer_fast.masks.definition import visible
from transformer_fast.reference import layers
from transformer_fast.reference.attention import attention
from transformer_fast.reference.dropout import attention_keep, dropout, elementwise_keep, philox
from transformer_fast.reference.embedding import add_positional, embed, positional_table
from transformer_fast.reference.norm import layer_norm

# Known answers of Philox 4x32-10, published with the Random123 library: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, words):
    drawn = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in drawn) == words


def test_dropout_masks_are_made_of_philox_words_as_documented():
    seed = torch.tensor([-123456789])
    kept = attention_keep(seed, 0.5, 2, 3, 4, 70)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 3, 69), (0, 1, 2, 31), (1, 0, 3, 33), (0, 2, 1, 45)]:
        call = (j >> 5) * 4 + ((j >> 1) & 3)
        words = philox(tuple(torch.tensor([c]) for c in (call, i, h, b)), int(seed))
        draw = (int(words[(j >> 3) & 3]) >> (16 * (j & 1))) & 0xFFFF
        assert kept[b, h, i, j] == (draw >= 32768)
    kept = elementwise_keep(seed, 0.5, 5, 19)
    for r, c in [(0, 0), (4, 18), (2, 7), (3, 8)]:
        words = philox(tuple(torch.tensor([x]) for x in (c >> 3, r, 0, 0)), int(seed))
        assert kept[r, c] == (((int(words[(c >> 1) & 3]) >> (16 * (c & 1))) & 0xFFFF) >= 32768)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_rate_scale_and_independence(p):
    seed = torch.tensor([7])
    n = 400 * 1000
    kept = elementwise_keep(seed, p, 400, 1000)
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n) + 2**-16
    y = dropout(torch.ones(400, 1000), p, seed)
    assert torch.equal(y != 0, kept)
    assert p == 1.0 or torch.allclose(y[kept], torch.tensor(1 / (1 - p)))
    other = elementwise_keep(torch.tensor([8]), p, 400, 1000)
    agreement = (kept == other).double().mean().item()
    assert abs(agreement - (p * p + (1 - p) ** 2)) < 0.005


def test_attention_is_torch_attention_where_torch_has_it():
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    bias = torch.randn(2, 1, 5, 7, dtype=torch.float64)
    for name, parts in mask_parts(2, 3, 5, 7, torch.Generator().manual_seed(3)).items():
        bool_parts = ("keep", "key_keep", "lengths", "causal", "window")
        allowed = visible(5, 7, **{n: parts.get(n) for n in bool_parts})
        expected = F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~allowed, -math.inf), scale=0.3)
        out, weights, logsumexp = attention(q, k, v, **parts, bias=bias, scale=0.3)
        rows = allowed.expand(2, 3, 5, 7).any(-1)
        assert torch.allclose(out[rows], expected[rows], atol=1e-12), name
        scores = (q @ k.mT * 0.3 + bias).masked_fill(~allowed, -math.inf)
        assert torch.allclose(logsumexp[rows], scores.logsumexp(-1)[rows], atol=1e-12), name
        assert torch.allclose(weights @ v, out, atol=1e-12), name


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
def test_rows_with_every_key_blocked(empty_rows):
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5, 5))
    keep = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    keep[..., 1, :] = False
    out, _, logsumexp = attention(q, k, v, keep=keep, scale=0.5, empty_rows=empty_rows)
    expected = v.mean(2) if empty_rows == "uniform" else torch.zeros(1, 2, 4)
    assert torch.allclose(out[:, :, 1], expected.double())
    assert torch.all(logsumexp[:, :, 1] == -math.inf)
    grads = torch.autograd.grad(out[:, :, 1].sum(), (q, k, v))
    assert torch.all(grads[0] == 0) and torch.all(grads[1] == 0)
    assert torch.allclose(grads[2], torch.full_like(v, 0.2 if empty_rows == "uniform" else 0.0))


def test_fill_with_minus_1e9_is_the_uniform_row():
    """The definition equals the classic code, fully blocked rows included."""
    q, k, v = (torch.randn(2, 2, n, 8) for n in (4, 6, 6))
    keep = torch.rand(2, 1, 4, 6) > 0.6
    keep[0, 0, 2] = False
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~keep, -1e9)
    out = attention(q, k, v, keep=keep, scale=1 / math.sqrt(8))[0]
    assert torch.allclose(out, scores.softmax(-1) @ v, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [{"causal": 0}, {"lengths": torch.tensor([4])}], ids=["future", "padding"])
def test_a_blocked_key_cannot_leak(poison, mask):
    q, k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    expected = attention(q, k, v, **mask, scale=0.5)[0]
    bad_k, bad_v = k.detach().clone(), v.detach().clone()
    bad_k[:, :, 4] = bad_v[:, :, 4] = poison
    bad_k.requires_grad_(), bad_v.requires_grad_()
    out = attention(q, bad_k, bad_v, **mask, scale=0.5)[0]
    rows = 4 if "causal" in mask else 6  # the queries that may not see key 4
    assert torch.equal(out[:, :, :rows], expected[:, :, :rows])
    assert not out[:, :, rows:].isfinite().any()
    grads = torch.autograd.grad(out[:, :, :rows].sum(), (q, bad_k, bad_v))
    clean = torch.autograd.grad(expected[:, :, :rows].sum(), (q, k, v))
    assert torch.equal(grads[0][:, :, :rows], clean[0][:, :, :rows])
    if rows == 6:
        assert torch.equal(grads[1], clean[1]) and torch.equal(grads[2], clean[2])


@pytest.mark.parametrize("d", [2, 7, 64])
def test_norms(d):
    x = torch.randn(5, d, dtype=torch.float64)
    w, b = torch.randn(d, dtype=torch.float64), torch.randn(d, dtype=torch.float64)
    assert torch.allclose(layer_norm(x, w, b, 1e-5), F.layer_norm(x, (d,), w, b, 1e-5))
    by_hand = torch.stack([(r - r.mean()) / (((r - r.mean()) ** 2).sum() / (d - 1)).sqrt().add(1e-6) for r in x])
    assert torch.allclose(layer_norm(x, w, b, 1e-6, kind="std"), w * by_hand + b)
    assert torch.allclose(layer_norm(x, w, None, 1e-5, kind="rms"), F.rms_norm(x, (d,), w, 1e-5))
    constant = torch.full((3, d), 2.5, dtype=torch.float64, requires_grad=True)
    for kind in ("layer", "std"):
        out = layer_norm(constant, w, b, 1e-6, kind=kind)
        assert torch.equal(out, b.expand(3, d))
        assert torch.autograd.grad(out.sum(), constant)[0].isfinite().all()


def test_positional_table_by_hand():
    table = positional_table(6000, 7)
    assert table.shape == (6000, 7) and table.dtype == torch.float32
    for position, column in [(0, 0), (0, 1), (1, 0), (5000, 3), (5999, 6), (123, 2)]:
        angle = position / 10000 ** (2 * (column // 2) / 7)
        expected = math.sin(angle) if column % 2 == 0 else math.cos(angle)
        assert abs(table[position, column].item() - expected) < 1e-6
    assert positional_table(10, 1).shape == (10, 1)


def test_embedding_offset_scale_and_padding():
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    table = positional_table(20, 6)
    ids = torch.tensor([[1, 2, 0], [8, 8, 0]])
    out = embed(ids, weight, table, scale=3.0, offset=4, padding_idx=0)
    assert torch.allclose(out, weight[ids] * 3 + table[4:7].double())
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert torch.equal(grad[:, 0], torch.tensor([0, 3.0, 3, 0, 0, 0, 0, 0, 6], dtype=torch.float64))
    x = torch.randn(2, 3, 6)
    assert torch.allclose(add_positional(x, table, 4), x + table[4:7])


def test_stacks_start_from_copies_of_one_layer_and_tie():
    model = layers.Transformer(11, 11, 8, 3, 2, 0.1, d_ff=16, tie_weights=True)
    for stack in (model.encoder, model.decoder):
        first = stack.layers[0].state_dict()
        for layer in stack.layers:
            assert all(torch.equal(first[name], tensor) for name, tensor in layer.state_dict().items())
    assert model.out.weight is model.encoder.embed.lut.weight is model.decoder.embed.lut.weight


def test_reference_layer_order_is_the_papers_in_post_norm():
    """Post-norm with LayerNorm equals torch.nn.TransformerEncoderLayer, weight by weight."""
    ours = layers.EncoderLayer(16, 4, 0.0, d_ff=32, norm_first=False, norm="layer")
    torchs = torch.nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=False)
    state = ours.state_dict()
    qkv = ("attn.q_linear", "attn.k_linear", "attn.v_linear")
    torchs.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([state[f"{name}.weight"] for name in qkv]),
            "self_attn.in_proj_bias": torch.cat([state[f"{name}.bias"] for name in qkv]),
            "self_attn.out_proj.weight": state["attn.out.weight"],
            "self_attn.out_proj.bias": state["attn.out.bias"],
            "linear1.weight": state["ff.linear_1.weight"],
            "linear1.bias": state["ff.linear_1.bias"],
            "linear2.weight": state["ff.linear_2.weight"],
            "linear2.bias": state["ff.linear_2.bias"],
            **{f"norm{n}.{part}": state[f"norm_{n}.{part}"] for n in (1, 2) for part in ("weight", "bias")},
        }
    )
    x = torch.randn(2, 5, 16)
    keep = torch.arange(5) < torch.tensor([5, 3])[:, None]
    assert torch.allclose(ours(x, keep[:, None]), torchs(x, src_key_padding_mask=~keep), atol=1e-5)
