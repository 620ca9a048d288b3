"""Sampling on GPUs, by Triton kernels. The bits are those of eager on NumPy.

Nothing waits for the device, and the launches are the same for any data. A row of a batch with filters it does not use
passes through their launches without reading.

=======================  ===========================================  ==============================================
operation                launches                                     reads of the row
=======================  ===========================================  ==============================================
sample                   scan, race                                   1, and the blocks that can win
with top-k               scan, gather, narrow, race                   the same, and about k blocks
with top-p alone         scan, race, weigh, redraw                    2, and the blocks that redraws need
with both                scan, gather, narrow, race, weigh, redraw    of each row as with top-k, or with top-p alone
sample_with_logprobs     scan, [end], race, weigh, weigh, conclude    3, and those of the end; 4 with penalty or mask
sample_probs             scan, weigh, draw                            2, and one chunk
filter_logits            scan, [end], write                           2 and a write, and those of the end
end: with top-k          gather, narrow                               about k blocks
end: with top-p alone    4 rounds, gather, narrow                     the first whole, then what may reach the end
end: otherwise           narrow                                       0
=======================  ===========================================  ==============================================

A penalty adds the launch that marks the history, and the raw log-probability under a penalty or mask a scan. Scratch:
2 int32 for every 64 ids, as much again for the history, 8 KiB a row for a list, a few int64 for each program. A list
that overflows (ties, k near 1000) makes ``narrow`` search the row by bisection, one program a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..numerics.triton_math import OPTIONS
from ..types import Array, Filters, SampleResult
from .kernels.bracket import Round, narrow_bracket
from .kernels.launch import SMALLEST_TILE, Shares, per_row, power_of_two, rows_of, shares, side_by_side
from .kernels.narrow import Listed, gather, narrow
from .kernels.probabilities import draw_probs, scan_probs, weigh_probs
from .kernels.race import race, redraw
from .kernels.rows import Rows, Scanned, Stream
from .kernels.scan import scan
from .kernels.weigh import weigh
from .kernels.write import conclude, write

CHUNK = 1024
"""Blocks whose maxima are looked at together."""
STEP = 16
"""Blocks that are looked into together."""
LISTED = 1024
"""Tokens that top-k may leave before the row is searched."""
PIVOTS = 8
"""Keys whose masses a round of top-p weighs."""
ROUNDS = 4
"""Enough to leave a part in 4,096 of the range that has the mass."""
WIDTH = 2048
"""Ids that are written together."""


class Prepared(NamedTuple):
    """Scanned rows, and what every later launch over them needs."""

    rows: Rows
    filters: Filters
    stream: Stream | None
    scanned: Scanned
    shares: Shares

    def run(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel with one program a row."""
        kernel[(self.batch,)](
            *arguments, PROGRAMS=power_of_two(self.shares.programs), **constants, num_warps=8, **OPTIONS
        )

    @property
    def batch(self) -> int:
        return int(self.scanned.best.shape[0])

    @property
    def steps(self) -> dict[str, int]:
        """Return how kernels walk over the blocks of a row."""
        return {"CHUNK": min(CHUNK, power_of_two(self.scanned.maxima.shape[1])), "STEP": STEP}


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
        on = _prepare(rows_of(logits, filters, prev_tokens, mask), filters, (seed, offset, draft_index))
        ends = None if filters.top_k is None else ends_of(on, search=False)
        ranks = None if filters.top_p is None else _empty(logits, torch.int64)
        _race(on, ends, tokens, status, ranks)
        if ranks is not None:
            sums = _weigh(on, ranks, check=True)
            programs = on.shares.programs
            on.run(redraw, on.rows, on.filters, on.stream, on.scanned, ranks, sums, tokens, programs, **on.steps)
    return tokens, status


def sample_with_logprobs(
    logits: Array,
    filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    seed: Array,
    offset: Array,
    draft_index: Array | None,
) -> SampleResult:
    """See ``draftproof.sample_with_logprobs``."""
    result = SampleResult(*(_empty(logits, d) for d in (torch.int64, *[torch.float32] * 2, torch.int64, torch.int32)))
    if len(result.tokens):
        on = _prepare(rows_of(logits, filters, prev_tokens, mask), filters, (seed, offset, draft_index))
        ends = ends_of(on, search=True)
        _race(on, ends, result.tokens, result.status, None)
        raw = on._replace(filters=Filters(torch.ones_like(on.filters.temperature)))
        if on.rows.seen is not None or on.rows.mask is not None:
            raw = _prepare(rows_of(logits, raw.filters, None, None), raw.filters, None)
        sums, raw_sums = _weigh(on, ends, check=False), _weigh(raw, ends, check=False)
        given = (on.rows, on.filters, on.scanned, raw.rows, raw.scanned, result.tokens, sums, raw_sums)
        on.run(conclude, *given, result.logprobs, result.raw_logprobs, result.kept)
    return result


def sample_probs(probs: Array, seed: Array, offset: Array) -> tuple[Array, Array]:
    """See ``draftproof.sample_probs``."""
    tokens = _empty(probs, torch.int64)
    status = _empty(probs, torch.int32)
    if len(tokens):
        probs = side_by_side(probs)
        batch, vocab = probs.shape
        chunks = -(-vocab // WIDTH)
        maxima, masses = _empty(probs, torch.float32, chunks), _empty(probs, torch.int64, chunks)
        rows, width = (probs, probs.stride(0), vocab, maxima), power_of_two(chunks)
        settings = {"CHUNK": WIDTH, "num_warps": 4, **OPTIONS}
        scan_probs[(batch, chunks)](*rows, chunks, **settings)
        weigh_probs[(batch, chunks)](*rows, masses, chunks, CHUNKS=width, **settings)
        stream = (per_row(seed), per_row(offset))
        draw_probs[(batch,)](*rows, masses, chunks, *stream, tokens, status, CHUNKS=width, **settings)
    return tokens, status


def filter_logits(
    logits: Array, filters: Filters, prev_tokens: Array | None, mask: Array | None
) -> tuple[Array, Array]:
    """See ``draftproof.filter_logits``."""
    filtered = _empty(logits, torch.float32, logits.shape[1])
    status = _empty(logits, torch.int32)
    if len(status):
        on = _prepare(rows_of(logits, filters, prev_tokens, mask), filters, None)
        ends = ends_of(on, search=True)
        write[(on.batch, -(-on.rows.vocab // WIDTH))](
            on.rows,
            on.filters,
            on.scanned,
            ends,
            filtered,
            status,
            PROGRAMS=power_of_two(on.shares.programs),
            WIDTH=WIDTH,
            num_warps=4,
            **OPTIONS,
        )
    return filtered, status


def _empty(like: Array, dtype: torch.dtype, *columns: int) -> Array:
    return torch.empty((like.shape[0], *columns), dtype=dtype, device=like.device)


def _prepare(rows: Rows, filters: Filters, stream: tuple[Array | None, ...] | None) -> Prepared:
    """Scan the rows, for a race if there is a stream."""
    logits, blocks = rows.logits, -(-rows.vocab // 64)
    share = shares(logits.device, len(logits), blocks)
    holders = None if stream is None else _empty(logits, torch.float32, blocks)
    best = _empty(logits, torch.int64, share.programs)
    on = Prepared(
        rows,
        Filters(*(per_row(f) for f in filters)),
        None if stream is None else Stream(*(per_row(s) for s in stream)),
        Scanned(_empty(logits, torch.int32, blocks), holders, best, share.programs),
        share,
    )
    scan[(len(logits), share.programs)](
        on.rows, on.filters, on.stream, on.scanned, share.share, TILE=share.tile, WIDE=128, num_warps=4, **OPTIONS
    )
    return on


def ends_of(on: Prepared, search: bool) -> Array:
    """Return the end of each row; without ``search`` that of rows with top-p and no top-k leaves out top-p."""
    ends = _empty(on.scanned.best, torch.int64)
    rounds = _bracket(on) if search and on.filters.top_p is not None else None
    listed = None
    sizes = {"PIVOTS": PIVOTS, "SIZE": LISTED, **on.steps}
    if rounds is not None or on.filters.top_k is not None:
        listed = Listed(_empty(ends, torch.int64, LISTED), _empty(ends, torch.int32))
        on.run(gather, on.rows, on.filters, on.scanned, rounds, listed, **sizes)
    on.run(narrow, on.rows, on.filters, on.scanned, rounds, listed, ends, **sizes)
    return ends


def _bracket(on: Prepared) -> Round:
    """Return the last of the rounds that close in on where top-p ends a row."""
    sizes = ((4,), (on.shares.programs, PIVOTS))
    rounds = [Round(*(_empty(on.scanned.best, torch.int64, *size) for size in sizes)) for _ in range(ROUNDS)]
    for number, after in enumerate(rounds):
        before = rounds[number - 1] if number else None
        _over_shares(on, narrow_bracket, before, after, on.shares.share, PIVOTS=PIVOTS, TILE=SMALLEST_TILE)
    return rounds[-1]


def _race(on: Prepared, ends: Array | None, tokens: Array, status: Array, ranks: Array | None) -> None:
    on.run(race, on.rows, on.filters, on.stream, on.scanned, ends, tokens, status, ranks, **on.steps)


def _weigh(on: Prepared, ends: Array, check: bool) -> Array:
    """Return the shares of the masses of each row, and of its tokens from the end up."""
    sums = _empty(ends, torch.int64, on.shares.programs, 3)
    _over_shares(on, weigh, ends, sums, on.shares.share, CHECK=int(check), TILE=on.shares.tile)
    return sums


def _over_shares(on: Prepared, kernel: Any, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with the programs that share a row."""
    kernel[(on.batch, on.shares.programs)](
        *(on.rows, on.filters, on.scanned, *arguments),
        PROGRAMS=power_of_two(on.shares.programs),
        **constants,
        num_warps=4,
        **OPTIONS,
    )
