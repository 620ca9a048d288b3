"""Where the rules find their rows and their draws: portable batched text, one position at a time.

A source answers for the sequences ``rows`` (int64 indices into the batch) at position i. Rows that no sequence needs
are never touched. A row expanded over the batch is prepared once; its law then has one row that broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...numerics.draws import fixed_point, fixed_point_of_uniform
from ...numerics.masses import probability_masses
from ...numerics.noise import uniform
from ...rng.streams import accept_word, emit_words
from ...sampling.filters import unpack
from ...sampling.rows import Law, Rows, allowed_logits, checked_probabilities, columns, law, prepare
from ...types import Array, Filters


@dataclass(frozen=True)
class LogitRows:
    """Rows of logits ``[b, N, V]`` with their filters; the penalty at position i also sees the drafts before it."""

    xp: Array
    logits: Array
    filters: Filters
    prev_tokens: Array | None
    draft_tokens: Array
    mask: Array | None
    mask_vocab: int

    def rows(self, i: int, rows: Array) -> Rows:
        """Return the filtered rows of position i."""
        return prepare(self.xp, *self._inputs(i, rows))

    def law(self, i: int, rows: Array) -> Law:
        """Return the integer law of position i."""
        return law(self.xp, self.rows(i, rows))

    def argmax(self, i: int, rows: Array) -> tuple[Array, Array]:
        """Return ``(token, status)`` of the greedy choice at position i."""
        logits, filters, history, mask = self._inputs(i, rows)
        allowed, _, status = allowed_logits(self.xp, logits, columns(filters), history, mask)
        return self.xp.argmax(allowed)[:, 0], status

    def shared(self) -> bool:
        """Whether one row serves the whole batch at each position."""
        inputs = [self.logits, *self.filters, self.mask]
        if self.filters.repetition_penalty is not None:
            inputs += [self.prev_tokens, self.draft_tokens]
        return all(self.xp.same_row(a) for a in inputs if a is not None)

    def _inputs(self, i: int, rows: Array) -> tuple[Array, Filters, Array | None, Array | None]:
        if self.shared():
            rows = rows[:1]
        filters = Filters(*(None if f is None else f[rows] for f in self.filters))
        return self.logits[rows, i], filters, self._history(i, rows), self._mask(i, rows)

    def _history(self, i: int, rows: Array) -> Array | None:
        if self.filters.repetition_penalty is None:
            return None
        drafted = self.draft_tokens[rows, :i]
        if self.prev_tokens is None:
            return drafted
        return self.xp.concat([self.prev_tokens[rows], drafted], 1)

    def _mask(self, i: int, rows: Array) -> Array | None:
        """The mask of position i over this source's vocabulary: ids beyond the mask's own vocabulary are allowed."""
        if self.mask is None:
            return None
        mask, vocab = self.mask[rows, i], self.logits.shape[-1]
        if vocab == self.mask_vocab:
            return mask
        if self.xp.dtype_name(mask) == "int32":
            mask = unpack(self.xp, mask, self.mask_vocab)
        if vocab < self.mask_vocab:
            return mask[:, :vocab]
        allowed = self.xp.full((mask.shape[0], vocab - self.mask_vocab), True, "bool", like=mask)
        return self.xp.concat([mask, allowed], 1)


@dataclass(frozen=True)
class ProbabilityRows:
    """Rows of probabilities ``[b, N, V]``, each normalised by its own sum."""

    xp: Array
    probs: Array

    def law(self, i: int, rows: Array) -> Law:
        """Return the integer law of position i."""
        row, status = self._row(i, rows)
        mass = probability_masses(self.xp, row)
        return Law(None, mass, self.xp.sum(mass), status, row.shape[-1])

    def argmax(self, i: int, rows: Array) -> tuple[Array, Array]:
        """Return ``(token, status)`` of the most probable token at position i."""
        row, status = self._row(i, rows)
        return self.xp.argmax(row)[:, 0], status

    def shared(self) -> bool:
        """Whether one row serves the whole batch at each position."""
        return bool(self.xp.same_row(self.probs))

    def _row(self, i: int, rows: Array) -> tuple[Array, Array]:
        if self.shared():
            rows = rows[:1]
        return checked_probabilities(self.xp, self.probs[rows, i])


@dataclass(frozen=True)
class Draws:
    """The randomness of a round: uniforms handed in, or those of the named streams."""

    xp: Array
    seed: Array  # None where both uniforms are handed in
    offset: Array
    uniform_accept: Array | None = None
    uniform_sample: Array | None = None

    def accept(self, i: int, rows: Array) -> Array:
        """Return the uniform ``[r, 1]`` that decides on draft i."""
        if self.uniform_accept is not None:
            return self.uniform_accept[rows, i : i + 1]
        return uniform(self.xp, accept_word(self.seed[rows, None], self.offset[rows, None], i))

    def emit(self, i: int, rows: Array) -> Array:
        """Return the 62-bit fraction ``[r, 1]`` of the correction or bonus after i accepted drafts."""
        if self.uniform_sample is not None:
            return fixed_point_of_uniform(self.xp, self.uniform_sample[rows, i : i + 1])
        return fixed_point(*emit_words(self.seed[rows, None], self.offset[rows, None], i))

    def follow(self, i: int, rows: Array) -> Array:
        """Return the fraction with which rule match draws the target's own token at position i."""
        if self.uniform_sample is not None:
            return fixed_point_of_uniform(self.xp, self.uniform_sample[rows, i : i + 1])
        return fixed_point(*emit_words(self.seed[rows, None], self.offset[rows, None] + i, 0))
