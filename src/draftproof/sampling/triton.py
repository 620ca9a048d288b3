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
from .kernels.race import race
from .kernels.scan import scan


class Stream(NamedTuple):
    """The race of each row: seed, offset, draft index."""

    seed: Array
    offset: Array
    draft_index: Array | None


class Scanned(NamedTuple):
    """What the scan leaves of the rows."""

    rows: Rows
    shares: Shares
    maxima: Array
    holders: Array
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
    tokens = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    status = torch.empty(logits.shape[:1], dtype=torch.int32, device=logits.device)
    if len(tokens):
        filters = Filters(*(per_row(f) for f in filters))
        stream = Stream(*(per_row(s) for s in (seed, offset, draft_index)))
        scanned = _scan(open_rows(logits, filters, prev_tokens, mask), filters, stream)
        _race(scanned, filters, None, stream, tokens, status)
    return tokens, status


def _scan(rows: Rows, filters: Filters, stream: Stream) -> Scanned:
    batch, device = len(rows.logits), rows.logits.device
    share = shares(device, batch, rows.blocks)
    maxima = torch.empty((batch, rows.blocks), dtype=torch.int32, device=device)
    holders = torch.empty((batch, rows.blocks), dtype=torch.float32, device=device)
    partial = torch.empty((batch, share.programs), dtype=torch.int64, device=device)
    scan[(batch, share.programs)](
        *rows,
        filters.temperature,
        *stream,
        maxima,
        holders,
        partial,
        share.share,
        TILE=share.tile,
        WIDE=128,
        num_warps=4,
        **OPTIONS,
    )
    return Scanned(rows, share, maxima, holders, partial)


def _race(scanned: Scanned, filters: Filters, ends: Array | None, stream: Stream, tokens: Array, status: Array) -> None:
    race[(len(tokens),)](
        *scanned.rows,
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
        CHUNK=min(1024, power_of_two(scanned.rows.blocks)),
        STEP=16,
        num_warps=8,
        **OPTIONS,
    )
