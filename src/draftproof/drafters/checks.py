"""What drafters, and whatever runs them, are given: the errors about counts, token ids, functions and drafters."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from .. import _numpy as np
from .._arrays import is_torch
from ..errors import DtypeError, ShapeError, ValueRangeError
from ..types import Array


def kind_of(value: Any) -> str:
    """Return what came, in words: a class is often an object that lacks its parentheses."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_count(name: str, value: Any, least: int = 0) -> int:
    """Return a number of things as an int; it must be at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DtypeError(f"{name} must be an int, got {kind_of(value)}: give a whole number")
    if value < least:
        raise ValueRangeError(f"{name} must be at least {least}, got {value}: give {least} or more")
    return int(value)


def check_ids(name: str, value: Any, least: int | None = 0) -> Array:
    """Return one sequence of token ids, a list or any array, as int64 NumPy ``[length]``."""
    if isinstance(value, str) or hasattr(value, "input_ids"):
        remedy = "tokenize it first" if isinstance(value, str) else "pass its input_ids, one row"
        raise DtypeError(f"{name} must be one sequence of token ids, got {kind_of(value)}: {remedy}")
    try:
        ids = np.asarray(value.tolist() if is_torch(value) else value)
    except (TypeError, ValueError):  # rows of unequal length
        ids = np.array(None)
    if ids.ndim != 1:
        got = list(ids.shape) or kind_of(value)
        remedy = "pass one row of a batch, or a list of ints"
        raise ShapeError(f"{name} must be one sequence [length] of token ids, got {got}: {remedy}")
    if ids.size and ids.dtype.kind not in "iu":
        raise DtypeError(f"{name} must be integer token ids below 2**63, got {ids.dtype}: give ints")
    if ids.size and ids.max() >= 2**63:
        raise ValueRangeError(f"{name} must be below 2**63, got {ids.max()}: give ids of the vocabulary")
    if ids.size and least is not None and ids.min() < least:
        remedy = "remove padding" if least == 0 else f"pad with {least}"
        raise ValueRangeError(f"{name} must be at least {least}, got {ids.min()}: {remedy}")
    return ids.astype(np.int64)


def check_step(name: str, value: Any, expected: str, of_model: str) -> None:
    """Refuse what is no function of the caller's; ``of_model`` makes one of a model that takes other arguments."""
    if isinstance(value, type):
        remedy = "make an object of it"
    elif hasattr(value, "get_input_embeddings"):
        remedy = f"pass {of_model}, from draftproof.integrations.transformers"
    elif callable(value):
        return
    else:
        remedy = f"pass {of_model} for a model, or a function of your own"
    raise DtypeError(f"{name} must be {expected}, got {kind_of(value)}: {remedy}")


def is_drafter(value: Any) -> bool:
    """Whether this is meant to be a drafter."""
    return not isinstance(value, type) and callable(getattr(value, "start", None))


def check_drafter(name: str, value: Any) -> None:
    """Refuse what lacks something that every drafter has."""
    has_q, noise = getattr(value, "has_q", None), getattr(value, "noise", "missing")
    if is_drafter(value) and isinstance(has_q, bool) and noise in (None, "private", "shared"):
        return
    got = f"{kind_of(value)} with has_q {has_q!r}, noise {noise!r}" if is_drafter(value) else kind_of(value)
    raise DtypeError(
        f"{name} must have start(), has_q (True or False) and noise (None, 'private' or 'shared'), got {got}: "
        "pass a drafter of draftproof.drafters, or derive yours from its Drafter"
    )


def check_methods(name: str, value: Any, *methods: str) -> None:
    """Refuse what is no object with these methods; ``name`` is an argument, or the function that returned it."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing or isinstance(value, type):
        remedy = f"give one that has {'(), '.join(missing)}()" if missing else "make an object of it"
        raise DtypeError(f"{name} must be an object with {'(), '.join(methods)}(), got {kind_of(value)}: {remedy}")
