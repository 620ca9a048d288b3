"""One sequence at work: rounds of drafting, the target's rows, and verification."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _numpy as np
from ..drafters.checks import check_count
from ..sampling import random_seeds
from ..types import Array
from .callbacks import Checked, frozen, read_prompt, read_rows
from .draft_length import LengthState
from .drafting import DraftSource
from .stats import Stats

if TYPE_CHECKING:
    from typing import Self

    from .loop import SpeculativeDecoder


class Emitted(NamedTuple):
    """One token of the output; ``drafted`` says that it is an accepted draft."""

    token: int
    drafted: bool


class Generation:
    """One sequence: an iterator over its new tokens that survives exceptions.

    ``tokens`` are the new tokens of all finished rounds, in the prompt's kind, handed out or not; ``finished`` says
    that there will be no more; ``seed`` and ``stats`` are its own, and ``length`` is what its policy has learnt.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SpeculativeDecoder
    >>> target = lambda prefix, proposed: np.eye(3, dtype=np.float32)[[1] * (len(proposed) + 1)]  # always 1
    >>> generation = SpeculativeDecoder(lambda prefix, k: ([1, 2][:k], None), target).stream([1], max_new=3)
    >>> next(generation)
    Emitted(token=1, drafted=True)
    >>> generation.tokens, generation.finished
    ([1, 1], False)
    >>> [drafted for _, drafted in generation]
    [False, False]
    """

    def __init__(self, decoder: SpeculativeDecoder, prompt_ids: Any, max_new: int) -> None:
        self.seed = int(random_seeds(1)[0] if decoder.seed is None else decoder.seed)
        self.stats = Stats()
        self._decoder = decoder
        self._ids, self._kind = read_prompt(prompt_ids)
        self._prompt = len(self._ids)
        self._limit = self._prompt + check_count("max_new", max_new)
        self._drafted: list[bool] = []
        self._handed = 0
        self._drafts = DraftSource(decoder.draft_step, decoder.length, decoder.verifier, self._kind)

    @property
    def tokens(self) -> Any:
        return self._kind(self._ids[self._prompt :])

    @property
    def length(self) -> LengthState:
        return self._drafts.length

    @property
    def finished(self) -> bool:
        last = self._ids[self._prompt :][-1:].tolist()
        return len(self._ids) == self._limit or not self._decoder.verifier.eos.isdisjoint(last)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Emitted:
        while self._prompt + self._handed == len(self._ids):
            if self.finished:
                raise StopIteration
            try:
                self._round()
            except StopIteration as error:
                # It would look like the end of the sequence.
                raise RuntimeError(
                    "callbacks must not raise StopIteration, got one: raise another exception"
                ) from error
        self._handed += 1
        return Emitted(int(self._ids[self._prompt + self._handed - 1]), self._drafted[self._handed - 1])

    def propose(self, room: int | None = None) -> Checked:
        """Begin a round: return its draft, of at most ``room`` tokens. ``settle`` ends the round.

        Whoever runs a target over many sequences at once calls these two instead of iterating.
        """
        self._begun = perf_counter()
        most = self._limit - len(self._ids) - 1
        with self.stats.phase("draft"):
            return self._drafts(self._ids, most if room is None else min(most, room), self.seed)

    def settle(self, draft: Checked, rows: Array) -> list[int]:
        """End a round: verify by the target's ``rows`` ``[len(draft.tokens) + 1, V]``; return what was emitted."""
        verifier, stats, context = self._decoder.verifier, self.stats, self._ids
        with stats.phase("verify"):
            accepted, next_token, _ = verifier(rows, draft, context, self.seed).packed()[0].tolist()
        emitted = draft.tokens[:accepted]
        if not emitted or emitted[-1] not in verifier.eos:
            emitted.append(next_token)
        self._drafted[len(context) - self._prompt :] = [i < accepted for i in range(len(emitted))]
        # This one assignment ends the round: an interrupt before it repeats the round.
        self._ids = frozen(np.concatenate([context, np.array(emitted, dtype=np.int64)]))
        stats.record(len(draft.tokens), accepted, len(emitted))
        if not self.finished:
            rows = rows[: len(emitted)]
            self._drafts.learn(len(draft.tokens), accepted, next_token, rows, perf_counter() - self._begun)
        return emitted

    def end_at(self, count: int) -> None:
        """Let the sequence have ``count`` new tokens, fewer than planned; those it has beyond are taken back."""
        self._limit = self._prompt + count
        self.stats.tokens -= max(0, len(self._ids) - self._limit)
        self._ids = self._ids[: self._limit]
        del self._drafted[count:]

    def _round(self) -> None:
        draft = self.propose()
        with self.stats.phase("target"):
            proposed = self._kind(np.array(draft.tokens, dtype=np.int64))
            rows = read_rows(self._decoder.target_step(self._kind(self._ids), proposed), len(draft.tokens))
            self.stats.target_forwards += 1
        self.settle(draft, rows)
