"""Parameters that are device arrays: checked, and the rows of bad ones marked as dead, in one launch each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from .. import _checks
from ..numerics.constants import FLT_MAX, MAX_VOCAB
from ..numerics.triton_math import OPTIONS
from ..types import Array, Status

# The ranges of ``_checks``: whether 0 is allowed, the largest value, and what a flagged row goes on with. A subnormal
# constant would make the comparison one of float64.
_FLOATS = {
    "temperature": (True, FLT_MAX, 1.0),
    "top_p": (True, 1.0, 1.0),
    "min_p": (True, 1.0, 0.0),
    "repetition_penalty": (False, FLT_MAX, 1.0),
}
_INTEGERS = {"top_k": -1, "offset": 0, "num_draft_tokens": 0, "draft_index": 0}
_MAX_VOCAB = tl.constexpr(MAX_VOCAB)
_BAD_PARAMETER = tl.constexpr(int(Status.BAD_PARAMETER))
_ROWS = 128


def values(xp: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], Array | None]:
    """Do what ``_checks.values`` does."""
    mine = {name: a for name, a in arguments.items() if _base(name) in (*_FLOATS, *_INTEGERS) and a is not None}
    mine = {name: a for name, a in mine.items() if not xp.on_host(a)}
    named, bad = _checks.values(xp, {name: None if name in mine else a for name, a in arguments.items()})
    like = next(iter(arguments.values()))
    batch = like.shape[0]
    if not mine or not batch:
        return {**named, **mine}, bad
    drafted = arguments["draft_tokens"].shape[1] if "draft_tokens" in arguments else 0
    given = {name: _working(name, a).contiguous() for name, a in mine.items()}
    checked = {name: torch.empty_like(a) for name, a in given.items()}
    marks = torch.empty((batch,), dtype=torch.bool, device=like.device)
    _check[(triton.cdiv(batch, _ROWS),)](
        tuple(given.values()),
        tuple(checked.values()),
        tuple(_largest(name, drafted) for name in given),
        marks.view(torch.uint8),
        batch,
        KINDS=tuple(_FLOATS.get(_base(name)) or _INTEGERS[_base(name)] for name in given),
        TOP_K=tuple(_base(name) == "top_k" for name in given),
        ROWS=_ROWS,
        num_warps=4,
        **OPTIONS,
    )
    return {**named, **checked}, marks if bad is None else marks | bad


def spoil(outputs: Mapping[str, float], result: tuple[Array, ...], bad: Array) -> None:
    """Give the rows of bad parameters the values of dead rows and their status."""
    if bad.shape[0] == 0:
        return
    arrays = tuple(a.view(torch.uint8) if a.dtype == torch.bool else a for a in result)
    _spoil[(bad.shape[0],)](
        arrays,
        tuple(a.shape[1] if a.ndim == 2 else 1 for a in arrays),
        bad.view(torch.uint8),
        DEAD=tuple(None if name == "status" else float(value) for name, value in outputs.items()),
        COLUMNS=256,
        num_warps=1,
        **OPTIONS,
    )


def _base(name: str) -> str:
    return name if name == "draft_index" else name.removeprefix("draft_")


def _largest(name: str, drafted: int) -> int:
    limits = {"offset": 2**63 - 1 - drafted, "num_draft_tokens": drafted, "draft_index": (1 << 24) - 1}
    return limits.get(name, 2**63 - 1)


def _working(name: str, a: Array) -> Array:
    if _base(name) in _FLOATS:
        return a.to(torch.float32)
    if a.is_floating_point():
        # What is no integer becomes a bad one.
        a = a.to(torch.float32)  # not every type holds the limits
        a = torch.where(a % 1 == 0, a, -2).clamp(-2, MAX_VOCAB)
    return a.to(torch.int64)


@triton.jit(do_not_specialize=["largest", "batch"])
def _check(given, checked, largest, marks, batch, KINDS: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < batch
    bad = row < 0
    for i in tl.static_range(len(given)):
        value = tl.load(given[i] + row, mask=inside, other=0)
        if given[i].dtype.element_ty == tl.float32:
            good = (value >= 0.0) & (value <= KINDS[i][1]) & ((value != 0.0) | KINDS[i][0])
            value = tl.where(good, value, KINDS[i][2])
        else:
            good = (value >= KINDS[i]) & (value <= largest[i])
            value = tl.where(good, value, 0)
            if TOP_K[i]:
                value = tl.where((value <= 0) | (value > _MAX_VOCAB), _MAX_VOCAB, value)
        bad = bad | (good == 0)
        tl.store(checked[i] + row, value, mask=inside)
    tl.store(marks + row, bad.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["widths"])
def _spoil(arrays, widths, bad, DEAD: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(bad + row) != 0:
        for i in tl.static_range(len(arrays)):
            if DEAD[i] is None:
                tl.store(arrays[i] + row, tl.load(arrays[i] + row) | _BAD_PARAMETER)
            else:
                for first in range(0, widths[i], COLUMNS):
                    column = first + tl.arange(0, COLUMNS)
                    value = tl.full([COLUMNS], DEAD[i], tl.float32).to(arrays[i].dtype.element_ty)
                    tl.store(arrays[i] + row * widths[i] + column, value, mask=column < widths[i])
