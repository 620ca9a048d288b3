"""spec-verify under its own names: verification of one sequence on the CPU, and the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import decoding
from ..types import Array
from ..verification.chain import api as chain

__all__ = ["SpeculativeDecoder", "accept", "verify", "verify_greedy"]


def verify_greedy(target_probs: Array, draft_tokens: Array) -> tuple[int, int]:
    """Accept drafts while each equals the argmax of its target row.

    Parameters
    ----------
    target_probs
        ``[K+1, V]`` floats, probabilities or logits: only the argmax is read, the lowest id where several tie.
    draft_tokens
        ``[K]`` int64, int32 or uint32.

    Returns
    -------
    n_accepted, next_token
        Python ints: the accepted prefix, and the argmax of the row after it.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError
        As ``draftproof.verify_greedy`` does; the shapes it names have a batch of 1 in front.

    Examples
    --------
    >>> import numpy as np
    >>> import draftproof.compat.spec_verify as sv
    >>> sv.verify_greedy(np.eye(3, dtype=np.float32), np.array([0, 2]))
    (1, 1)
    """
    return _one(chain.verify_greedy(target_probs[None], draft_tokens[None]))


def verify(
    target_probs: Array,
    draft_probs: Array,
    draft_tokens: Array,
    uniform_accept: Array | None = None,
    uniform_sample: Array | None = None,
    *,
    generator: Any = None,
    seed: int | None = None,
) -> tuple[int, int]:
    """Accept drafts by rejection sampling (Leviathan et al. 2023, Chen et al. 2023), then draw one more token.

    Parameters
    ----------
    target_probs, draft_probs
        ``[K+1, V]`` and ``[K, V]`` float32, warped alike by the caller. Rows need not be normalised: masses are summed
        exactly and each row counts relative to its sum.
    draft_tokens
        ``[K]`` int64, int32 or uint32.
    uniform_accept, uniform_sample
        ``[K]`` and ``[K+1]`` in [0, 1): position i is accepted by ``uniform_accept[i]``; the token after ``a`` accepted
        ones is drawn with ``uniform_sample[a]``. What is missing comes from ``seed``, else from ``generator``.
    generator
        A ``torch.Generator`` or ``numpy.random.Generator``; None is torch's default generator.
    seed
        Fixes this call's draws; use another one for every round.

    Returns
    -------
    n_accepted, next_token
        Python ints.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError
        As ``draftproof.verify_probs`` does; the shapes it names have a batch of 1 in front.

    Examples
    --------
    >>> import numpy as np
    >>> import draftproof.compat.spec_verify as sv
    >>> target, draft = np.eye(3, dtype=np.float32), np.ones((2, 3), np.float32)
    >>> sv.verify(target, draft, np.array([0, 2]), np.array([0.5, 0.5]), np.array([0.5, 0.5, 0.5]))
    (1, 1)
    """
    if seed is None and (uniform_accept is None or uniform_sample is None):
        seed = _draw_seed(generator)
    return _one(
        chain.verify_probs(
            target_probs[None],
            draft_probs[None],
            draft_tokens[None],
            rule="token",
            uniform_accept=None if uniform_accept is None else uniform_accept[None],
            uniform_sample=None if uniform_sample is None else uniform_sample[None],
            seed=seed,
        )
    )


accept = verify


class SpeculativeDecoder(decoding.SpeculativeDecoder):
    """Draft and verify until enough tokens are out, with any pair of models behind two callbacks.

    Parameters
    ----------
    draft_step
        ``draft_step(prefix, k) -> (tokens, probs)``: k drafted ids and the rows ``[k, V]`` they were drawn from (not
        read when ``greedy``).
    target_step
        ``target_step(prefix, proposed) -> target_probs``: ``[k+1, V]``, the target after the prefix and after each
        draft. Both callbacks get the prefix in the kind that ``prompt_ids`` came in: a list or a 1-D array.
    k
        Drafts a round.
    greedy
        True: the output is that of plain greedy decoding. False: its law is the target's, by rule ``token``; both
        callbacks return probabilities, warped alike.
    generator
        A ``torch.Generator`` or ``numpy.random.Generator`` from which each ``generate`` takes its seed; None is torch's
        default generator. Not read when ``greedy`` or when ``seed`` is given.
    seed
        The seed of every ``generate``: the same prompt then gives the same tokens.

    Notes
    -----
    ``stream``, ``stats``, ``resume`` and the errors are those of ``draftproof.SpeculativeDecoder``.

    Examples
    --------
    >>> import numpy as np
    >>> import draftproof.compat.spec_verify as sv
    >>> count = lambda prefix, n: [(prefix[-1] + i) % 10 for i in range(1, n + 1)]
    >>> draft_step = lambda prefix, k: (count(prefix, k), None)
    >>> target_step = lambda prefix, proposed: np.eye(10, dtype=np.float32)[count(prefix, len(proposed) + 1)]
    >>> sv.SpeculativeDecoder(draft_step, target_step, k=4, greedy=True).generate([7], max_new=6)
    [8, 9, 0, 1, 2, 3]
    """

    def __init__(
        self,
        draft_step: Callable[[Any, int], tuple[Any, Any]],
        target_step: Callable[[Any, Any], Array],
        k: int = 4,
        greedy: bool = True,
        generator: Any = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(draft_step, target_step, k=k, greedy=greedy, rows="probs", seed=seed)
        self._draws = not greedy and seed is None
        self._generator = generator

    def stream(self, prompt_ids: Sequence[int] | Array, max_new: int = 128) -> decoding.Generation:
        """Iterate over the tokens that ``generate`` returns, each as soon as its round is done."""
        if self._draws:
            self.seed = _draw_seed(self._generator)
        return super().stream(prompt_ids, max_new)


def _one(result: Any) -> tuple[int, int]:
    return int(result.num_accepted[0]), int(result.next_token[0])


def _draw_seed(generator: Any) -> int:
    """Take 63 bits from a torch or NumPy generator."""
    if hasattr(generator, "integers"):
        return int(generator.integers(2**63))
    import torch

    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))
