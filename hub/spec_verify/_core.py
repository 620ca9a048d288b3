"""The C++ core of this build: the verification of probability rows, and the greedy one."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ._arrays import is_torch
from ._ops import ops
from .types import Array

importlib.import_module(f".{ops.name}", __package__)


def levels() -> list[str]:
    """Return the instruction-set levels that this machine runs, best first."""
    return ops.levels().split()


def level() -> str:
    """Return the level in use."""
    return ops.level()


def set_level(name: str) -> bool:
    """Set the level; False if it is not available."""
    return ops.set_level(name)


if not levels():
    raise ImportError("this processor is below every level the core was built for")


def verify_probs(
    target: Array,
    draft: Array | None,
    draft_tokens: Array,
    rule: str,
    uniform_accept: Array | None,
    uniform_sample: Array | None,
    seed: Array | None,
    offset: Array | None,
    count: Array | None,
    eos: Array | None,
    check: bool | None,
) -> tuple[Array, ...] | None:
    """Verify checked arguments, which come with ``check=False``; others are for the checks."""
    if check is not False:
        return None
    given = (target, draft, draft_tokens, uniform_accept, uniform_sample, seed, offset, count, eos)
    return _verify(rule, True, *given)


def verify_greedy(
    target: Array, draft_tokens: Array, count: Array | None, eos: Array | None, check: bool | None
) -> tuple[Array, ...] | None:
    """As ``verify_probs``."""
    if check is not False:
        return None
    return _verify("greedy", False, target, None, draft_tokens, None, None, None, None, count, eos)


def _verify(rule: str, probabilities: bool, *given: Array | None) -> tuple[Array, ...]:
    target, draft, tokens, *others = map(_tensor, given)
    batch, drafted = tokens.shape
    results = (
        torch.empty(batch, dtype=torch.int64),
        torch.empty(batch, dtype=torch.int64),
        torch.empty(batch, drafted + 1, dtype=torch.int64),
        torch.empty(batch, dtype=torch.int64),
        torch.empty(batch, dtype=torch.bool),
        torch.empty(batch, dtype=torch.int32),
    )
    ops.verify_rows(rule, probabilities, target, draft, tokens, *others, *results)
    return results if is_torch(given[0]) else tuple(result.numpy() for result in results)


def _tensor(array: Any) -> Any:
    if array is None or is_torch(array):
        return array
    # torch takes no steps backwards, and warns of memory that is not to be written to.
    return torch.from_numpy(array if array.flags.writeable and min(array.strides) >= 0 else array.copy())
