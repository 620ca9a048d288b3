"""Draft with a smaller model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from .. import _numpy as np
from .._arrays import namespace
from ..errors import ValueRangeError
from ..sampling import sample
from ..types import Array, Draft, SamplingParams
from .base import Noise
from .checks import check_step


class ModelDrafter:
    """Drafts token by token from a model's logits.

    Parameters
    ----------
    step : callable ``(prefix, proposed) -> logits [len(proposed) + 1, V]``
        The draft model, in the form a target has; ``draftproof.integrations.transformers.CausalLM`` makes one that
        keeps and rewinds its cache. It is called once a draft, with ``proposed`` empty, ``prefix`` int64 ``[L]``.
    noise : {"private", "shared", None}
        "private": drafts are drawn from the model's filtered law and carry their logits, for rules token and block.
        "shared": drafts are drawn with the target's own noise, for rule match; a draft is then accepted with
        probability ``sum_j 1 / sum_i max(p_i/p_j, q_i/q_j)``. None: the most likely token, a point mass, for any rule.
    cost : float
        What a forward of the draft model costs, in forwards of the target on one token; roughly the ratio of their
        parameters. Read by ``k="auto"``, which may look at no clock under rules token and block.

    Raises
    ------
    ValueRangeError, DtypeError
        ``step`` is no function, ``noise`` none of these, or ``cost`` no finite number of at least 0.

    Notes
    -----
    Exactness: with private noise the logits are those the drafts were drawn from, bit for bit, and the stream of
    (seed, offset of the round, draft index) is read by no other draw. Shared noise: Daliri, Musco and Suresh 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SpeculativeDecoder
    >>> from draftproof.drafters import ModelDrafter
    >>> table = np.random.default_rng(0).normal(size=(2, 5, 5)).astype(np.float32)
    >>> def rows(i):
    ...     return lambda prefix, proposed: table[i][[*prefix[-1:], *proposed]]
    >>> drafter = ModelDrafter(rows(0))
    >>> decoder = SpeculativeDecoder(drafter, rows(1), greedy=False, seed=1)
    >>> decoder.rule, len(decoder.generate([0], max_new=12))
    ('token', 12)
    """

    def __init__(self, step: Callable[[Any, Any], Array], *, noise: Noise = "private", cost: float = 0.2) -> None:
        check_step("step", step, "a function (prefix, proposed) -> rows", "CausalLM(model)")
        if noise not in ("private", "shared", None):
            remedy = "'private' serves rules token and block, 'shared' match, None any"
            raise ValueRangeError(f"noise must be 'private', 'shared' or None, got {noise!r}: {remedy}")
        try:
            allowed = 0 <= cost < float("inf")
        except TypeError:
            allowed = False
        if not allowed:
            raise ValueRangeError(f"cost must be at least 0 and finite, got {cost!r}: pass the ratio of the forwards")
        self.step = step
        self.cost = cost
        self.noise: Noise = noise
        self.has_q = noise == "private"

    def start(self) -> ModelState:
        """Return the state for a new sequence. States share the model: its cache serves one sequence at a time."""
        return ModelState(self.step, self.noise)


class ModelState:
    """A draft model at work on one sequence. What it has cached is the business of ``step``."""

    def __init__(self, step: Callable[[Any, Any], Array], noise: Noise) -> None:
        self._step = step
        self._noise = noise

    def propose(self, context: Any, width: int, *, params: SamplingParams, seed: int, offset: int) -> Draft:
        """Draw ``width`` tokens, each from the model's row after the ones before it."""
        if self._noise is None:
            params = replace(params, temperature=0.0)
        length = len(context)
        ids = np.concatenate([context, np.zeros(width, dtype=np.int64)])
        rows: list[Array] = []
        for i in range(width):
            seen = ids[: length + i]
            row = self._step(seen, seen[:0])
            at, index = (offset + i, None) if self._noise == "shared" else (offset, i)
            history = namespace(row).asarray(seen[None], row)
            drawn = sample(row, **asdict(params), prev_tokens=history, seed=seed, offset=at, draft_index=index)
            ids[length + i] = int(drawn[0])
            rows.append(row)
        has_q = self._noise == "private" and width > 0
        return Draft(ids[length:], namespace(rows[0]).concat(rows, 0) if has_q else None)

    def accept(self, num_accepted: int, next_token: int, target_logits: Array) -> None:
        """Do nothing: the next context tells what to rewind."""
