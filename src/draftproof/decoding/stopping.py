"""Where a draft and a sequence end."""

from __future__ import annotations

from collections.abc import Set
from numbers import Number
from typing import Any

from ..drafters.checks import check_ids


def eos_ids(eos: Any) -> frozenset[int]:
    """Return the ids that end a sequence: from None, an int, or a list or array of ints padded with -1."""
    single = isinstance(eos, Number) or getattr(eos, "ndim", 1) == 0
    ids = check_ids("eos", [] if eos is None else [eos] if single else eos, least=-1)
    return frozenset(ids[ids >= 0].tolist())


def usable(draft: list[int], eos: Set[int]) -> int:
    """Return how many drafts are worth a target row: up to the first eos, and none from the first negative id on."""
    for i, token in enumerate(draft):
        if token < 0:
            return i
        if token in eos:
            return i + 1
    return len(draft)
