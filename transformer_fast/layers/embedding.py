"""Token embedding and positional encoding as drop-in modules."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..ops.embedding import add_positional, embed, positional_table
from .dropout import fused_p
from .hooks import LOOKS_UP, has_role, is_plain


class Embedder(nn.Module):
    """Token embedding times ``sqrt(d_model)``, or another scale.

    Args:
        vocab: number of token ids.
        d_model: width.
        padding_idx: id whose row starts at zero and gets no gradient.
        scale: factor of the embeddings; None is ``sqrt(d_model)``.
    """

    def __init__(self, vocab: int, d_model: int, *, padding_idx: int | None = None, scale: float | None = None) -> None:
        super().__init__()
        self.d_model = d_model
        self.scale = math.sqrt(d_model) if scale is None else scale
        self.lut = nn.Embedding(vocab, d_model, padding_idx=padding_idx)

    def forward(self, x: Tensor) -> Tensor:
        """Embed ids (B, L), int -> (B, L, d_model). Raises IndexError for an id outside the vocabulary (on CPU)."""
        if not is_lookup(self.lut):
            return self.lut(x) * self.scale
        return embed(x, self.lut.weight, scale=self.scale, padding_idx=self.lut.padding_idx)

    def with_positions(
        self, x: Tensor, positions: nn.Module, offset: int | Tensor = 0, *, length: int | None = None
    ) -> Tensor:
        """``positions(self(x))``; see :func:`embed_with_positions`."""
        return embed_with_positions(self, positions, x, offset, length=length)


def embed_with_positions(
    embedder: nn.Module, positions: nn.Module, x: Tensor, offset: int | Tensor = 0, *, length: int | None = None
) -> Tensor:
    """Compute ``positions(embedder(x))`` for ids (B, L), in one pass if both modules are plain.

    The first id is at position ``offset``. A tensor (B,) gives one offset per sequence; ``length`` is then the number
    of positions.
    """
    if is_plain(positions, PositionalEncoder) and is_plain(embedder, Embedder) and is_lookup(embedder.lut):
        p = fused_p(positions.dropout)
        if p is not None:
            return embed(
                x,
                embedder.lut.weight,
                positions.table(offset + x.shape[-1] if length is None else length),  # type: ignore[arg-type]
                scale=embedder.scale,
                offset=offset,
                padding_idx=embedder.lut.padding_idx,
                dropout_p=p,
            )
    x = embedder(x)
    return positions(x) if isinstance(offset, int) and offset == 0 else positions(x, offset)


def is_lookup(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Return True for an embedding that only looks rows up, so that the module need not be called."""
    if not (is_plain(module, nn.Embedding) or has_role(module, LOOKS_UP)):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


class SinusoidalTable(nn.Module):
    """The sinusoidal positional encoding (Vaswani et al., 2017, section 3.5) as a buffer of the module.

    The buffer is (1, max_len, d_model), fp32, and part of the state dict. A loaded table may have any length. Positions
    past the table are computed when needed.

    Args:
        d_model: width; may be odd.
        max_len: length of the stored table.
        layout: order of the columns, see :func:`transformer_fast.positional_table`.
    """

    table_name = "pe"
    """Name of the buffer."""
    table_is_stored = True
    """True if a state dict must hold the buffer. If False, a state dict without the buffer leaves the table
    unchanged."""
    _extended: Tensor | None

    def __init__(self, d_model: int, max_len: int, layout: str = "interleaved") -> None:
        super().__init__()
        self.layout = layout
        self.register_buffer(self.table_name, positional_table(max_len, d_model, layout=layout).unsqueeze(0))
        self.register_buffer("_extended", None, persistent=False)

    def table(self, length: int) -> Tensor:
        """Encoding of at least ``length`` positions: (>= length, d_model)."""
        stored = getattr(self, self.table_name)[0]
        if length <= stored.shape[0]:
            return stored
        if self._extended is None or self._extended.shape[0] < length or self._extended.dtype != stored.dtype:
            beyond = positional_table(2 * length, stored.shape[1], layout=self.layout)[stored.shape[0] :]
            self._extended = torch.cat((stored, beyond.to(stored)))
        return self._extended

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        own = getattr(self, self.table_name)
        loaded = state_dict.get(prefix + self.table_name)
        if loaded is None and not self.table_is_stored:
            state_dict[prefix + self.table_name] = own
        elif loaded is not None and loaded.dim() == 3 and loaded.shape[::2] == own.shape[::2]:
            setattr(self, self.table_name, own.new_empty(loaded.shape))
        self._extended = None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class PositionalEncoder(SinusoidalTable):
    """Adds the sinusoidal positional encoding, then dropout (Vaswani et al., 2017, sections 3.5 and 5.4).

    :class:`SinusoidalTable` describes the buffer ``pe``.

    Args:
        d_model: width; may be odd.
        dropout: probability.
        max_len: length of the stored table.
        layout: order of the columns, see :func:`transformer_fast.positional_table`.
    """

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000, layout: str = "interleaved") -> None:
        super().__init__(d_model, max_len, layout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Compute ``dropout(x + pe[:, offset : offset + L])`` for x (B, L, d_model).

        An integer tensor (B,) gives one offset per sequence.
        """
        last: Any = offset
        if isinstance(offset, Tensor):
            last = int(offset.max()) if offset.numel() else 0
        table, p = self.table(last + x.shape[-2]), fused_p(self.dropout)
        if p is None:
            return self.dropout(add_positional(x, table, offset))
        return add_positional(x, table, offset, p)
