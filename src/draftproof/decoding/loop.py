"""The draft/verify loop: draft some tokens, let the target see them all at once, keep what the rule accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ..drafters.base import Drafter
from ..drafters.checks import check_drafter, check_step, is_drafter, kind_of
from ..errors import DtypeError, ValueRangeError
from ..types import Array, SamplingParams
from .draft_length import LengthPolicy, draft_length
from .generation import Generation
from .rules import Rule, Verifier
from .stats import Stats
from .stopping import eos_ids


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
        expected to gain, none included: ``DraftLength(measure=seed is None)``, which reads no clock if there is a seed.
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
        but match; a drafter with logits when ``rows="probs"``; a number or an id out of range; from a round, a target
        row without a law.
    ShapeError, DtypeError
        ``draft_step`` or ``target_step`` is none; wrong ``k``, ``seed``, ``max_new`` or ``prompt_ids``; from a round, a
        callback, drafter or policy returned what it should not: the text names it.

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
        if is_drafter(draft_step):
            check_drafter("draft_step", draft_step)
        else:
            form = "a function (prefix, k) -> (tokens, rows or None), or a drafter such as NgramDrafter()"
            check_step("draft_step", draft_step, form, "ModelDrafter(CausalLM(model))")
            if hasattr(draft_step, "fork"):
                remedy = f"pass ModelDrafter({kind_of(draft_step)}(model))"
                raise DtypeError(f"draft_step must be {form}, got {kind_of(draft_step)}, a target: {remedy}")
        check_step("target_step", target_step, "a function (prefix, proposed) -> rows", "CausalLM(model)")
        self.draft_step: Any = draft_step
        self.target_step = target_step
        self.k, self.seed, self.length = k, seed, draft_length(k, measure=seed is None)
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
