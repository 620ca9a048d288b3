"""Which part of a key/value cache a sequence can go on from."""

from __future__ import annotations

from .callbacks import Ids


def reusable(cached: Ids, ids: Ids, rows: int) -> int:
    """Return how many cached positions hold the beginning of ``ids``, leaving at least its last ``rows`` to compute.

    The rest of the cache is to be dropped and the rest of ``ids`` to be fed. After a verified draft this drops just the
    rejected tokens and feeds just the new ones; after an exception, or for another sequence, whatever differs.
    """
    length = min(len(cached), len(ids) - rows)
    differs = cached[:length] != ids[:length]
    return int(differs.argmax()) if differs.any() else length
