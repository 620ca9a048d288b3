"""What every launch over rows needs: the rows as kernels take them, and how a row is shared between programs.

Nothing here waits for the device, and nothing depends on the values of a tensor.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from ...numerics.triton_math import OPTIONS
from ...types import Array, Filters
from .rows import Rows, mark_seen

BLOCK = 64
LARGEST_TILE = 32
"""Blocks that a program looks at in one step; fewer where the row would not fill the device."""
SMALLEST_TILE = 8
PROGRAMS_PER_PROCESSOR = 4


class Shares(NamedTuple):
    """How the blocks of a row are shared: ``programs`` programs with ``share`` blocks each, ``tile`` in one step."""

    programs: int
    share: int
    tile: int


def rows_of(logits: Array, filters: Filters, prev_tokens: Array | None, mask: Array | None) -> Rows:
    """Return the rows of ``logits`` [B, V] under penalty and mask."""
    batch, vocab = logits.shape
    seen = penalty = None
    if filters.repetition_penalty is not None and prev_tokens is not None and prev_tokens.numel():
        penalty = per_row(filters.repetition_penalty)
        words = -(-vocab // 32)
        seen = torch.zeros((batch, words), dtype=torch.int32, device=logits.device)
        history = side_by_side(prev_tokens)
        mark_seen[(batch,)](
            seen, words, history, history.stride(0), history.shape[1], vocab, WIDTH=256, num_warps=4, **OPTIONS
        )
    if mask is not None:
        mask = side_by_side(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)
    logits = side_by_side(logits)
    return Rows(logits, logits.stride(0), vocab, seen, penalty, mask, 0 if mask is None else mask.stride(0))


def side_by_side(rows: Array) -> Array:
    """Return rows as kernels read them: elements side by side, no float64. Most rows are so already."""
    if rows.dtype == torch.float64:
        rows = rows.float()
    return rows if rows.shape[-1] < 2 or rows.stride(-1) == 1 else rows.contiguous()


def per_row(values: Array | None) -> Array | None:
    """Return ``[B]`` values, one after the other."""
    return None if values is None else values.contiguous()


def shares(device: torch.device, batch: int, blocks: int) -> Shares:
    """Return how to share rows between programs so that a small batch fills the device too."""
    wanted = max(1, PROGRAMS_PER_PROCESSOR * processors(device) // batch)
    tile = LARGEST_TILE
    while tile > SMALLEST_TILE and -(-blocks // tile) < wanted:
        tile //= 2
    tiles = -(-blocks // tile)
    share = -(-tiles // min(tiles, wanted)) * tile
    return Shares(-(-blocks // share), share, tile)


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least n."""
    return int(triton.next_power_of_2(n))


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 where kernels are interpreted."""
    if device.type == "cpu":
        return 1
    properties = getattr(torch, device.type).get_device_properties(device)
    return int(properties.multi_processor_count if device.type == "cuda" else properties.gpu_subslice_count)
