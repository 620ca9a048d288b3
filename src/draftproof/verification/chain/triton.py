"""Chain verification on GPUs, by Triton kernels. The bits are those of eager on NumPy.

Nothing waits for the device, and the launches are the same for any data. While all rows together are small
(``TOGETHER``), every row up to the draft's end is looked at in one go. Beyond that it goes position by position, and
programs of sequences that are decided return at once: only the rows that the rule needs are read.

==================  =========================================  ==============================  =======================
rule                launches together                          position by position            reads
==================  =========================================  ==============================  =======================
greedy              scan, judge, conclude                      K + 1 times scan, judge         1
match               the same                                   the same                        1, and a few blocks
match, from probs   scan, masses, judge, conclude              K + 1 times scan, masses,       2, and a chunk
                                                               judge
token               scan, masses, judge, residuals, conclude   the same                        2, and one pair of rows
block               the same                                   settle; the bonus row apart     3; the bonus row 2
==================  =========================================  ==============================  =======================

Point masses need no residuals. Filters other than penalty and mask add the launches by which ``sampling`` finds ends,
and look at all rows together. Scratch is 16 bytes for every chunk of a row; with filters and in races also the maxima
of blocks and what holds their least exponentials, 2 int32 for every 64 ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ...numerics.triton_math import OPTIONS
from ...sampling.kernels.launch import SMALLEST_TILE, Shares, per_row, side_by_side
from ...sampling.kernels.rows import BLOCK, Scanned
from ...sampling.kernels.rows import Rows as FlatRows
from ...sampling.triton import Prepared, ends_of
from ...types import Array, Filters, VerifyResult
from .kernels.chains import Chains
from .kernels.conclude import Results, conclude
from .kernels.examine import row_masses, row_scan
from .kernels.history import mark_history
from .kernels.judge import judge
from .kernels.residual import residual_sums, settle
from .kernels.rows import Rows, Scratch

CHUNK = 2048
"""Ids of a row that one program works on."""
TOGETHER = 32 << 20
"""Bytes of rows up to which reading all of them costs less than launches for each position."""
GROUP = 1024
"""Blocks of 64 ids whose maxima one program looks at together."""
STEP = 16
"""Blocks that it looks into together."""


class Side(NamedTuple):
    """Rows of one side as they are given: ``[B, N, V]``, filters, history, mask."""

    entries: Array
    filters: Any = None
    seen: Array | None = None  # int32 [B, K+1, words]
    mask: Array | None = None

    @property
    def narrows(self) -> bool:
        """Whether a filter leaves out tokens."""
        return self.filters is not None and any(f is not None for f in self.filters[1:4])


def verify(
    target_logits: Array,
    draft_logits: Array | None,
    draft_tokens: Array,
    rule: str,
    filters: Filters,
    draft_filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    draft_mask: Array | None,
    num_draft_tokens: Array,
    eos: Array | None,
    seed: Array,
    offset: Array,
) -> VerifyResult:
    """See ``draftproof.verify``."""
    chains = _chains(target_logits, draft_logits, draft_tokens, num_draft_tokens, eos, seed, offset)
    if not _reads_draft(rule, draft_tokens):
        draft_logits = None
    if draft_mask is None and mask is not None and draft_logits is not None:
        draft_mask = _widened(mask[:, :-1], target_logits.shape[-1], draft_logits.shape[-1])
    target = Side(target_logits, filters, _seen(target_logits, filters, chains, prev_tokens), mask)
    draft = None
    if draft_logits is not None:
        seen = _seen(draft_logits, draft_filters, chains, prev_tokens)
        draft = Side(draft_logits, draft_filters, seen, draft_mask)
    return _Round(rule, target, draft, chains, logits=True).run()


def verify_probs(
    target_probs: Array,
    draft_probs: Array | None,
    draft_tokens: Array,
    rule: str,
    uniform_accept: Array | None,
    uniform_sample: Array | None,
    seed: Array | None,
    offset: Array,
    num_draft_tokens: Array,
    eos: Array | None,
) -> VerifyResult:
    """See ``draftproof.verify_probs``."""
    draws = (seed, offset, uniform_accept, uniform_sample)
    chains = _chains(target_probs, draft_probs, draft_tokens, num_draft_tokens, eos, *draws)
    draft = Side(draft_probs) if draft_probs is not None and _reads_draft(rule, draft_tokens) else None
    return _Round(rule, Side(target_probs), draft, chains, logits=False).run()


def verify_greedy(target: Array, draft_tokens: Array, num_draft_tokens: Array, eos: Array | None) -> VerifyResult:
    """See ``draftproof.verify_greedy``."""
    chains = _chains(target, None, draft_tokens, num_draft_tokens, eos)
    return _Round("greedy", Side(target), None, chains, logits=True).run()


def _reads_draft(rule: str, draft_tokens: Array) -> bool:
    return rule in ("token", "block") and draft_tokens.shape[1] > 0


def _chains(
    target: Array, draft: Array | None, tokens: Array, lengths: Array, eos: Array | None, *draws: Array | None
) -> Chains:
    vocab = max(target.shape[-1], 0 if draft is None else draft.shape[-1])
    lined_up = (None if a is None else a.contiguous() for a in (tokens, lengths, eos, *draws))
    return Chains(tokens.shape[1], 0 if eos is None else eos.shape[1], vocab, *lined_up)


def _widened(mask: Array, vocab: int, draft_vocab: int) -> Array:
    """Return the target's mask for draft rows: ids that only the draft has are allowed."""
    if draft_vocab <= vocab:
        return mask
    packed = mask.dtype == torch.int32
    width = -(-draft_vocab // 32) if packed else draft_vocab
    mask = torch.cat([mask, mask.new_full((*mask.shape[:2], width - mask.shape[2]), -1 if packed else True)], 2)
    if packed and vocab % 32 > 0:
        mask[..., vocab // 32] |= -1 << vocab % 32
    return mask


def _seen(logits: Array, filters: Filters, chains: Chains, prev_tokens: Array | None) -> Array | None:
    """Return which ids the penalty applies to at each position, int32 [B, N, words]; None without a penalty."""
    if filters.repetition_penalty is None:
        return None
    batch, count, vocab = logits.shape
    seen = torch.zeros((batch, count, triton.cdiv(vocab, 32)), dtype=torch.int32, device=logits.device)
    history = None if prev_tokens is None or prev_tokens.numel() == 0 else prev_tokens.contiguous()
    length = 0 if history is None else history.shape[1]
    if batch > 0:
        sizes = {"POSITIONS": triton.next_power_of_2(chains.drafted + 1), "WIDTH": 256}
        mark_history[(batch, count)](seen, seen.shape[2], vocab, history, length, chains, **sizes, **OPTIONS)
    return seen


class _Round:
    """The launches of one round, over scratch of its own: written before it is read, so never cleared."""

    def __init__(self, rule: str, target: Side, draft: Side | None, chains: Chains, *, logits: bool) -> None:
        self.rule, self.chains, self.logits = rule, chains, logits
        self.batch, self.drafted = chains.tokens.shape
        self.races = logits and rule == "match"
        self.weighs = rule != "greedy" and not self.races
        self.filtered = rule != "greedy" and (target.narrows or (draft is not None and draft.narrows))
        self.filters = [None if side is None else side.filters for side in (target, draft)]
        self.target, self.draft = self._rows(target), None if draft is None else self._rows(draft)
        self.sides = (self.target,) if self.draft is None else (self.target, self.draft)
        self.chunks = max(side.chunks for side in self.sides)
        self.constants = {
            "RULE": rule,
            "LOGITS": logits,
            "CHUNK": CHUNK,
            "CHUNKS": triton.next_power_of_2(self.chunks),
            "POSITIONS": triton.next_power_of_2(self.drafted + 1),
            "GROUP": min(GROUP, triton.next_power_of_2(triton.cdiv(self.target.vocab, BLOCK.value))),
            "STEP": STEP,
        }
        self.scratch = self._scratch()

    def run(self) -> VerifyResult:
        """Launch everything."""
        results = self._results()
        if self.batch > 0:
            self._examine()
            bytewise = results._replace(eos_hit=results.eos_hit.view(torch.uint8))
            self._launch(conclude, (self.batch,), *self._given(), bytewise)
        return VerifyResult(*results)

    def _examine(self) -> None:
        size = sum(side.entries.numel() * side.entries.element_size() for side in self.sides)
        if size <= TOGETHER or self.filtered:
            self._look(self.drafted + 1)
            self._sum_residuals()
        elif self.rule == "block":
            # The row of the bonus is looked at last, by the sequences that come to it.
            self._look(max(1, self.drafted), extra=0)
            self._sum_residuals()
            self._launch(settle, (self.batch,), *self._given())
            self._look(1, gated=True)
        else:
            for i in range(self.drafted + 1):
                self._look(1, gated=i > 0)
            self._sum_residuals()

    def _look(self, positions: int, extra: int = 1, gated: bool = False) -> None:
        """Examine the first positions of each draft, or where ``gated`` the one each sequence has come to."""
        grid = (self.batch * self.chunks, len(self.sides) * positions)
        sizes = (positions, extra, self.chunks)
        self._launch(row_scan, grid, *self._given(), *sizes, GATED=gated)
        if self.filtered:
            self.target = _with_ends(self.target, self.filters[0])
            self.draft = None if self.draft is None else _with_ends(self.draft, self.filters[1])
        if self.weighs:
            self._launch(row_masses, grid, *self._given(), *sizes, GATED=gated)
        warps = 8 if self.races else 4
        self._launch(judge, (self.batch, positions), *self._given(), extra, GATED=gated, num_warps=warps)

    def _sum_residuals(self) -> None:
        if self.draft is not None:
            rows = self.drafted if self.rule == "block" else 1
            self._launch(residual_sums, (self.batch * self.target.chunks, rows), *self._given(), self.target.chunks)

    def _given(self) -> tuple[Any, ...]:
        return self.target, self.draft, self.chains, self.scratch

    def _launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        constants = {name: value for name, value in self.constants.items() if name in kernel.arg_names}
        kernel[grid](*given, **constants, **options, **OPTIONS)

    def _room(self, wanted: bool, dtype: torch.dtype, *shape: int) -> Array | None:
        return torch.empty((self.batch, *shape), dtype=dtype, device=self.chains.tokens.device) if wanted else None

    def _rows(self, side: Side) -> Rows:
        """Return the rows of a side with room for what launches leave of them."""
        entries = side_by_side(side.entries)
        _, count, vocab = entries.shape
        chunks = triton.cdiv(vocab, CHUNK)
        mask = side.mask
        if mask is not None:
            mask = side_by_side(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)
        return Rows(
            entries=entries,
            batch=entries.stride(0),
            position=entries.stride(1),
            count=count,
            vocab=vocab,
            chunks=chunks,
            temperature=None if side.filters is None else per_row(side.filters.temperature),
            penalty=None if side.seen is None else per_row(side.filters.repetition_penalty),
            seen=side.seen,
            words=0 if side.seen is None else side.seen.shape[2],
            mask=mask,
            mask_batch=0 if mask is None else mask.stride(0),
            mask_position=0 if mask is None else mask.stride(1),
            best=self._room(True, torch.int64, count, chunks),
            maxima=self._room(self.filtered or self.races, torch.int32, count, triton.cdiv(vocab, BLOCK.value)),
            ends=None,
            masses=self._room(self.weighs, torch.int64, count, chunks),
            token_mass=self._room(self.weighs, torch.int64, count),
        )

    def _scratch(self) -> Scratch:
        positions = self.drafted + 1
        residuals = self.drafted if self.rule == "block" else 1
        ratio = self.rule in ("token", "block")
        return Scratch(
            draft_ends=self._room(True, torch.int32, 3),
            holders=self._room(self.races, torch.float32, positions, triton.cdiv(self.target.vocab, BLOCK.value)),
            residuals=self._room(self.draft is not None, torch.int64, residuals, self.target.chunks),
            verdicts=self._room(True, torch.int32, positions),
            chances=self._room(ratio, torch.float32, positions, 4),
            choices=self._room(not ratio, torch.int64, positions),
            state=self._room(True, torch.int32),
        )

    def _results(self) -> Results:
        return Results(
            num_accepted=self._room(True, torch.int64),
            next_token=self._room(True, torch.int64),
            tokens=self._room(True, torch.int64, self.drafted + 1),
            num_emitted=self._room(True, torch.int64),
            eos_hit=self._room(True, torch.bool),
            status=self._room(True, torch.int32),
        )


def _with_ends(rows: Rows, filters: Any) -> Rows:
    """Return the rows with the ends that filters give them, found as sampling finds them: over [B * N, V]."""

    def flat(values: Array) -> Array:
        return None if values is None else values.reshape(-1, values.shape[2])

    entries, mask = flat(rows.entries), flat(rows.mask)
    given = FlatRows(
        entries,
        entries.stride(0),
        rows.vocab,
        flat(rows.seen),
        rows.penalty,
        mask,
        0 if mask is None else mask.stride(0),
        rows.count,
    )
    # The rows have their penalty already.
    filters = Filters(*map(per_row, filters._replace(repetition_penalty=None)))
    scanned = Scanned(flat(rows.maxima), None, flat(rows.best), rows.chunks)
    share = Shares(rows.chunks, CHUNK // BLOCK.value, min(SMALLEST_TILE, CHUNK // BLOCK.value))
    return rows._replace(ends=ends_of(Prepared(given, filters, None, scanned, share), search=True))
