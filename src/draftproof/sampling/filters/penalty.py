"""Repetition penalty (Keskar et al., "CTRL", 2019) as transformers has it: once per id, however often it occurs."""

from __future__ import annotations

from ...types import Array


def penalise(xp: Array, logits: Array, penalty: Array, history: Array) -> Array:
    """Return a copy of ``logits`` [b, V] float32 with ``l < 0 ? l * r : l / r`` at every id of ``history`` [b, L].

    Ids outside [0, V) are padding. Only the touched ids are read and written; an id that occurs twice is written twice
    with the same value.
    """
    rows, columns = xp.nonzero((history >= 0) & (history < logits.shape[-1]))
    ids = history[rows, columns]
    rate = penalty[rows]
    before = logits[rows, ids]
    result = xp.copy(logits)
    result[rows, ids] = xp.where(before < 0.0, before * rate, before / rate)
    return result
