"""Sampling on GPUs, by Triton kernels. The bits are those of eager on NumPy.

======================  ========================================  ========================================
operation               launches                                  reads of the row
======================  ========================================  ========================================
sample, unfiltered      scan, race                                1, and the blocks that can win
======================  ========================================  ========================================
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..numerics.triton_math import OPTIONS
from ..types import Array, Filters
from .kernels.launch import Rows, Shares, open_rows, per_row, power_of_two, shares
from .kernels.narrow import narrow
from .kernels.race import race
from .kernels.scan import scan
from .kernels.write import write

CHUNK = 1024
"""Blocks whose maxima are looked at together."""
STEP = 16
"""Blocks that are looked into together."""


class Stream(NamedTuple):
    """The race of each row: seed, offset, draft index."""

    seed: Array | None = None
    offset: Array | None = None
    draft_index: Array | None = None


class Scanned(NamedTuple):
    """What the scan leaves of the rows."""

    rows: Rows
    filters: Filters
    shares: Shares
    maxima: Array
    holders: Array | None
    partial: Array


def sample(
    logits: Array,
    filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    seed: Array,
    offset: Array,
    draft_index: Array | None,
) -> tuple[Array, Array]:
    """See ``draftproof.sample``."""
    tokens = _empty(logits, torch.int64)
    status = _empty(logits, torch.int32)
    if len(tokens):
        stream = Stream(*(per_row(s) for s in (seed, offset, draft_index)))
        scanned = _scan(logits, filters, prev_tokens, mask, stream)
        narrowed = filters.top_k is not None or filters.top_p is not None
        _race(scanned, _narrow(scanned) if narrowed else None, stream, tokens, status)
    return tokens, status


def filter_logits(
    logits: Array, filters: Filters, prev_tokens: Array | None, mask: Array | None
) -> tuple[Array, Array]:
    """See ``draftproof.filter_logits``."""
    filtered = _empty(logits, torch.float32, logits.shape[1])
    status = _empty(logits, torch.int32)
    if len(status):
        scanned = _scan(logits, filters, prev_tokens, mask, None)
        width = 2048
        write[(len(status), -(-scanned.rows.vocab // width))](
            *scanned.rows,
            scanned.filters.temperature,
            _narrow(scanned),
            scanned.partial,
            scanned.shares.programs,
            filtered,
            status,
            PROGRAMS=power_of_two(scanned.shares.programs),
            WIDTH=width,
            num_warps=4,
            **OPTIONS,
        )
    return filtered, status


def _empty(logits: Array, dtype: torch.dtype, *columns: int) -> Array:
    return torch.empty((logits.shape[0], *columns), dtype=dtype, device=logits.device)


def _scan(
    logits: Array, filters: Filters, prev_tokens: Array | None, mask: Array | None, stream: Stream | None
) -> Scanned:
    """Scan the rows, for a race if there is a stream."""
    filters = Filters(*(per_row(f) for f in filters))
    rows = open_rows(logits, filters, prev_tokens, mask)
    share = shares(logits.device, len(logits), rows.blocks)
    maxima = _empty(logits, torch.int32, rows.blocks)
    holders = None if stream is None else _empty(logits, torch.float32, rows.blocks)
    partial = _empty(logits, torch.int64, share.programs)
    scan[(len(logits), share.programs)](
        *rows,
        filters.temperature,
        *(stream or Stream()),
        maxima,
        holders,
        partial,
        share.share,
        TILE=share.tile,
        WIDE=128,
        num_warps=4,
        **OPTIONS,
    )
    return Scanned(rows, filters, share, maxima, holders, partial)


def _narrow(scanned: Scanned) -> Array:
    """Return the end of each row."""
    ends = _empty(scanned.partial, torch.int64)
    rows, filters = scanned.rows, scanned.filters
    narrow[(len(ends),)](
        *rows,
        *filters[:4],
        scanned.maxima,
        scanned.partial,
        scanned.shares.programs,
        ends,
        PROGRAMS=power_of_two(scanned.shares.programs),
        CHUNK=min(CHUNK, power_of_two(rows.blocks)),
        STEP=STEP,
        num_warps=8,
        **OPTIONS,
    )
    return ends


def _race(scanned: Scanned, ends: Array | None, stream: Stream, tokens: Array, status: Array) -> None:
    rows, filters = scanned.rows, scanned.filters
    race[(len(tokens),)](
        *rows,
        filters.temperature,
        filters.min_p,
        ends,
        *stream,
        scanned.maxima,
        scanned.holders,
        scanned.partial,
        scanned.shares.programs,
        tokens,
        status,
        PROGRAMS=power_of_two(scanned.shares.programs),
        CHUNK=min(CHUNK, power_of_two(rows.blocks)),
        STEP=STEP,
        num_warps=8,
        **OPTIONS,
    )
