"""Options that forbid or force the next token, or change its probability."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import GenerationConfig
from .request import Request


class Rules:
    """The options of one call, for the prefixes of its batch.

    Args:
        config, request: arguments of the call; least (B,): smallest number of tokens of an answer, EOS included.
        prefix: per sentence the ids that its answers must begin with, or None. The ids of a prefix override every other
            rule.

    Attributes:
        suppressed: ids that are never chosen, ascending.
    """

    def __init__(
        self,
        config: GenerationConfig,
        request: Request,
        least: Tensor | None = None,
        prefix: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._eos, self._config, self._device = request.eos, config, request.src.device
        self.suppressed = sorted({*config.suppress})
        self._suppress = torch.tensor(self.suppressed, device=self._device) if config.suppress else None
        self._limits = request.limits
        self._least = torch.zeros_like(request.limits) if least is None else least
        self._first_limit = int(self._limits.min()) if config.force_eos and len(self._limits) else 0
        self._most = int(self._least.max()) if len(self._least) else 0
        longest = max(map(len, prefix or ()), default=0)
        self._forced: Tensor | None = None  # (sentences, longest + 1), -1 after the end of a prefix
        if prefix is not None and longest:
            rows = [[*ids, *[-1] * (longest + 1 - len(ids))] for ids in prefix]
            self._forced = torch.tensor(rows, device=self._device)
        bounds = self._forced is not None or self._suppress is not None or self._most > 1 or config.force_eos
        self._active = bounds or config.no_repeat_ngram > 0 or config.repetition_penalty != 1.0

    def only_suppress(self, length: int) -> bool:
        """Return True if the rules only suppress tokens behind prefixes of this length."""
        ends = self._config.force_eos and length >= self._first_limit
        bounds = ends or self._forced is not None or self._most > 1
        return not (bounds or self._config.no_repeat_ngram > 0 or self._config.repetition_penalty != 1.0)

    def plain_steps(self, length: int, most: int) -> int:
        """Number of lengths from this one on for which the rules `only_suppress`, at most `most`."""
        if not self.only_suppress(length):
            return 0
        return min(most, self._first_limit - length) if self._config.force_eos else most

    def apply(self, logits: Tensor, tokens: Tensor, sentence: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the rules to the logits (rows, vocabulary) of the prefixes `tokens` (rows, t), BOS first.

        sentence: (rows,), sentence of each row.
        Returns logits that are -inf where a token may not follow, and logits whose softmax gives the probabilities.
        """
        if not self._active:
            return logits, logits
        known = self._force_end(self._penalise_repetition(logits, tokens), tokens, sentence)
        allowed = self._block_forbidden(known, tokens, sentence)
        return allowed, allowed if self._config.renormalize else known

    def _force_end(self, logits: Tensor, tokens: Tensor, sentence: Tensor) -> Tensor:
        """Allow only EOS, with probability 1, where an answer has one token left."""
        if not self._config.force_eos or tokens.shape[1] < self._first_limit:
            return logits
        last = (self._limits[sentence] <= tokens.shape[1])[:, None]
        end = torch.full_like(logits[:1], -torch.inf)
        end[0, self._eos] = 0
        return torch.where(last, end, logits)

    def _penalise_repetition(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits with the repetition penalty."""
        penalty = self._config.repetition_penalty
        if penalty == 1.0 or tokens.shape[1] == 1:
            return logits
        chosen = tokens[:, 1:]
        before = logits.gather(1, chosen)
        after = torch.where(before > 0, before / penalty, before * penalty)
        return logits.scatter(1, chosen, after)

    def _block_forbidden(self, logits: Tensor, tokens: Tensor, sentence: Tensor) -> Tensor:
        """Return the logits with -inf where a token may not follow."""
        n, chosen = self._config.no_repeat_ngram, tokens[:, 1:]
        steps = chosen.shape[1]
        forced = None
        if self._forced is not None and steps < self._forced.shape[1] - 1:
            forced = self._forced[sentence, steps]
        early, repeats = steps + 1 < self._most, 0 < n <= steps
        if self._suppress is None and not early and forced is None and not repeats:
            return logits
        allowed = logits.clone()
        if self._suppress is not None:
            allowed[:, self._suppress] = -torch.inf
        if early:
            allowed[self._least[sentence] > steps + 1, self._eos] = -torch.inf
        if repeats:
            windows = chosen.unfold(1, n, 1)  # (rows, steps - n + 1, n)
            newest = chosen[:, steps - n + 1 :]
            same = (windows[:, :, : n - 1] == newest[:, None]).all(dim=2)
            row, at = same.nonzero(as_tuple=True)
            allowed[row, windows[row, at, n - 1]] = -torch.inf
        if forced is not None:
            rows = (forced >= 0).nonzero().squeeze(1)
            only = torch.full_like(allowed[rows], -torch.inf)
            wanted = forced[rows, None]
            allowed[rows] = only.scatter(1, wanted, logits[rows].gather(1, wanted))
        return allowed
