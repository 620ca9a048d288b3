"""transformers: the processors that ``generate`` would build, softmax and multinomial; its speculative sampling."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import _speculative_sampling

from ..cells import CALL, SAMPLING
from .base import Contestant, Given

PROCESSORS = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


def contestant(name: str, given: Given) -> Contestant | None:
    """Return the chain for sampling; for token and block verification its rejection rule, a request at a time."""
    cell = given.cell
    if cell.rule in ("token", "block"):
        return Contestant(name, lambda i: _verify(*given.rows(i)))
    if cell.verifies or cell.operation == CALL:
        return None
    settings = SAMPLING[cell.operation]
    if settings.get("temperature") == 0.0:
        return Contestant(name, lambda i: given.rows(i)[0].float().argmax(-1))
    chain = LogitsProcessorList([processor(settings[key]) for key, processor in PROCESSORS.items() if key in settings])
    history = torch.from_numpy(given.history)

    def call(i: int) -> Any:
        # generate() copies the last row to float32 before it calls the processors.
        scores = given.rows(i)[0].to(dtype=torch.float32, copy=True)
        return torch.multinomial(torch.softmax(chain(history, scores), -1), 1)

    return Contestant(name, call)


def _verify(target: Any, draft: Any, tokens: Any) -> list[Any]:
    drafted = tokens.shape[1]
    return [
        _speculative_sampling(tokens[b : b + 1], draft[b : b + 1].float(), drafted, target[b : b + 1].float())
        for b in range(len(tokens))
    ]
