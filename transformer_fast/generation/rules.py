"""Which tokens may come next: the options that forbid, force or reweigh them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import GenerationConfig
from .decoding import Request


class Rules:
    """The options of one call, for the prefixes of its batch.

    Args:
        config, request: of the call; least (B,) is the fewest tokens of an answer, EOS included.
        prefix: for each sentence the ids its answers must begin with, or None. They override every other rule.
    """

    def __init__(
        self,
        config: GenerationConfig,
        request: Request,
        least: Tensor | None = None,
        prefix: Sequence[Sequence[int]] | None = None,
    ) -> None:
        device = request.src.device
        self._eos, self._least, self._config = request.eos, least, config
        self._limits = request.limits if config.force_eos else None
        self._first_limit = int(request.limits.min()) if config.force_eos else 0
        self._most = 0 if least is None or not least.numel() else int(least.max())
        self._suppress = torch.tensor(config.suppress, device=device) if config.suppress else None
        self._forced: Tensor | None = None
        if prefix is not None and any(prefix):
            longest = max(map(len, prefix))
            rows = [[*ids, *[-1] * (longest - len(ids))] for ids in prefix]
            self._forced = torch.tensor(rows, device=device)

    def apply(self, logits: Tensor, tokens: Tensor, sentence: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, vocabulary) logits of the prefixes `tokens` (rows, t), BOS first, each of a `sentence` (rows,) ->
        logits that are -inf where a token may not follow; and those whose softmax is the probabilities."""
        known = self._force_end(self._reweigh(logits, tokens), tokens, sentence)
        allowed = self._forbid(known, tokens, sentence)
        return allowed, allowed if self._config.renormalize else known

    def _force_end(self, logits: Tensor, tokens: Tensor, sentence: Tensor) -> Tensor:
        """EOS alone, with probability 1, where an answer has one token left."""
        if self._limits is None or tokens.shape[1] < self._first_limit:
            return logits
        last = (self._limits[sentence] <= tokens.shape[1])[:, None]
        end = torch.full_like(logits[:1], -torch.inf)
        end[0, self._eos] = 0
        return torch.where(last, end, logits)

    def _reweigh(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The logits with the repetition penalty."""
        penalty, chosen = self._config.repetition_penalty, tokens[:, 1:]
        if penalty == 1.0 or chosen.shape[1] == 0:
            return logits
        before = logits.gather(1, chosen)
        return logits.scatter(1, chosen, torch.where(before > 0, before / penalty, before * penalty))

    def _forbid(self, logits: Tensor, tokens: Tensor, sentence: Tensor) -> Tensor:
        """The logits, -inf where a token may not follow."""
        step, n = tokens.shape[1] - 1, self._config.no_repeat_ngram
        forced = self._forced[sentence, step] if self._forced is not None and step < self._forced.shape[1] else None
        repeats = 0 < n <= step
        if self._suppress is None and step + 1 >= self._most and forced is None and not repeats:
            return logits
        allowed = logits.clone()
        if self._suppress is not None:
            allowed[:, self._suppress] = -torch.inf
        if self._least is not None and step + 1 < self._most:
            allowed[self._least[sentence] > step + 1, self._eos] = -torch.inf
        if repeats:
            windows = tokens[:, 1:].unfold(1, n, 1)  # (rows, step - n + 1, n)
            newest = tokens[:, tokens.shape[1] - n + 1 :]
            row, start = (windows[:, :, : n - 1] == newest[:, None]).all(dim=2).nonzero(as_tuple=True)
            allowed[row, windows[row, start, n - 1]] = -torch.inf
        if forced is not None:
            rows = (forced >= 0).nonzero().squeeze(1)
            only = torch.full_like(allowed[rows], -torch.inf)
            wanted = forced[rows, None]
            allowed[rows] = only.scatter(1, wanted, logits[rows].gather(1, wanted))
        return allowed
