"""The draft/verify loop: draft some tokens, let the target see them all at once, keep what the rule accepts."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from ..drafters.base import Drafter
from ..errors import ValueRangeError
from ..sampling import random_seeds
from ..types import Array, SamplingParams
from .callbacks import Checked, frozen, read_prompt, read_rows
from .draft_length import LengthPolicy, LengthState, draft_length
from .drafting import DraftSource
from .rules import Rule, Verifier
from .stats import Stats
from .stopping import count, eos_ids


class Emitted(NamedTuple):
    """One token of the output; ``drafted`` says that it is an accepted draft."""

    token: int
    drafted: bool


class SpeculativeDecoder:
    """Generates from a target model with the help of drafts, by a rule that keeps the target's law.

    Parameters
    ----------
    draft_step : callable ``(prefix, k) -> (tokens, rows or None)``, or a Drafter
        Proposes at most ``k`` tokens. ``rows`` ``[len(tokens), V]`` is what they were drawn from; None says that they
        are deterministic given the prefix (argmax, n-gram): point masses.
    target_step : callable ``(prefix, proposed) -> rows [len(proposed) + 1, V]``
        The target's row after the prefix and after each proposed token; anything finite after an id it does not know.
    k : int, "auto", or a policy such as ``decoding.DraftLength``
        Most tokens drafted in a round; 0 is plain decoding. "auto" chooses the width of each round by what it is
        expected to gain, none included: ``DraftLength()``.
    greedy : bool
        Emit the most likely token each time.
    rule : {"greedy", "token", "block", "match"}, optional
        How every round is verified. None: "greedy" if ``greedy``, else "match" for a drafter whose ``has_q`` is False,
        else "token", where drafts without rows are point masses.
    rows : {"logits", "probs"}
        What both callbacks return. Probabilities are used as they are.
    temperature, top_k, top_p, min_p, repetition_penalty
        As in ``sample``, for target and draft rows alike.
    seed : int, optional
        None draws a new one for each sequence: ``generation.seed``.
    eos : int or sequence of int, optional
        Ids that end the sequence; the first one is the last token emitted.

    The callbacks get ``prefix`` and ``proposed`` in the kind ``prompt_ids`` has: list, NumPy array or torch tensor.

    Raises
    ------
    ValueRangeError
        Sampling parameters with ``greedy`` or ``rows="probs"``; a drafter that shares the target's noise under a rule
        but match; a drafter with logits when ``rows="probs"``; from a round, a target row without a law.
    ShapeError, DtypeError
        Wrong ``k``, ``seed``, ``max_new`` or ``prompt_ids``; from a round, a callback returned what it should not: the
        text names it.

    Notes
    -----
    Exactness: each round has ``offset`` = tokens already in the sequence, prompt included. Under greedy and match the
    output is, token for token, that of plain decoding (argmax; ``sample(row, seed=seed, offset=position)``), whatever
    the drafts, given equal rows. Under token and block its law is the target's (Leviathan 2023, Chen 2023; Sun 2025).

    Exceptions of a callback pass through. The tokens of the rounds before are in ``generation.tokens``; ``resume()``,
    or iterating ``generation`` further, repeats the failed round with the same draws.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SpeculativeDecoder
    >>> count = np.roll(np.eye(10, dtype=np.float32), -1, axis=0)  # after 9 comes 0
    >>> target = lambda prefix, proposed: count[np.array([*prefix[-1:], *proposed]) % 10]
    >>> draft = lambda prefix, k: ([prefix[-1] + 1 + i for i in range(k)], None)  # after 9 comes 10
    >>> decoder = SpeculativeDecoder(draft, target)
    >>> decoder.generate([6], max_new=6)
    [7, 8, 9, 0, 1, 2]
    >>> [token for token, drafted in decoder.stream([6], max_new=6) if drafted]
    [7, 8, 9, 1]
    """

    def __init__(
        self,
        draft_step: Callable[[Any, int], tuple[Any, Any]] | Drafter,
        target_step: Callable[[Any, Any], Array],
        *,
        k: int | Literal["auto"] | LengthPolicy = 4,
        greedy: bool = True,
        rule: Rule | None = None,
        rows: Literal["logits", "probs"] = "logits",
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        eos: Any = None,
    ) -> None:
        self.draft_step: Any = draft_step
        self.target_step = target_step
        self.k, self.seed, self.length = k, seed, draft_length(k)
        self.rule: Rule = rule or ("greedy" if greedy else "token" if getattr(draft_step, "has_q", True) else "match")
        params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty)
        self.verifier = Verifier(self.rule, rows, params, eos_ids(eos))
        self.verifier.check(greedy, seed, draft_step)
        self.generation: Generation | None = None

    @property
    def stats(self) -> Stats:
        """Counts and times of the latest generation."""
        return self.generation.stats if self.generation else Stats()

    def generate(self, prompt_ids: Any, max_new: int = 128) -> Any:
        """Return the new tokens, at most ``max_new``, in the kind of ``prompt_ids``: list, NumPy or torch int64 [n]."""
        self.stream(prompt_ids, max_new)
        return self.resume()

    def stream(self, prompt_ids: Any, max_new: int = 128) -> Generation:
        """Return an iterator over the new tokens, each an ``Emitted``, which runs rounds as it is asked for tokens."""
        self.generation = Generation(self, prompt_ids, max_new)
        return self.generation

    def resume(self) -> Any:
        """Go on with the latest generation after an exception or a broken-off stream; return all its new tokens."""
        if self.generation is None:
            raise ValueRangeError("resume() needs a generation to go on with: call generate() or stream() first")
        for _ in self.generation:
            pass
        return self.generation.tokens


class Generation:
    """One sequence: an iterator over its new tokens that survives exceptions.

    ``tokens`` are the new tokens of all finished rounds, in the prompt's kind, handed out or not; ``finished`` says
    that there will be no more; ``seed`` and ``stats`` are its own, and ``length`` is what its policy has learnt.
    """

    def __init__(self, decoder: SpeculativeDecoder, prompt_ids: Any, max_new: int) -> None:
        self.seed = int(random_seeds(1)[0] if decoder.seed is None else decoder.seed)
        self.stats = Stats()
        self._decoder = decoder
        self._ids, self._kind = read_prompt(prompt_ids)
        self._prompt = len(self._ids)
        self._limit = self._prompt + count("max_new", max_new)
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
                raise RuntimeError("a callback raised StopIteration") from error
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
        """Verify the draft by the target's ``rows`` ``[len(draft.tokens) + 1, V]``; take over and return what is emitted."""
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
