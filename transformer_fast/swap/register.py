"""``register``: a user says what a class of modules computes, and :func:`transformer_fast.accelerate` swaps it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from .check import Call, first_line
from .check_fast import Sample, check_fast
from .check_tokens import check_tokens
from .report import LOCK
from .rules import SWAPS
from .swapped import FAST
from .token_layer import MEANINGS, TOKENS, TokenLayer

SIZES = ((2, 1), (3, 2), (5, 5), (3, 17), (2, 97), (2, 300))
"""Batch sizes and lengths for which a function of the user makes inputs."""

MASKS = {
    "key_padding_mask": "blocked",
    "src_key_padding_mask": "blocked",
    "encoder_padding_mask": "blocked",
}
"""Arguments of torch.nn and fairseq, and what they mean; ``register`` asks for the meaning of any other."""


@dataclasses.dataclass(eq=False)
class Registration:
    """Registered class. As a context manager, the class is registered until the end of the block.

    Attributes:
        kind: the class.
        now: the class that computes the same; or the argument that says where the padding is, and its meaning.
    """

    kind: type[nn.Module]
    now: type[nn.Module] | TokenLayer

    def remove(self) -> None:
        """Forget the class, unless it was registered again since. Modules that were swapped keep their class until
        ``report.undo()``."""
        table = TOKENS if isinstance(self.now, TokenLayer) else FAST
        with LOCK:
            if table.get(self.kind) is self:
                del table[self.kind]

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def register(
    kind: type[nn.Module],
    fast: type[nn.Module] | None = None,
    *,
    check: Any,
    mask: str | None = None,
    tokens: bool = False,
    mask_means: str | None = None,
    batch_first: bool = True,
) -> Registration:
    """Say what a class of your own computes, so that :func:`transformer_fast.accelerate` swaps its modules.

    ``register(MyAttention, Fast, check=...)``: ``MyAttention`` computes what ``Fast`` computes, with the same names of
    parameters, children and attributes that ``Fast.forward`` reads, and with the same order of arguments. ``Fast`` is a
    class of this package, or one of your own, such as a subclass of ``MyAttention`` that calls
    :func:`transformer_fast.attention`. ``accelerate(model)`` then swaps each module of exactly this class.

    ``register(MyLayer, mask="key_padding_mask", tokens=True, check=...)``: ``MyLayer`` computes each token alone
    outside of attention, ``forward`` takes hidden states first, and an argument says where the padding is.
    ``accelerate(model, packed=True)`` then gives the layers of exactly this class tokens without padding. The outputs
    are 0 at padding. Attention inside them must be ``nn.MultiheadAttention``, a call of
    ``F.scaled_dot_product_attention`` or :func:`transformer_fast.attention`, or of a registered class.

    The class is tried once, on copies: in evaluation, in training without dropout, and with each dropout dropping
    everything; with the module's parameters, and with other values where all values of a parameter are equal; results,
    buffers and all gradients. Masks among the inputs also hide the first key, and all keys of a sentence. No trial
    shows what other modules of the class, other values of their attributes, or other inputs do: that they compute the
    same is your statement.

    Args:
        kind: class of modules, derived from ``nn.Module``. Subclasses are not registered.
        fast: class that computes the same.
        check: ``(module, inputs)``, or a list of such pairs. ``module`` is an instance of ``kind``. ``inputs`` are the
            arguments of its ``forward``: a tuple, a dict of keyword arguments, or one tensor; or a function
            ``inputs(batch, length)`` that returns them for a batch size and a length. The function is called with
            lengths from 1 to 300, and with the batch size equal to the length.
        mask: name of the argument that says where the padding is. The mask is (B, L), (B, 1, L) or (B, 1, 1, L), or has
            equal rows (B, L, L) or (B, 1, L, L).
        tokens: True with ``mask``.
        mask_means: "keep" (0 or False hides a key), "blocked" (0 or False keeps it) or "added" (to the scores: 0 or
            -1e4 and less). By default "blocked" for ``key_padding_mask``, ``src_key_padding_mask`` and
            ``encoder_padding_mask``; for other names it must be given.
        batch_first: True for hidden states (B, L, d), False for (L, B, d).

    Returns:
        The registration; ``remove()`` takes it back, and so does the end of a ``with`` block. To register a class again
        replaces its registration.

    Raises:
        TypeError: for classes that are no modules, are abstract or known already, and for arguments of a wrong kind.
        ValueError: if the check finds a difference; the message has the largest error and its place.

    Example:
        >>> from transformer_fast.reference.layers import EncoderLayer, MultiHeadAttention as Mine
        >>> inputs = *[torch.randn(2, 5, 16)] * 3, torch.ones(2, 1, 5, dtype=torch.bool)
        >>> with tfast.register(Mine, tfast.layers.MultiHeadAttention, check=(Mine(2, 16), inputs)):
        ...     report = tfast.accelerate(EncoderLayer(16, 2))
        >>> [row.now for row in report.attention]
        ['registered']
    """
    _check_class(kind, "the class")
    rooms = kind.__module__.split(".")
    if kind in SWAPS or (rooms[0] == "transformer_fast" and "reference" not in rooms):
        raise TypeError(f"register: accelerate knows {kind.__name__} already")
    samples = _samples_of(kind, check)
    if fast is not None and (tokens or mask is not None):
        raise TypeError("register: give a fast class, or mask=... with tokens=True; register both in two calls")
    if fast is not None:
        _check_class(fast, "the fast class")
        with LOCK:
            for module, calls in samples:
                check_fast(kind, fast, module, calls)
            FAST[kind] = made = Registration(kind, fast)
        return made
    if not tokens or mask is None:
        raise TypeError(
            f"register: give the class that computes what {kind.__name__} computes; or, for a layer that computes each "
            "token alone outside of attention, the name of its mask and tokens=True"
        )
    names = list(inspect.signature(kind.forward).parameters)[2:]
    if mask not in names:
        has = ", ".join(names) or "none"
        raise TypeError(
            f"register: {kind.__name__}.forward has no argument {mask!r} after its hidden states; it has {has}"
        )
    means = MASKS.get(mask) if mask_means is None else mask_means
    if means not in MEANINGS:
        raise TypeError(f'register: mask_means must say what {mask} means: "keep", "blocked" or "added", got {means!r}')
    layer = TokenLayer(mask, means, bool(batch_first))
    with LOCK:
        before = TOKENS.get(kind)
        TOKENS[kind] = made = Registration(kind, layer)  # for the copies that the check accelerates
        try:
            made.now = check_tokens(kind, layer, samples)
        except BaseException:
            del TOKENS[kind]
            if before is not None:
                TOKENS[kind] = before
            raise
    return made


def _check_class(kind: Any, where: str) -> None:
    if isinstance(kind, nn.Module):
        raise TypeError(f"register: {where} is a module of class {type(kind).__name__}; give the class itself")
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register: {where} must be derived from nn.Module, got {kind!r}")
    if inspect.isabstract(kind) or kind.forward is nn.Module.forward:
        raise TypeError(f"register: {kind.__name__} is abstract: register the classes of the modules themselves")


def _samples_of(kind: type[nn.Module], check: Any) -> list[Sample]:
    """Read the argument ``check`` of ``register``.

    Raises:
        TypeError: if the argument is no pair (module, inputs) and no list of pairs.
        ValueError: if a function that makes inputs fails.
    """
    samples = []
    for pair in check if isinstance(check, list) and check else [check]:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
            raise TypeError(
                f"register: check must be (module, inputs) or a list of such pairs, got {_described(pair)}; module is "
                f"a {kind.__name__}, inputs are the arguments of its forward, or a function of batch and length"
            )
        module, inputs = pair
        if type(module) is not kind:
            raise TypeError(
                f"register: check has a module of class {type(module).__name__}, expected {kind.__name__} exactly"
            )
        if not callable(inputs):
            samples.append((module, [_call(inputs, "the given inputs")]))
            continue
        calls = []
        for batch, length in SIZES:
            try:
                made = inputs(batch, length)
            except Exception as error:
                raise ValueError(f"register: inputs({batch}, {length}) failed: {first_line(error)}") from error
            calls.append(_call(made, f"batch {batch}, length {length}"))
        samples.append((module, calls))
    return samples


def _call(inputs: Any, where: str) -> Call:
    if isinstance(inputs, Tensor):
        return Call((inputs,), {}, where)
    if isinstance(inputs, tuple):
        return Call(inputs, {}, where)
    if isinstance(inputs, Mapping):
        return Call((), dict(inputs), where)
    raise TypeError(
        f"register: inputs must be a tuple of arguments, a dict of keyword arguments, a tensor, or a function of batch "
        f"and length, got {_described(inputs)}"
    )


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(type(inner).__name__ for inner in value) or 'nothing'}"
    return type(value).__name__
