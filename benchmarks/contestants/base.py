"""What a contestant is: a name and a call, and what has to happen before the clock starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..cells import Cell
from ..rows import Buffer, Data

Tensors = tuple[Any, Any, Any]
"""Target, draft and tokens of a buffer; None for what it does not have."""


class Contestant(NamedTuple):
    """One who does the work of a cell.

    ``call(i)`` does it on buffer i. Where ``prepare`` is given, the clock starts after ``prepare(i)``, and ``call``
    gets what that returned instead of i: for libraries that write to what they are given. ``enter`` runs before a
    burst.
    """

    name: str
    call: Callable[[Any], Any]
    prepare: Callable[[int], Any] | None = None
    enter: Callable[[], Any] | None = None


class Given(NamedTuple):
    """What the contestants of a cell are given: its buffers as float32 arrays, and as tensors of the cell's dtype."""

    cell: Cell
    buffers: list[Buffer]
    tensors: list[Tensors]
    history: np.ndarray

    def buffer(self, call: int) -> Buffer:
        return self.buffers[call % len(self.buffers)]

    def rows(self, call: int) -> Tensors:
        return self.tensors[call % len(self.tensors)]


def given(cell: Cell, data: Data) -> Given:
    """Make the tensors. Those of float32 share memory with the buffers."""
    return Given(cell, data.buffers, tensors(data.buffers, cell.dtype), data.history)


def tensors(buffers: list[Buffer], dtype: str) -> list[Tensors]:
    """Return each buffer's target, draft and tokens as tensors."""
    import torch

    def convert(array: Any) -> Any:
        return None if array is None else torch.from_numpy(array).to(getattr(torch, dtype))

    return [
        (convert(b.target), convert(b.draft), None if b.tokens is None else torch.from_numpy(b.tokens)) for b in buffers
    ]
