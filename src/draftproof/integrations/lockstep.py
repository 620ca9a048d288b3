"""The rounds of a batch: every sequence drafts, one forward serves them all, each verifies and grows on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from ..decoding import Generation
from ..types import Array
from .batch import Forward, Sequences
from .logits_processors import Processors


class Kept:
    """The processed and the raw rows of all emitted tokens, each ``[1, V]``, where ``generate`` is to return them."""

    def __init__(self, batch: int, scores: bool, logits: bool, pad: int) -> None:
        self._scores: list[list[Array]] | None = [[] for _ in range(batch)] if scores else None
        self._logits: list[list[Array]] | None = [[] for _ in range(batch)] if logits else None
        self._pad = pad

    def add(self, row: int, scores: Callable[[], Array], logits: Array) -> None:
        """Add what one sequence has emitted in a round, ``[n, V]``."""
        if self._scores is not None:
            self._scores[row].extend(scores().split(1))
        if self._logits is not None:
            self._logits[row].extend(logits.clone().split(1))

    def end_at(self, row: int, count: int) -> None:
        """Forget what one sequence has beyond ``count`` tokens."""
        for kept in (self._scores, self._logits):
            if kept is not None:
                del kept[row][count:]

    def scores(self, count: int) -> tuple[Array, ...] | None:
        """Return processed rows ``[B, V]`` for each of ``count`` tokens; of padding, that it was certain."""
        return self._steps(self._scores, count)

    def logits(self, count: int) -> tuple[Array, ...] | None:
        """Return the model's rows likewise."""
        return self._steps(self._logits, count)

    def _steps(self, kept: list[list[Array]] | None, count: int) -> tuple[Array, ...] | None:
        if kept is None:
            return None
        if len(kept) == 1:
            return tuple(kept[0][:count])
        padding = torch.full_like(kept[0][0], -torch.inf)
        padding[0, self._pad] = 0
        return tuple(torch.cat([rows[i] if i < len(rows) else padding for rows in kept]) for i in range(count))


class Lockstep:
    """Runs the generations of a batch to their end, into ``sequences``.

    ``forward`` gives the model's rows, ``processors`` what ``generate`` makes of them. ``criteria`` are its stopping
    criteria, asked after each token with what there was at that moment; lengths and eos are the generations' own
    business. The history of row b begins at ``starts[b]``, after padding. A row with a lead of more than ``lead``
    tokens over another drafts nothing: all would wait for what does not end the batch sooner.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        sequences: Sequences,
        forward: Forward,
        processors: Processors,
        criteria: Sequence[Any],
        starts: Sequence[int],
        kept: Kept,
        streamer: Any,
        lead: int | None = None,
    ) -> None:
        self._generations, self._sequences, self._starts = generations, sequences, starts
        self._forward, self._processors = forward, processors
        self._kept, self._streamer, self._lead = kept, streamer, lead
        own = (MaxLengthCriteria, EosTokenCriteria)
        self._criteria = StoppingCriteriaList(c for c in criteria if type(c) not in own)
        # As in `generate`: without any eos a sequence that has stopped goes on as long as others do.
        self._padded = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._prompt = self._shown = sequences.prompt.shape[1]
        self._stopped: list[int | None] = [None] * len(generations)

    def run(self) -> None:
        """Go on until all sequences have come to their end."""
        if self._streamer is not None:
            self._streamer.put(self._sequences.prompt.cpu())
        while live := [b for b, generation in enumerate(self._generations) if not generation.finished]:
            self._round(live)
            self._stream()
        if self._streamer is not None:
            self._streamer.end()

    def _round(self, live: list[int]) -> None:
        sequences, room, before = self._sequences, self._forward.room, list(self._sequences.lengths)
        ahead = min(before[b] for b in live) + (max(before) if self._lead is None else self._lead)
        drafts = {b: self._generations[b].propose(0 if before[b] > ahead else room) for b in live}
        tokens = [drafts[b].tokens if b in drafts else None for b in range(len(before))]
        for b in live:
            # What is no id of the model's is rejected whatever follows; the model only has to get through.
            sequences.write(b, [min(token, self._forward.vocab - 1) for token in drafts[b].tokens])
        begun = perf_counter()
        logits = self._forward([len(draft or ()) for draft in tokens])
        seconds = perf_counter() - begun
        rows = self._processors(logits, sequences, tokens)
        # Without torch between, a call of the core costs half as much.
        verified = rows.numpy() if rows.device.type == "cpu" else rows
        for b in live:
            generation = self._generations[b]
            generation.stats.target_forwards += 1
            generation.stats.seconds["target"] += seconds
            emitted = generation.settle(drafts[b], verified[b, : len(drafts[b].tokens) + 1])
            sequences.write(b, emitted)
            sequences.lengths[b] += len(emitted)
            self._keep(b, rows[b, : len(emitted)], logits[b, : len(emitted)])
        self._stop(live, before)
        self._forward.rewind([now - then for now, then in zip(sequences.lengths, before, strict=True)])

    def _keep(self, row: int, processed: Array, raw: Array) -> None:
        def scores() -> Array:
            seen = self._sequences.prefix(self._sequences.lengths[row])[row, self._starts[row] :]
            return self._processors.scores(processed, seen)

        self._kept.add(row, scores, raw)

    def _stop(self, live: list[int], before: list[int]) -> None:
        """Ask the criteria about every new token, and end the sequences that they or their own business end."""
        sequences, stopped = self._sequences, self._stopped
        for length in range(min(before[b] for b in live) + 1, max(sequences.lengths[b] for b in live) + 1):
            asked = [b for b in live if before[b] < length <= sequences.lengths[b] and stopped[b] is None]
            if asked and self._criteria:
                met = self._criteria(sequences.prefix(length), self._kept.scores(length - self._prompt)).tolist()
                for b in asked:
                    stopped[b] = length if met[b] else None
        for b in live:
            if stopped[b] is None and self._generations[b].finished:
                stopped[b] = sequences.lengths[b]
        ends = [end for end in stopped if end is not None]
        for b in live:
            end = stopped[b] if self._padded else max(ends) if len(ends) == len(stopped) else None
            if end is not None:
                self._end(b, end)

    def _end(self, row: int, length: int) -> None:
        count = length - self._prompt
        self._generations[row].end_at(count)
        self._kept.end_at(row, count)
        self._sequences.lengths[row] = min(self._sequences.lengths[row], length)
        self._sequences.write(row, [])

    def _stream(self) -> None:
        if self._streamer is None:
            return
        lengths = self._sequences.lengths
        growing = [length for length, g in zip(lengths, self._generations, strict=True) if not g.finished]
        complete = min(growing) if growing else max(lengths)
        for column in self._sequences.prefix(complete).T[self._shown :].cpu():
            self._streamer.put(column)
        self._shown = complete
