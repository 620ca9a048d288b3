"""Chain verification in Triton kernels: the bits of eager on NumPy, rows read no more often than the rule asks.

The launches do not depend on the data. While all rows together are small, every row that a sequence may need is looked
at in one go; beyond that position by position, and programs of sequences that are decided return at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...numerics.triton_math import OPTIONS
from ...sampling.kernels.rows import BLOCK
from ...types import Array, Filters, VerifyResult
from .kernels.chains import Chains
from .kernels.conclude import Results, conclude
from .kernels.examine import row_ends, row_masses, row_scan
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
    target = _rows(target_logits, filters, mask)
    draft = None if draft_logits is None else _rows(draft_logits, draft_filters, draft_mask)
    if target.penalty is not None or (draft is not None and draft.penalty is not None):
        seen = _seen(chains, prev_tokens, max(target.vocab, 0 if draft is None else draft.vocab))
        target, draft = _with_history(target, seen), None if draft is None else _with_history(draft, seen)
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
    draft = _rows(draft_probs) if draft_probs is not None and _reads_draft(rule, draft_tokens) else None
    return _Round(rule, _rows(target_probs), draft, chains, logits=False).run()


def verify_greedy(target: Array, draft_tokens: Array, num_draft_tokens: Array, eos: Array | None) -> VerifyResult:
    """See ``draftproof.verify_greedy``."""
    chains = _chains(target, None, draft_tokens, num_draft_tokens, eos)
    return _Round("greedy", _rows(target), None, chains, logits=True).run()


def _reads_draft(rule: str, draft_tokens: Array) -> bool:
    return rule in ("token", "block") and draft_tokens.shape[1] > 0


def _chains(
    target: Array, draft: Array | None, tokens: Array, lengths: Array, eos: Array | None, *draws: Array | None
) -> Chains:
    vocab = max(target.shape[-1], 0 if draft is None else draft.shape[-1])
    lined_up = (None if a is None else a.contiguous() for a in (tokens, lengths, eos, *draws))
    return Chains(tokens.shape[1], 0 if eos is None else eos.shape[1], vocab, *lined_up)


def _rows(entries: Array, filters: Filters | None = None, mask: Array | None = None) -> Rows:
    entries = _side_by_side(entries.float() if entries.dtype == torch.float64 else entries)
    columns = {} if filters is None else filters._asdict()
    columns["penalty"] = columns.pop("repetition_penalty", None)
    given = {name: None if column is None else column.contiguous() for name, column in columns.items()}
    if mask is not None:
        mask = _side_by_side(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)
        given |= {"mask": mask, "mask_batch": mask.stride(0), "mask_position": mask.stride(1)}
    return Rows(entries, entries.stride(0), entries.stride(1), entries.shape[-1], **given)


def _side_by_side(rows: Array) -> Array:
    return rows if rows.shape[-1] < 2 or rows.stride(-1) == 1 else rows.contiguous()


def _widened(mask: Array, vocab: int, draft_vocab: int) -> Array:
    """Return the target's mask for draft rows: ids that only the draft has are allowed."""
    if mask.dtype == torch.bool:
        return torch.nn.functional.pad(mask, (0, max(0, draft_vocab - vocab)), value=True)
    mask = torch.nn.functional.pad(mask, (0, max(0, -(-draft_vocab // 32) - mask.shape[-1])), value=-1)
    if vocab % 32 > 0:
        mask[..., vocab // 32] |= -1 << vocab % 32
    return mask


def _seen(chains: Chains, prev_tokens: Array | None, vocab: int) -> Array:
    """Return which ids the penalty applies to at each position, int32 [B, K+1, words]."""
    batch, positions = chains.tokens.shape[0], chains.drafted + 1
    seen = torch.zeros((batch, positions, triton.cdiv(vocab, 32)), dtype=torch.int32, device=chains.tokens.device)
    history = None if prev_tokens is None or prev_tokens.shape[1] == 0 else prev_tokens.contiguous()
    length = 0 if history is None else history.shape[1]
    if batch > 0:
        sizes = {"POSITIONS": triton.next_power_of_2(positions), "WIDTH": 256}
        mark_history[(batch, positions)](seen, seen.shape[2], history, length, length, chains, **sizes, **OPTIONS)
    return seen


def _with_history(rows: Rows, seen: Array) -> Rows:
    if rows.penalty is None:
        return rows
    return rows._replace(seen=seen, seen_batch=seen.stride(0), seen_position=seen.stride(1))


class _Round:
    """The launches of one round, over scratch of its own."""

    def __init__(self, rule: str, target: Rows, draft: Rows | None, chains: Chains, *, logits: bool) -> None:
        self.rule, self.target, self.draft, self.chains, self.logits = rule, target, draft, chains, logits
        self.sides = (target,) if draft is None else (target, draft)
        self.batch, self.drafted = chains.tokens.shape
        self.races = logits and rule == "match"
        self.weighs = rule != "greedy" and not self.races
        filters = [f for side in self.sides for f in (side.top_k, side.top_p, side.min_p) if f is not None]
        self.filtered = rule != "greedy" and len(filters) > 0
        vocab = max(side.vocab for side in self.sides)
        self.chunks, self.blocks = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, BLOCK.value)
        self.constants = {
            "RULE": rule,
            "LOGITS": logits,
            "CHUNK": CHUNK,
            "CHUNKS": triton.next_power_of_2(self.chunks),
            "POSITIONS": triton.next_power_of_2(self.drafted + 1),
            "GROUP": min(GROUP, triton.next_power_of_2(self.blocks)),
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
        if sum(side.entries.numel() * side.entries.element_size() for side in self.sides) <= TOGETHER:
            self._look(self.drafted + 1)
            self._sum_residuals()
        elif self.rule == "block":
            # The row of the bonus is looked at last, by the sequences that come to it.
            self._look(max(1, self.drafted), extra=0)
            self._sum_residuals()
            self._launch(settle, (self.batch,), self.draft, self.chains, self.scratch)
            self._look(1, gated=True)
        else:
            for i in range(self.drafted + 1):
                self._look(1, gated=i > 0)
            self._sum_residuals()

    def _look(self, positions: int, extra: int = 1, gated: bool = False) -> None:
        """Examine the first positions of each draft, or where ``gated`` the one each sequence has come to."""
        rows = len(self.sides) * positions
        given = (*self._given(), positions, extra)
        self._launch(row_scan, (self.batch * self.chunks, rows), *given, GATED=gated)
        if self.filtered:
            self._launch(row_ends, (self.batch, rows), *given, GATED=gated, num_warps=8)
        if self.weighs:
            self._launch(row_masses, (self.batch * self.chunks, rows), *given, GATED=gated)
        warps = 8 if self.races else 4
        self._launch(judge, (self.batch, positions), *self._given(), extra, GATED=gated, num_warps=warps)

    def _sum_residuals(self) -> None:
        if self.draft is not None:
            rows = self.drafted if self.rule == "block" else 1
            self._launch(residual_sums, (self.batch * self.chunks, rows), *self._given())

    def _given(self) -> tuple[Any, ...]:
        return self.target, self.draft, self.chains, self.scratch

    def _launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        constants = {name: value for name, value in self.constants.items() if name in kernel.arg_names}
        kernel[grid](*given, **constants, **options, **OPTIONS)

    def _scratch(self) -> Scratch:
        """Room for what launches hand on: written before it is read, so never cleared."""
        rows, positions = 2 * self.drafted + 1, self.drafted + 1
        residuals = self.drafted if self.rule == "block" else 1
        ratio = self.rule in ("token", "block")

        def room(wanted: bool, dtype: torch.dtype, *shape: int) -> Array | None:
            return torch.empty((self.batch, *shape), dtype=dtype, device=self.chains.tokens.device) if wanted else None

        return Scratch(
            chunks=self.chunks,
            blocks=self.blocks,
            draft_ends=room(True, torch.int32, 3),
            best=room(True, torch.int64, rows, self.chunks),
            maxima=room(self.filtered or self.races, torch.int32, rows, self.blocks),
            holders=room(self.races, torch.float32, positions, self.blocks),
            ends=room(self.filtered, torch.int64, rows),
            masses=room(self.weighs, torch.int64, rows, self.chunks),
            token_mass=room(self.weighs, torch.int64, rows),
            residuals=room(self.draft is not None, torch.int64, residuals, self.chunks),
            verdicts=room(True, torch.int32, positions),
            chances=room(ratio, torch.float32, positions, 4),
            choices=room(not ratio, torch.int64, positions),
            state=room(True, torch.int32),
        )

    def _results(self) -> Results:
        def room(dtype: torch.dtype, *shape: int) -> Array:
            return torch.empty((self.batch, *shape), dtype=dtype, device=self.chains.tokens.device)

        return Results(
            num_accepted=room(torch.int64),
            next_token=room(torch.int64),
            tokens=room(torch.int64, self.drafted + 1),
            num_emitted=room(torch.int64),
            eos_hit=room(torch.bool),
            status=room(torch.int32),
        )
