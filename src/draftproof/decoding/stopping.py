"""Where a draft and a sequence end."""

from __future__ import annotations

from collections.abc import Set
from numbers import Integral
from typing import Any

from .. import _numpy as np
from ..errors import DtypeError, ValueRangeError


def count(name: str, value: Any) -> int:
    """Return a number of tokens as an int, at least 0."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DtypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueRangeError(f"{name} must be at least 0, got {value}")
    return int(value)


def eos_ids(eos: Any) -> frozenset[int]:
    """Return the ids that end a sequence: from None, an int, or a list or array of ints padded with -1."""
    ids = np.asarray([] if eos is None else eos.tolist() if hasattr(eos, "tolist") else eos).ravel()
    if ids.size and ids.dtype.kind not in "iu":
        raise DtypeError(f"eos must hold integer token ids, got {eos!r}")
    if (ids < -1).any():
        raise ValueRangeError(f"eos must hold ids of at least 0 (-1 is padding), got {int(ids.min())}")
    return frozenset(ids[ids >= 0].astype(np.int64).tolist())


def usable(draft: list[int], eos: Set[int]) -> int:
    """Return how many drafts are worth a target row: up to the first eos, and none from the first negative id on."""
    for i, token in enumerate(draft):
        if token < 0:
            return i
        if token in eos:
            return i + 1
    return len(draft)
