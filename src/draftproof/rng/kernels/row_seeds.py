"""The seeds of a batch that was given one scalar seed, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...numerics.triton_math import OPTIONS
from ...types import Array
from ..streams import Purpose
from ..triton_philox import philox

_PURPOSE = tl.constexpr(int(Purpose.ROW_SEED) << 24)
_ROWS = 256


def row_seeds(seed: Array, batch: int) -> Array:
    """Return int64 ``[batch]`` of the 0-D ``seed``: row 0 keeps it, every other row gets its own."""
    seeds = torch.empty((batch,), dtype=torch.int64, device=seed.device)
    if batch:
        _row_seeds[(triton.cdiv(batch, _ROWS),)](seed, seeds, batch, ROWS=_ROWS, num_warps=4, **OPTIONS)
    return seeds


@triton.jit(do_not_specialize=["batch"])
def _row_seeds(seed_ptr, seeds_ptr, batch, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seed = tl.load(seed_ptr)
    low, high, _, _ = philox(seed, row, tl.full([], 0, tl.int64), tl.full([], _PURPOSE, tl.int32))
    derived = (high.to(tl.int64) << 32) | low.to(tl.int64)
    tl.store(seeds_ptr + row, tl.where(row == 0, seed, derived), mask=row < batch)
