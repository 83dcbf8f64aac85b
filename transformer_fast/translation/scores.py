"""What validation measures, as something to be compared."""

from __future__ import annotations

import math

Scores = dict[str, float]  # "valid_loss", in nats a token, and "bleu", as far as measured


def quality(scores: Scores) -> tuple[float, float]:
    """Scores as something to be compared, more being better: by BLEU, else by loss."""
    return scores.get("bleu", 0.0), -scores.get("valid_loss", math.inf)
