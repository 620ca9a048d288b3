"""Plain torch written with care: top-k first and everything else on its survivors, an inverse CDF instead of noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cells import CALL, SAMPLING
from .base import Contestant, Given

HEAD = 1024
"""How many of the largest logits top-p looks at before it sorts the row."""


def contestant(name: str, given: Given) -> Contestant | None:
    """Return torch for sampling and for greedy verification; flashspec and vLLM are torch for the other rules."""
    cell = given.cell
    if cell.verifies and cell.rule != "greedy":
        return None
    if cell.verifies:
        return Contestant(name, lambda i: _verify_greedy(given.rows(i)[0], given.rows(i)[2]))
    settings = {"temperature": 0.0} if cell.operation == CALL else SAMPLING[cell.operation]
    work = _sampler(settings, torch.from_numpy(given.history))
    return Contestant(name, lambda i: work(given.rows(i)[0]))


def _verify_greedy(target: Any, tokens: Any) -> tuple[Any, Any]:
    best = target.argmax(-1)
    accepted = (best[:, :-1] == tokens).cumprod(1).sum(1, keepdim=True)
    return accepted, best.gather(1, accepted)


def _sampler(settings: dict[str, float], history: Any) -> Callable[[Any], Any]:
    if settings.get("temperature") == 0.0:
        return lambda rows: rows.argmax(-1)
    if "top_k" not in settings and "top_p" not in settings:
        return lambda rows: _inverse(torch.softmax(rows.float() / settings["temperature"], -1))
    if "top_k" not in settings:
        return lambda rows: _top_p(rows.float(), settings["top_p"])
    return lambda rows: _top_k(rows, settings, history)


def _top_k(rows: Any, settings: dict[str, float], history: Any) -> Any:
    if penalty := settings.get("repetition_penalty"):
        values = rows.gather(1, history)
        rows = rows.scatter(1, history, torch.where(values < 0, values * penalty, values / penalty))
    values, ids = torch.topk(rows, int(settings["top_k"]))
    probs = torch.softmax(values.float() / settings["temperature"], -1)
    probs = torch.where(probs.cumsum(-1) - probs < settings["top_p"], probs, 0.0)
    if "min_p" in settings:
        probs = torch.where(probs >= settings["min_p"] * probs[:, :1], probs, 0.0)
    return ids.gather(1, _inverse(probs))


def _top_p(rows: Any, top_p: float) -> Any:
    values, ids = torch.topk(rows, HEAD)
    total = rows.logsumexp(-1, keepdim=True)
    probs = (values - total).exp()
    if bool((probs.sum(-1) < top_p).any()):
        values, ids = rows.sort(dim=-1, descending=True)
        probs = (values - total).exp()
    return ids.gather(1, _inverse(torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)))


def _inverse(probs: Any) -> Any:
    sums = probs.cumsum(-1)
    return torch.searchsorted(sums, torch.rand(len(sums), 1) * sums[:, -1:], right=True)
