"""The nouns of the library: parameters, drafts, results. Frozen, without behaviour."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# NumPy arrays or torch tensors; the library imports torch only once a tensor arrives.
Array = Any


class Status(enum.IntFlag):
    """Bits of the per-row ``status`` that every operation returns.

    ``NAN``, ``EMPTY_SUPPORT``, ``BAD_PROBABILITY`` and ``BAD_PARAMETER`` mark a dead row: its token is -1.
    The others are information: the row's result stands.
    """

    OK = 0
    NAN = 1
    EMPTY_SUPPORT = 2
    INVALID_DRAFT_ID = 4
    RESIDUAL_FALLBACK = 8
    OFF_SUPPORT = 16
    BAD_PROBABILITY = 32
    BAD_PARAMETER = 64


DEAD = int(Status.NAN | Status.EMPTY_SUPPORT | Status.BAD_PROBABILITY | Status.BAD_PARAMETER)


@dataclass(frozen=True)
class SamplingParams:
    """The filters of one request, under the names ``sample`` and ``verify`` take them.

    ``None`` is off. ``temperature=0`` is greedy.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Filters(NamedTuple):
    """The same filters for a batch: ``[B]`` float32 arrays (``top_k`` int64), None where a filter is off."""

    temperature: Array
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None
    repetition_penalty: Array | None = None


class Draft(NamedTuple):
    """What a drafter proposes: ``tokens`` int64 ``[k]`` and raw ``logits`` float ``[k, V]``, None for a point mass.

    ``acceptance``, if known, has for each token an estimate of the probability that it is accepted, given that those
    before it were.
    """

    tokens: Array
    logits: Array | None
    acceptance: Sequence[float] | None = None


class SampleResult(NamedTuple):
    """Tokens drawn from ``[B, V]`` logits, with what is known about each draw.

    ``tokens`` int64 ``[B]``, ``logprobs`` float32 ``[B]`` under the filtered law, ``raw_logprobs`` float32 ``[B]`` of
    the logits as given, ``kept`` int64 ``[B]`` (entries of ``filter_logits`` above -inf), ``status`` int32 ``[B]``.
    """

    tokens: Array
    logprobs: Array
    raw_logprobs: Array
    kept: Array
    status: Array


class VerifyResult(NamedTuple):
    """Outcome of one verification round.

    ``num_accepted`` int64 ``[B]``; ``next_token`` int64 ``[B]``, the correction or bonus; ``tokens`` int64
    ``[B, K+1]``, the emitted tokens padded with -1; ``num_emitted`` int64 ``[B]``; ``eos_hit`` bool ``[B]``; ``status``
    int32 ``[B]``.
    """

    num_accepted: Array
    next_token: Array
    tokens: Array
    num_emitted: Array
    eos_hit: Array
    status: Array

    def packed(self) -> Array:
        """Return ``(accepted, next, eos_hit)`` as one int32 ``[B, 3]`` array: a single small device read a round."""
        columns = (self.num_accepted, self.next_token, self.eos_hit)
        if hasattr(self.status, "new_empty"):
            import torch

            return torch.stack([c.to(torch.int32) for c in columns], dim=1)
        from . import _numpy as np

        return np.stack([c.astype(np.int32) for c in columns], axis=1)
