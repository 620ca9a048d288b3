"""flashspec: greedy_step on torch's argmax, rejection_step with its assembly kernel for the residual."""

from __future__ import annotations

import torch
from flashspec.sampling.greedy import greedy_step
from flashspec.sampling.rejection import rejection_step

from .base import Contestant, Given


def contestant(name: str, given: Given) -> Contestant | None:
    """Return flashspec where the cell verifies by argmax or by ratios; it does not sample, and has no ``match``."""
    if given.cell.rule == "greedy":
        return Contestant(name, lambda i: greedy_step(given.rows(i)[2], given.rows(i)[0].argmax(-1)))
    if given.cell.rule == "probs":
        # It takes logarithms of probabilities, so it gets them ready-made.
        ready = [(tokens, draft.float().log(), target.float().log()) for target, draft, tokens in given.tensors]
        return Contestant(name, lambda i: rejection_step(*ready[i % len(ready)]))
    if given.cell.rule not in ("token", "block"):
        return None

    def call(i: int) -> torch.Tensor:
        target, draft, tokens = given.rows(i)
        return rejection_step(
            tokens,
            torch.log_softmax(draft, -1, dtype=torch.float32),
            torch.log_softmax(target, -1, dtype=torch.float32),
        )

    return Contestant(name, call)
