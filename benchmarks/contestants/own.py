"""draftproof itself and the floors of the same cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import draftproof

from ..cells import CALL, MASS, OWN, READ, SAMPLING, Cell
from ..floor import floor
from ..rows import Buffer, Data
from .base import Contestant, Given


def contestants(given: Given) -> list[Contestant]:
    """Return draftproof, draftproof under the main grid's conditions where the cell's differ, and the floors."""
    cell = given.cell
    rows: list[Any] = list(given.buffers if cell.dtype == "float32" else given.tensors)
    found = [_own(OWN, rows, given, cell.threads)]
    if cell.threads > 1:
        found.append(_own(f"{OWN}, 1 thread", rows, given, 1))
    if cell.dtype != "float32":
        found.append(_own(f"{OWN}, float32", list(given.buffers), given, cell.threads))
    if cell.operation == CALL:
        return [*found, _own(f"{OWN}, torch", list(given.tensors), given, 1)]
    found.append(_rotating(READ, [floor(_all_rows(cell, buffer), cell.threads) for buffer in rows]))
    if cell.rule in ("token", "block"):
        needed = [_needed_rows(cell, buffer, i) for i, buffer in enumerate(given.buffers)]
        found.append(_rotating(MASS, [floor(rows, cell.threads, masses=True) for rows in needed]))
    return found


def accepted(cell: Cell, data: Data) -> float:
    """Return the mean number of accepted drafts over the buffers of a cell."""
    operation = _operation(cell, data.history)
    counts = [operation(buffer, i).num_accepted for i, buffer in enumerate(data.buffers)]
    return float(np.mean(counts))


def _own(name: str, rows: list[Any], given: Given, threads: int) -> Contestant:
    import torch

    history = given.history if isinstance(rows[0], Buffer) else torch.from_numpy(given.history)
    operation = _operation(given.cell, history)
    count = len(rows)
    # The buffer's number is the seed, so that a buffer always takes the same path.
    return Contestant(
        name, lambda i: operation(rows[i % count], i % count), enter=lambda: draftproof.set_num_threads(threads)
    )


def _operation(cell: Cell, history: Any) -> Callable[[Any, int], Any]:
    if cell.operation == CALL:
        return lambda buffer, seed: draftproof.sample(buffer[0], temperature=0.0, seed=seed)
    if not cell.verifies:
        given: dict[str, Any] = dict(SAMPLING[cell.operation])
        if "repetition_penalty" in given:
            given["prev_tokens"] = history
        return lambda buffer, seed: draftproof.sample(buffer[0], **given, seed=seed)
    if cell.rule == "greedy":
        return lambda buffer, _: draftproof.verify_greedy(buffer[0], buffer[2])
    if cell.rule == "probs":
        return lambda buffer, seed: draftproof.verify_probs(*buffer, seed=seed)
    if cell.rule == "match":
        return lambda buffer, seed: draftproof.verify(buffer[0], None, buffer[2], rule="match", seed=seed)
    return lambda buffer, seed: draftproof.verify(*buffer, rule=cell.rule, seed=seed)


def _rotating(name: str, calls: list[Callable[[], int]]) -> Contestant:
    return Contestant(name, lambda i: calls[i % len(calls)]())


def _all_rows(cell: Cell, buffer: Any) -> list[np.ndarray]:
    """Return every row handed in, no draft's for greedy and match; bfloat16 rows as the bytes they are."""
    given = buffer[:2] if cell.rule in ("probs", "token", "block") else buffer[:1]
    flat = [rows.reshape(-1, rows.shape[-1]) for rows in given]
    return [row for rows in flat for row in (rows if isinstance(rows, np.ndarray) else _bytes(rows))]


def _bytes(rows: Any) -> np.ndarray:
    import torch

    return rows.view(torch.int16).numpy()


def _needed_rows(cell: Cell, buffer: Buffer, number: int) -> list[np.ndarray]:
    """Return the rows that the rule needs: up to where the draft ends for token, all of them for block."""
    target, draft, tokens = buffer
    count = np.full(len(tokens), cell.drafted)
    if cell.rule == "token":
        count = draftproof.verify(target, draft, tokens, seed=number).num_accepted
    rows: list[np.ndarray] = []
    for b, n in enumerate(count):
        rows += [*target[b, : n + 1], *draft[b, : min(n + 1, cell.drafted)]]
    return rows
