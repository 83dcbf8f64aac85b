"""Layers: state dict, outputs and gradients are those of the reference classes of the same name."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from dialect_cases import keep
from torch import nn

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.layers.embedding import is_lookup

D = 16


def test_verbose_prints_the_weights(capsys):
    attention = layers.MultiHeadAttention(2, D).eval()
    x = torch.randn(1, 3, D)
    out = attention(x, x, x, None, verbose=True)
    assert "tensor(" in capsys.readouterr().out
    assert torch.allclose(out, attention(x, x, x), atol=1e-6)


def test_a_table_computed_elsewhere_is_honoured():
    encoder = layers.PositionalEncoder(D, 0.0, max_len=10)
    mine = torch.randn(1, 4, D)
    encoder.load_state_dict({"pe": mine})
    x = torch.zeros(1, 6, D)
    out = encoder(x)
    assert torch.equal(out[:, :4], mine)
    assert torch.allclose(out[0, 4:], tfast.positional_table(6, D)[4:])
    assert torch.allclose(encoder(x, offset=5)[0], tfast.positional_table(11, D)[5:])
    assert encoder(x[:0], offset=torch.zeros(0, dtype=torch.int64)).shape == (0, *x.shape[1:])


def test_positions_past_max_len_keep_the_state_dict():
    encoder = layers.PositionalEncoder(D, 0.0, max_len=4)
    encoder(torch.zeros(1, 9, D))
    assert encoder.state_dict()["pe"].shape == (1, 4, D)


@pytest.mark.parametrize(("name", "plain"), [("relu", torch.relu), ("swish", F.silu), ("gelu", F.gelu)])
def test_activations(name, plain):
    module, x = layers.FeedForward(D, 24, 0.0, name), torch.randn(3, 5, D, requires_grad=True)
    expected = module.linear_2(plain(module.linear_1(x)))
    out = module(x)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(y.square().sum(), (x, *module.parameters())) for y in (out, expected)]
    torch.testing.assert_close(*grads)
    assert module(x).detach().equal(copy.deepcopy(module)(x).detach())


def test_an_activation_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="activation: expected one of relu, swish, gelu, got 'tanh'"):
        tfast.Transformer(11, 11, D, 1, 4, 0.1, activation="tanh")


def test_sides_of_two_sizes_a_scale_and_a_layout():
    model = tfast.Transformer(
        11, 13, D, (2, 1), (4, 2), 0.0, d_ff=(24, 40), scale=1.0, positions="halves", max_len=3
    ).eval()
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 1)
    assert (model.encoder.layers[0].attn.h, model.decoder.layers[0].attn_2.h) == (4, 2)
    assert [side.layers[0].ff.linear_1.out_features for side in (model.encoder, model.decoder)] == [24, 40]
    ids = torch.randint(0, 11, (2, 7))
    expected = model.encoder.embed.lut(ids) + tfast.positional_table(7, D, layout="halves")
    torch.testing.assert_close(model.encoder.embedded(ids, None), expected)  # the table is extended in its layout
    assert model(ids, ids, None, AttentionMask.causal()).shape == (2, 7, 13)
    tied = tfast.Transformer(11, 11, D, 1, 4, 0.0, tie_weights=True)
    assert tied.out.weight is tied.encoder.embed.lut.weight is tied.decoder.embed.lut.weight


def test_padding_idx_gets_no_gradient():
    model = layers.Encoder(11, D, 1, 4, 0.1, padding_idx=0)
    assert torch.all(model.embed.lut.weight[0] == 0)
    model(torch.tensor([[1, 2, 0]]), keep(2, length=3)).sum().backward()
    assert torch.all(model.embed.lut.weight.grad[0] == 0)


@pytest.mark.parametrize("norm", ["std", "layer", "rms"])
def test_a_sublayer_of_a_stack_costs_one_norm(norm, monkeypatch):
    """Between pre-norm layers the residual sum and the next norm are one op, with equal bits."""
    model = layers.Transformer(11, 12, D, 3, 4, 0.1, norm=norm, d_ff=24)
    ids, mask = torch.randint(0, 11, (3, 7)), AttentionMask.lengths(torch.tensor([7, 3, 1]))
    calls = []
    module = importlib.import_module("transformer_fast.layers.norm")
    for name in ("layer_norm", "dropout_of_any"):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, op=op, name=name, **k: calls.append(name) or op(*a, **k))

    def run():
        calls.clear()
        torch.manual_seed(5)
        out = model(ids, ids, mask, AttentionMask.causal())
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    joined = run()
    assert calls.count("layer_norm") == (1 + 2 * 3) + (1 + 3 * 3) and "dropout_of_any" not in calls
    for stack in (model.encoder, model.decoder):  # a layer with a hook is called, and computes its sum itself
        stack.layers[1].register_forward_hook(lambda *_: None)
    watched = run()
    assert calls.count("dropout_of_any") == 4  # the layer before it also computes its sum itself
    assert all(torch.equal(a, b) for a, b in zip(joined, watched, strict=True))


@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}], ids=str)
def test_rms_norm_stands_for_torch_s(options):
    slow, fast = nn.RMSNorm(D, **options), layers.RMSNorm(D, **options)
    if slow.weight is not None:
        nn.init.uniform_(slow.weight, 0.5, 1.5)
    fast.load_state_dict(slow.state_dict())
    slow.load_state_dict(fast.state_dict())
    assert isinstance(fast, nn.RMSNorm) and repr(fast) == repr(slow)
    x, y = (1e-2 * torch.randn(3, 5, D)).requires_grad_(), torch.randn(3, 5, D, requires_grad=True)
    torch.testing.assert_close(fast(x), slow(x))
    out, summed = fast(y, residual=x)
    expected = [*torch.autograd.grad(slow(x + y).square().sum(), (x, y)), x + y]
    actual = [*torch.autograd.grad(out.square().sum(), (x, y)), summed]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_every_norm_of_an_rms_model_is_rms_norm_with_its_eps():
    model = layers.Transformer(11, 12, D, 2, 4, 0.1, norm="rms")
    norms = [m for name, m in model.named_modules() if name.rpartition(".")[2].startswith("norm")]
    assert {(type(m), m.eps) for m in norms} == {(layers.RMSNorm, 1e-6)} and len(norms) == 2 * 2 + 2 * 3 + 2
    assert not any(name.endswith(".bias") and ".norm" in name for name in model.state_dict())


@pytest.mark.parametrize("kind", [layers.LayerNorm, layers.RMSNorm, nn.LayerNorm, nn.RMSNorm])
def test_a_norm_without_weights_refuses_another_width(kind):
    """torch's class raises too if the last dimension does not fit."""
    model = nn.Sequential(kind(8, elementwise_affine=False))
    tfast.accelerate(model)
    assert model(torch.randn(2, 8)).shape == (2, 8)
    with pytest.raises(ValueError, match=r"\(d,\) = \(8,\), the normalized_shape, got x \(2, 16\)"):
        model(torch.randn(2, 16))


def test_norms_of_several_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"normalized_shape must be the last dimension only, \(d,\), got \(3, 16\)"):
        layers.RMSNorm((3, D))
    with pytest.raises(ValueError, match=r"normalises the last dimension only.*\(3, 16\)"):
        layers.LayerNorm((3, D), elementwise_affine=False)(torch.randn(2, 3, D))


@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_an_embedding_that_does_more_than_look_up_is_called(option):
    assert is_lookup(nn.Embedding(5, 4)) and not is_lookup(nn.Embedding(5, 4, **{option: True}))


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: layers.FeedForward(D, 32, dropout=0.0), 1),
        (lambda: layers.MultiHeadAttention(2, D, dropout=0.0), 3),
    ],
    ids=["feed-forward", "attention"],
)
def test_an_autocast_region_keeps_its_copy_until_it_is_cleared(make, inputs):
    """PyTorch copies a weight once per region, and sees no change in place: nn.Linear does the same."""
    module, args = make(), [torch.randn(2, 5, D)] * inputs
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = module(*args)
        for p in module.parameters():
            p.mul_(1.5)
        assert torch.equal(module(*args), before)
        torch.clear_autocast_cache()
        new = module(*args)
    assert not torch.equal(new, before)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(*args), new)


def test_a_mask_of_two_dimensions_is_told_its_third() -> None:
    x = torch.randn(2, 5, 8)
    attention = tfast.layers.MultiHeadAttention(2, 8, 0.0)
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"\(B, L\) padding mask as mask\.unsqueeze\(1\), a \(Lq, Lk\) mask as mask\["):
        attention(x, x, x, keep)
    assert torch.equal(attention(x, x, x, keep[None]), attention(x, x, x, tfast.AttentionMask.keep(keep)))
