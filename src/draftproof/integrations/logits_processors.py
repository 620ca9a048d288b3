"""The logits processors of ``generate``: the last ones fused into the draw, the others applied position by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PrefixConstrainedLogitsProcessor

from ..errors import ValueRangeError
from ..sampling import filter_logits
from ..types import Array, SamplingParams
from .batch import Sequences

# In the order in which they act in one draw, each with its attribute and our name for it.
_FUSED = (
    (transformers.RepetitionPenaltyLogitsProcessor, "penalty", "repetition_penalty"),
    (transformers.TemperatureLogitsWarper, "temperature", "temperature"),
    (transformers.TopKLogitsWarper, "top_k", "top_k"),
    (transformers.TopPLogitsWarper, "top_p", "top_p"),
    (transformers.MinPLogitsWarper, "min_p", "min_p"),
)
# These count their calls or run the model with a cache of their own: a rejected draft would stay in their state.
_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


class Processors(NamedTuple):
    """``general`` act on the model's rows, ``fused`` stand for the processors after them."""

    general: Sequence[Any]
    fused: SamplingParams

    @classmethod
    def of(cls, processors: Sequence[Any], starts: Sequence[int]) -> Processors:
        """Fuse as many of the last processors as do what one draw does, where row b's history begins at ``starts[b]``.

        Raises
        ------
        ValueRangeError
            A processor keeps a state that drafts would spoil.
        """
        for processor in processors:
            if type(processor).__name__ in _STATEFUL:
                raise ValueRangeError(
                    "logits processors must depend on the sequence alone, got "
                    f"{type(processor).__name__}: leave out custom_generate, guidance_scale or watermarking_config"
                )
        found: dict[str, Any] = {}
        stages = list(_FUSED)
        general = list(processors)
        while general:
            while stages and type(general[-1]) is not stages[-1][0]:
                stages.pop()
            if not stages or not _fusable(general[-1], starts):
                break
            _, attribute, name = stages.pop()
            found[name] = getattr(general.pop(), attribute)
        return cls(general, SamplingParams(**found))

    def __call__(self, logits: Array, sequences: Sequences, drafts: Sequence[list[int] | None]) -> Array:
        """Return what the general processors make of the rows ``[B, K+1, V]`` of a round.

        The drafts stand in ``sequences``; None is for a sequence without a round. Each length is one call for the whole
        batch, as in ``generate``; a sequence without a row of that length lends another one and ignores the result.
        After a draft that the processors forbid nothing is asked: it will be rejected, and they need not bear what
        would follow it.
        """
        if not self.general:
            return logits
        rows, starts = logits.clone(), sequences.lengths
        last = [-1 if draft is None else len(draft) for draft in drafts]
        for length in range(min(starts), max(start + count for start, count in zip(starts, last, strict=True)) + 1):
            inside = [b for b, start in enumerate(starts) if 0 <= length - start <= last[b]]
            if not inside:
                continue
            at = [min(max(length - start, 0), count) for start, count in zip(starts, last, strict=True)]
            prefix = sequences.prefix(length)
            for b, count in enumerate(last):
                prefix[b, starts[b] + max(count, 0) :] = sequences.pad
            done = self._apply(prefix, logits[torch.arange(len(at)), at], inside)
            for b in inside:
                rows[b, at[b]] = done[b]
                draft = (drafts[b] or [])[at[b] : at[b] + 1]
                if draft and (draft[0] >= done.shape[1] or done[b, draft[0]] == -torch.inf):
                    last[b] = at[b]
        return rows

    def _apply(self, prefix: Array, scores: Array, inside: Sequence[int]) -> Array:
        for processor in self.general:
            if type(processor) is PrefixConstrainedLogitsProcessor:
                # What it calls may not bear sequences that are none, and knows rows by number.
                for b in inside:
                    alone = PrefixConstrainedLogitsProcessor(_for_row(processor, b), 1)
                    scores[b : b + 1] = alone(prefix[b : b + 1], scores[b : b + 1])
            else:
                scores = processor(prefix, scores)
        return scores

    def scores(self, rows: Array, tokens: Array) -> Array:
        """Return what all processors make of rows ``[n, V]``, where row i follows ``tokens[:len(tokens) - n + i]``."""
        seen = tokens.expand(len(rows), -1).clone()
        places = torch.arange(seen.shape[1], device=seen.device)
        seen[places >= seen.shape[1] - len(rows) + torch.arange(len(rows), device=seen.device)[:, None]] = -1
        return filter_logits(rows, **asdict(self.fused), prev_tokens=seen)


def _fusable(processor: Any, starts: Sequence[int]) -> bool:
    """Whether the processor does what the filter of its name does."""
    if isinstance(processor, transformers.RepetitionPenaltyLogitsProcessor):
        ignored = getattr(processor, "prompt_ignore_length", None)
        ignored = ignored.tolist() if isinstance(ignored, torch.Tensor) else [ignored or 0] * len(starts)
        return bool(ignored == list(starts))
    return (
        getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "filter_value", -torch.inf) == -torch.inf
    )


def _for_row(processor: Any, row: int) -> Callable[[int, Array], list[int]]:
    """Return the function of a ``PrefixConstrainedLogitsProcessor`` as it is called for a row."""
    number = row // processor._num_beams
    return lambda _, ids: processor._prefix_allowed_tokens_fn(number, ids)
