"""What the benchmark is to show, beside what it shows."""

from __future__ import annotations

import math
from typing import NamedTuple

from .cells import CALL, LARGE, MASS, OWN, READ, Cell
from .figures import Results, Where, main, only


class Outcome(NamedTuple):
    """A goal, its limit, and what was measured; the same on rows in the cache that cores share."""

    goal: str
    limit: float
    at_least: bool
    measured: float
    shared: float = math.nan

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def lost(results: Results) -> list[tuple[Cell, str, float]]:
    """Return every cell in which a peer is faster: the peer, and how many times."""
    found = []
    for cell, figures in results.cells.items():
        if cell.operation != CALL:
            own = figures.median[OWN]
            found += [
                (cell, peer, own / figures.median[peer]) for peer in figures.peers() if figures.median[peer] < own
            ]
    return found


def outcomes(results: Results) -> list[Outcome]:
    """Return the goals in the order of the operations."""
    return [*_sampling(results), *_verification(results), *_peers(results), *_conditions(results)]


def _large(cell: Cell) -> bool:
    return cell.vocab >= LARGE


def _small(cell: Cell) -> bool:
    return cell.vocab == 32000


def _large_real_or_zipf(cell: Cell) -> bool:
    return _large(cell) and cell.shape != "flat"


def _sampling(results: Results) -> list[Outcome]:
    rows: tuple[tuple[str, float, str, Where], ...] = (
        ("greedy", 1.1, "greedy", lambda _: True),
        ("temperature, V >= 100k", 1.6, "temperature", _large),
        ("temperature, V = 32000", 2.2, "temperature", _small),
        ("top-k + top-p, V >= 100k", 1.3, "top-k + top-p", _large),
        ("top-k + top-p, V = 32000", 2.0, "top-k + top-p", _small),
        ("top-p, real and Zipf, V >= 100k", 2.0, "top-p", _large_real_or_zipf),
        ("top-p, flat, V >= 100k", 2.5, "top-p", lambda cell: _large(cell) and cell.shape == "flat"),
        ("full chain, V >= 100k", 1.6, "full chain", _large),
    )
    outcomes = []
    for goal, limit, operation, where in rows:
        cold = results.ratio(main(operation, where), OWN, READ)
        shared = results.ratio(only(operation, where, cache="shared"), OWN, READ)
        outcomes.append(Outcome(f"{goal}, times one read", limit, False, cold, shared))
    return outcomes


def _verification(results: Results) -> list[Outcome]:
    rows = (
        ("verify greedy, times one read of all rows", 1.0, "verify greedy", READ),
        ("verify probs, times one read of all rows", 1.0, "verify probs", READ),
        ("verify token, times one mass pass over the rows it needs", 1.3, "verify token", MASS),
        ("verify block, times one mass pass over all rows", 1.3, "verify block", MASS),
    )
    return [
        Outcome(goal, limit, False, results.ratio(main(operation), OWN, below))
        for goal, limit, operation, below in rows
    ]


def _peers(results: Results) -> list[Outcome]:
    wanted = main("top-k + top-p")
    found = [
        Outcome(f"top-k + top-p, {peer} / draftproof", limit, True, results.ratio(wanted, peer, OWN))
        for peer, limit in (("llama.cpp", 5.0), ("transformers", 80.0), ("vllm", 80.0))
    ]
    return [*found, Outcome("cells in which a peer is faster", 0, False, len({cell for cell, _, _ in lost(results)}))]


def _conditions(results: Results) -> list[Outcome]:
    bfloat16 = results.ratio(lambda cell: cell.dtype == "bfloat16", OWN, f"{OWN}, float32")
    threads = results.ratio(lambda cell: cell.threads == 2 and cell.batch >= 8, f"{OWN}, 1 thread", OWN)
    calls = results.where(lambda cell: cell.operation == CALL).values()
    numpy, torch = (next((figures.median[name] for figures in calls), math.nan) for name in (OWN, f"{OWN}, torch"))
    return [
        Outcome("bfloat16 rows / float32 rows", 1.0, False, bfloat16),
        Outcome("1 thread / 2 threads, B >= 8", 1.7, True, threads),
        Outcome("a whole call on 16 logits, NumPy, us", 3.0, False, numpy),
        Outcome("a whole call on 16 logits, torch, us", 5.0, False, torch),
    ]
