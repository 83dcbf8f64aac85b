"""The dialect of TensorFlow's tutorial in plain eager PyTorch: the text of
:mod:`transformer_fast.dialects.tensorflow`, and its oracle. Masks are float, 1.0 = blocked."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import Text, extended, head_width

LayerNorm = nn.LayerNorm
"""The norm of the layers."""
EPSILON = 1e-6


def get_angles(pos: Tensor | float, i: Tensor | float, d_model: int) -> Tensor:
    """``pos / 10000 ** (2 * (i // 2) / d_model)``, fp64: i counts dimensions, so 2i and 2i + 1 share one angle.

    pos and i: numbers or tensors that broadcast, such as (position, 1) and (1, d_model).
    """
    pos, i = (torch.as_tensor(t, dtype=torch.float64) for t in (pos, i))
    return pos / 10000.0 ** (2 * torch.floor(i / 2) / d_model)


def positional_encoding(position: int, d_model: int) -> Tensor:
    """fp32 (1, position, d_model), even dimensions sines, odd ones cosines."""
    dimension = torch.arange(d_model)
    angles = get_angles(torch.arange(position)[:, None], dimension[None, :], d_model)
    return torch.where(dimension % 2 == 0, torch.sin(angles), torch.cos(angles))[None].float()


def create_padding_mask(ids: Tensor) -> Tensor:
    """ids (B, L), 0 = padding -> float (B, 1, 1, L), 1.0 at padding."""
    return (ids == 0).float()[:, None, None]


def create_look_ahead_mask(size: int, *, device: torch.device | str | None = None) -> Tensor:
    """Float (size, size), 1.0 above the diagonal. ``AttentionMask.causal()`` is the same mask without a tensor."""
    return torch.ones(size, size, device=device).triu(1)


def create_masks(inp: Tensor, tar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three masks of :class:`Transformer` for source ids (B, L_inp) and target ids (B, L_tar), 0 = padding.

    Returns:
        The encoder's padding (B, 1, 1, L_inp); the decoder's padding and look-ahead (B, 1, L_tar, L_tar); the padding
        of the encoder's outputs (B, 1, 1, L_inp).
    """
    look_ahead = create_look_ahead_mask(tar.shape[1], device=tar.device)
    return create_padding_mask(inp), torch.maximum(create_padding_mask(tar), look_ahead), create_padding_mask(inp)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """q (..., Lq, d), k (..., Lk, d), v (..., Lk, dv) -> output and weights."""
    return attend(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(k.shape[-1]), v, mask)


def attend(scores: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Output and weights of attention with these scores; 1.0 in ``mask`` blocks."""
    if scores.dtype != torch.float64:
        scores = scores.float()
    if mask is not None:
        # The tutorial adds mask * -1e9. Replacing the score instead gives the same weights if at least one key is
        # visible. A fully blocked row becomes uniform; in fp32 rounding of the sum gives the same for |score| < 32, in
        # fp64 it does not.
        scores = torch.where(mask == 0, scores, torch.full_like(scores, -1e9))
    weights = F.softmax(scores, dim=-1).to(v.dtype)
    return torch.matmul(weights, v), weights


class MultiHeadAttention(Text):
    """Multi-head attention: (v, k, q, mask), each (B, L, d_model) -> output (B, Lq, d_model) and weights
    (B, num_heads, Lq, Lk)."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.depth = head_width(self, d_model, num_heads)
        self.num_heads = num_heads
        self.d_model = d_model
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.dense = nn.Linear(d_model, d_model)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, self.num_heads, self.depth).permute(0, 2, 1, 3)

    def forward(self, v: Tensor, k: Tensor, q: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.split_heads(self.wq(q)), self.split_heads(self.wk(k)), self.split_heads(self.wv(v))
        attended, weights = scaled_dot_product_attention(q, k, v, mask)
        concatenated = attended.permute(0, 2, 1, 3).reshape(q.shape[0], -1, self.num_heads * self.depth)
        return self.dense(concatenated), weights


def point_wise_feed_forward_network(d_model: int, dff: int) -> nn.Sequential:
    """``Linear(dff)``, ReLU, ``Linear(d_model)`` (Vaswani et al., 2017, section 3.3); parameters ``0.*``, ``2.*``."""
    return nn.Sequential(nn.Linear(d_model, dff), nn.ReLU(), nn.Linear(dff, d_model))


class EncoderLayer(Text):
    """Encoder layer: (x, mask) -> x, (B, L, d_model)."""

    def __init__(self, d_model: int, num_heads: int, dff: int, rate: float = 0.1) -> None:
        super().__init__()
        self.mha = self.family.MultiHeadAttention(d_model, num_heads)
        self.ffn = point_wise_feed_forward_network(d_model, dff)
        self.layernorm1 = self.family.LayerNorm(d_model, eps=EPSILON)
        self.layernorm2 = self.family.LayerNorm(d_model, eps=EPSILON)
        self.dropout1 = nn.Dropout(rate)
        self.dropout2 = nn.Dropout(rate)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attn_output, _ = self.mha(x, x, x, mask)
        out1 = self.layernorm1(x + self.dropout1(attn_output))
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


class DecoderLayer(Text):
    """Decoder layer: (x, enc_output, look_ahead_mask, padding_mask) -> x and the weights of both attentions."""

    def __init__(self, d_model: int, num_heads: int, dff: int, rate: float = 0.1) -> None:
        super().__init__()
        self.mha1 = self.family.MultiHeadAttention(d_model, num_heads)
        self.mha2 = self.family.MultiHeadAttention(d_model, num_heads)
        self.ffn = point_wise_feed_forward_network(d_model, dff)
        self.layernorm1 = self.family.LayerNorm(d_model, eps=EPSILON)
        self.layernorm2 = self.family.LayerNorm(d_model, eps=EPSILON)
        self.layernorm3 = self.family.LayerNorm(d_model, eps=EPSILON)
        self.dropout1 = nn.Dropout(rate)
        self.dropout2 = nn.Dropout(rate)
        self.dropout3 = nn.Dropout(rate)

    def forward(
        self, x: Tensor, enc_output: Tensor, look_ahead_mask: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        attn1, weights1 = self.mha1(x, x, x, look_ahead_mask)
        out1 = self.layernorm1(self.dropout1(attn1) + x)
        attn2, weights2 = self.mha2(enc_output, enc_output, out1, padding_mask)
        out2 = self.layernorm2(self.dropout2(attn2) + out1)
        return self.layernorm3(self.dropout3(self.ffn(out2)) + out2), weights1, weights2


class Embedded(Text):
    """ids (B, L) -> dropout(embedding * sqrt(d_model) + pos_encoding[:, :L])."""

    def __init__(self, d_model: int, vocab_size: int, maximum_position_encoding: int, rate: float) -> None:
        super().__init__()
        self.d_model = d_model
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.register_buffer("pos_encoding", positional_encoding(maximum_position_encoding, d_model))
        self.dropout = nn.Dropout(rate)

    def embedded(self, ids: Tensor) -> Tensor:
        L = ids.shape[1]
        return self.dropout(self.embedding(ids) * math.sqrt(self.d_model) + extended(self.pos_encoding, L)[:, :L])


class Encoder(Embedded):
    """Encoder: (ids, mask) -> (B, L_inp, d_model)."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        dff: int,
        input_vocab_size: int,
        maximum_position_encoding: int,
        rate: float = 0.1,
    ) -> None:
        super().__init__(d_model, input_vocab_size, maximum_position_encoding, rate)
        self.num_layers = num_layers
        layers = (self.family.EncoderLayer(d_model, num_heads, dff, rate) for _ in range(num_layers))
        self.enc_layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedded(x)
        for layer in self.enc_layers:
            x = layer(x, mask)
        return x


class Decoder(Embedded):
    """Decoder: (ids, enc_output, look_ahead_mask, padding_mask) -> (B, L_tar, d_model) and the weights by name."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        dff: int,
        target_vocab_size: int,
        maximum_position_encoding: int,
        rate: float = 0.1,
    ) -> None:
        super().__init__(d_model, target_vocab_size, maximum_position_encoding, rate)
        self.num_layers = num_layers
        layers = (self.family.DecoderLayer(d_model, num_heads, dff, rate) for _ in range(num_layers))
        self.dec_layers = nn.ModuleList(layers)

    def forward(
        self, x: Tensor, enc_output: Tensor, look_ahead_mask: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        x = self.embedded(x)
        attention_weights = {}
        for i, layer in enumerate(self.dec_layers):
            x, block1, block2 = layer(x, enc_output, look_ahead_mask, padding_mask)
            attention_weights[f"decoder_layer{i + 1}_block1"] = block1
            attention_weights[f"decoder_layer{i + 1}_block2"] = block2
        return x, attention_weights


class Transformer(Text):
    """Transformer: (inp, tar, enc_padding_mask, look_ahead_mask, dec_padding_mask) -> logits and the decoder's
    weights."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        dff: int,
        input_vocab_size: int,
        target_vocab_size: int,
        pe_input: int,
        pe_target: int,
        rate: float = 0.1,
    ) -> None:
        super().__init__()
        self.encoder = self.family.Encoder(num_layers, d_model, num_heads, dff, input_vocab_size, pe_input, rate)
        self.decoder = self.family.Decoder(num_layers, d_model, num_heads, dff, target_vocab_size, pe_target, rate)
        self.final_layer = nn.Linear(d_model, target_vocab_size)

    def forward(
        self,
        inp: Tensor,
        tar: Tensor,
        enc_padding_mask: Tensor | None = None,
        look_ahead_mask: Tensor | None = None,
        dec_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        enc_output = self.encoder(inp, enc_padding_mask)
        dec_output, attention_weights = self.decoder(tar, enc_output, look_ahead_mask, dec_padding_mask)
        return self.final_layer(dec_output), attention_weights


class AdditiveAttention(nn.Module):
    """Scores ``v^T tanh(W [k; q])``: (v, k, q, mask) -> output (B, Lq, d) and weights (B, Lq, Lk)."""

    def __init__(self, units: int, key_size: int, query_size: int) -> None:
        super().__init__()
        self.W = nn.Linear(key_size + query_size, units, bias=False)
        self.v = nn.Linear(units, 1, bias=False)
        self.key_size, self.query_size = key_size, query_size

    def forward(self, v: Tensor, k: Tensor, q: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return attend(self.scores(k, q), v, mask)

    def scores(self, k: Tensor, q: Tensor) -> Tensor:
        """k (B, Lk, key_size), q (B, Lq, query_size) -> (B, Lq, Lk)."""
        pairs = q.shape[0], q.shape[1], k.shape[1], -1
        joined = torch.cat((k.unsqueeze(1).expand(pairs), q.unsqueeze(2).expand(pairs)), dim=-1)
        return self.v(torch.tanh(self.W(joined))).squeeze(-1)


class BilinearAttention(nn.Module):
    """Scores ``(W_k k)^T (W_q q)``: (v, k, q, mask) -> output (B, Lq, d) and weights (B, Lq, Lk)."""

    def __init__(self, units: int, key_size: int, query_size: int) -> None:
        super().__init__()
        self.W_k = nn.Linear(key_size, units, bias=False)
        self.W_q = nn.Linear(query_size, units, bias=False)

    def forward(self, v: Tensor, k: Tensor, q: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return attend(torch.einsum("bku,bqu->bqk", self.W_k(k), self.W_q(q)), v, mask)
