"""What a call launches and moves, counted in Triton's interpreter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, interpreter_builder


@dataclass
class Launch:
    """One launch: bytes read of the rows that are watched, of all else, bytes written, atomic operations."""

    kernel: str
    programs: int
    rows: int = 0
    other: int = 0
    written: int = 0
    atomics: int = 0


@dataclass
class Counts:
    """What a call did."""

    rows: list[tuple[int, int]]  # first address and the one behind the last, of every watched tensor
    launches: list[Launch] = field(default_factory=list)

    def load(self, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8 or 1
        address = np.broadcast_to(pointers.data, np.shape(mask.data))[mask.data]
        watched = sum(int(((address >= start) & (address < end)).sum()) for start, end in self.rows) * size
        self.launches[-1].rows += watched
        self.launches[-1].other += address.size * size - watched

    def store(self, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8 or 1
        self.launches[-1].written += int(np.sum(mask.data)) * size

    def atomic(self, mask: Any) -> None:
        self.launches[-1].atomics += int(np.sum(mask.data))


@contextlib.contextmanager
def counting(*rows: torch.Tensor) -> Iterator[Counts]:
    """Count what is launched, and what is read of ``rows``, which must be contiguous."""
    counts = Counts([(r.data_ptr(), r.data_ptr() + r.numel() * r.element_size()) for r in rows])
    run, load, store = (
        InterpretedFunction.run,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )
    rmw, cas = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas

    def counted_run(function: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        counts.launches.append(Launch(function.fn.__name__, math.prod(grid)))
        return run(function, *args, grid=grid, **kwargs)

    def counted_load(builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        counts.load(pointers, mask)
        return load(builder, pointers, mask, *rest, **named)

    def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counts.store(pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    def counted_rmw(builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counts.atomic(mask)
        return rmw(builder, operation, pointers, value, mask, *rest)

    def counted_cas(builder: Any, pointers: Any, *rest: Any) -> Any:
        counts.atomic(pointers)
        return cas(builder, pointers, *rest)

    with (
        mock.patch.object(InterpretedFunction, "run", counted_run),
        mock.patch.object(type(interpreter_builder), "create_masked_load", counted_load),
        mock.patch.object(type(interpreter_builder), "create_masked_store", counted_store),
        mock.patch.object(type(interpreter_builder), "create_atomic_rmw", counted_rmw),
        mock.patch.object(type(interpreter_builder), "create_atomic_cas", counted_cas),
    ):
        yield counts
