"""Draft with whichever of several drafters is most promising now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import DtypeError, ValueRangeError
from ..types import Array, Draft, SamplingParams
from .base import Drafter, DraftState, Noise
from .checks import check_drafter, check_methods, is_drafter, kind_of
from .recycling import RecyclingDrafter
from .suffix import SuffixDrafter

# What a forward costs more for having drafts at all, and for each of them, where drafts of different lengths
# are compared.
_ANY, _EACH = 0.3, 0.1
_REMEDY = "return Draft(tokens, None, acceptance)"


class MixDrafter:
    """Asks several drafters and takes the draft that promises most tokens for its cost.

    Every drafter estimates the chances of its tokens and learns from each round, also when its draft was not taken: so
    the mix follows what works in the text at hand.

    Parameters
    ----------
    drafters : sequence of Drafter, optional
        At least one; each must draft point masses with estimates. Default: ``SuffixDrafter()`` and
        ``RecyclingDrafter()``. Of equal promises the first wins.

    Raises
    ------
    ValueRangeError, DtypeError
        There is no drafter, or one is none, has logits or does not estimate.

    Notes
    -----
    Memory and time are the sums over the drafters.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SpeculativeDecoder
    >>> from draftproof.drafters import MixDrafter
    >>> count = np.roll(np.eye(10, dtype=np.float32), -1, axis=0)  # after 9 comes 0
    >>> target = lambda prefix, proposed: count[np.array([*prefix[-1:], *proposed])]
    >>> decoder = SpeculativeDecoder(MixDrafter(), target, k="auto")
    >>> decoder.generate([6], max_new=40) == [(7 + i) % 10 for i in range(40)]
    True
    >>> decoder.stats.tokens_per_forward > 2
    True
    """

    has_q = False
    noise: Noise = None
    estimates = True

    def __init__(self, drafters: Sequence[Drafter] | None = None) -> None:
        if is_drafter(drafters) or not isinstance(drafters, Iterable | None):
            raise DtypeError(f"drafters must be a sequence of drafters, got {kind_of(drafters)}: pass a list of them")
        self.drafters = (SuffixDrafter(), RecyclingDrafter()) if drafters is None else tuple(drafters)
        if not self.drafters:
            raise ValueRangeError("drafters must be at least one, got none: pass a drafter, or None for the default")
        for drafter in self.drafters:
            check_drafter("drafters", drafter)
            if drafter.has_q or not getattr(drafter, "estimates", False):
                raise ValueRangeError(
                    f"drafters must be such as draft point masses with estimates, got {type(drafter).__name__}: "
                    "use it alone"
                )

    def start(self) -> MixState:
        """Return the state for a new sequence."""
        states = [drafter.start() for drafter in self.drafters]
        for drafter, state in zip(self.drafters, states, strict=True):
            check_methods(f"the state from {kind_of(drafter)}.start", state, "propose", "accept")
        return MixState(states)


class MixState:
    """Several drafters at work on one sequence."""

    def __init__(self, states: list[DraftState]) -> None:
        self._states = states

    def propose(self, context: Any, width: int, *, params: SamplingParams, seed: int, offset: int) -> Draft:
        """Return the most promising draft."""
        drafts = [state.propose(context, width, params=params, seed=seed, offset=offset) for state in self._states]
        for state, draft in zip(self._states, drafts, strict=True):
            if not isinstance(draft, Draft):
                raise DtypeError(f"{kind_of(state)}.propose must return a Draft, got {kind_of(draft)}: {_REMEDY}")
        return max(drafts, key=lambda draft: promise(() if draft.acceptance is None else draft.acceptance))

    def accept(self, num_accepted: int, next_token: int, target_logits: Array) -> None:
        """Pass it on."""
        for state in self._states:
            state.accept(num_accepted, next_token, target_logits)


def promise(acceptance: Sequence[float]) -> float:
    """Return the tokens expected per cost of a forward, at the best width."""
    best, reached, expected = 1.0, 1.0, 1.0
    for width, chance in enumerate(acceptance, 1):
        reached *= chance
        expected += reached
        value = expected / (1 + _ANY + _EACH * width)
        if value > best:
            best = value
    return best
