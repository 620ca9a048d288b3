"""A batch whose sequences grow by different counts: their tokens, and the model's forward over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..types import Array
from .caches import NAME, fed_at_once, move_rows

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class Sequences:
    """Token ids as ``generate`` keeps them: in each row a prompt with its padding, the new tokens, then padding.

    ``prompt`` is ``[B, T]``; ``lengths`` counts a row's tokens, the padding before them included.
    """

    def __init__(self, prompt: Array, pad: int) -> None:
        self.prompt, self.pad = prompt, pad
        self.lengths = [prompt.shape[1]] * len(prompt)
        self._ids = prompt.cpu().numpy().astype(np.int64)

    def write(self, row: int, tokens: Sequence[int]) -> None:
        """Put ``tokens`` after the first ``lengths[row]`` of a row, and padding after them; the length stays."""
        start, room = self.lengths[row], self._ids.shape[1]
        end = start + len(tokens)
        if end > room:
            self._ids = np.pad(self._ids, ((0, 0), (0, room + len(tokens))), constant_values=self.pad)
        self._ids[row, start:end] = tokens
        self._ids[row, end:] = self.pad

    def prefix(self, length: int) -> Array:
        """Return a copy of the first ``length`` columns."""
        return torch.from_numpy(self._ids[:, :length].copy()).to(self.prompt.device)

    def latest(self, drafted: int) -> Array:
        """Return of each row the last token and the ``drafted`` columns after it."""
        places = np.array(self.lengths)[:, None] + np.arange(-1, drafted)
        ids = np.take_along_axis(self._ids, np.minimum(places, self._ids.shape[1] - 1), axis=1)
        return torch.from_numpy(ids).to(self.prompt.device)


class Forward:
    """The model over what its cache does not hold: the prompts once, then each round a token and its drafts.

    All rows of the cache end in the same column, so that one forward serves them and a sliding window covers the right
    tokens: after a round each row is moved until its rejected drafts are beyond that column, where the cache is
    cropped. What this leaves at the beginning of a row is masked, as padding is.

    Parameters
    ----------
    model
        The model ``generate`` was called on.
    sequences
        The tokens, drafts included.
    arguments
        What ``generate`` prepared for the model's forward, the cache among it.
    columns : int
        How many columns the attention mask has, or had before ``generate`` dropped it.
    chunk : int or None
        Most tokens of a prompt to feed at once.
    """

    def __init__(
        self, model: Any, sequences: Sequences, arguments: dict[str, Any], columns: int, chunk: int | None
    ) -> None:
        self.cache = arguments[NAME]
        self.vocab: int = model.get_input_embeddings().num_embeddings
        self._model, self._sequences, self._arguments = model, sequences, arguments
        self._columns, self._chunk = columns, chunk
        self._mask: Array | None = arguments.get("attention_mask")
        # A cache that was passed may hold more than the prompt repeats.
        self._before = columns - sequences.prompt.shape[1]
        self._held = int(self.cache.get_seq_length())
        self._first = True

    @property
    def room(self) -> int | None:
        """How many drafts there is room for, where that is limited."""
        if self._first and self._has("inputs_embeds"):
            return 0
        if not self.cache.is_compileable:
            return None
        return max(0, int(self.cache.get_max_length()) - (self._columns if self._first else self._held + 1))

    def __call__(self, drafted: Sequence[int]) -> Array:
        """Return float32 logits ``[B, max(drafted) + 1, V]`` after each sequence and after each of its drafts."""
        self._width = width = max(drafted)
        if not self._first and len(drafted) == 1 and self.room is None:
            self._width = width = fed_at_once(self._model, width + 1) - 1
        if self._first:
            self._feed_chunks()
            ids = self._sequences.prefix(self._sequences.prompt.shape[1] + width)
            fed = self._columns - self._held + width
        else:
            ids, fed = self._sequences.latest(width), width + 1
        self._end = self._held + fed
        logits = self._run(ids, fed, width + 1, self._extended(drafted))
        self._first = False
        return logits.to(ids.device, torch.float32)

    def rewind(self, emitted: Sequence[int]) -> None:
        """Drop from the cache what was fed and not ``emitted``; the sequences have their new lengths.

        The last token of a sequence is not in the cache: it is fed next.
        """
        end = max(self._sequences.lengths) + self._before - 1
        if len(emitted) > 1 and self.cache.is_compileable:
            # A sequence that has come to its end may fill the cache; the others need a column.
            end = min(end, int(self.cache.get_max_length()) - 1)
        surplus = self._end - end
        moves = [self._width + 1 - count - surplus for count in emitted]
        if any(moves):
            move_rows(self.cache, moves)
        self.cache.crop(-surplus)
        self._held = end

    def aligned(self) -> Any:
        """Return the cache with each token in the column it has in the sequences, None if that cannot be had."""
        moves = [length - max(self._sequences.lengths) for length in self._sequences.lengths]
        if any(moves):
            if self.cache.is_compileable:
                return None
            move_rows(self.cache, moves)
        return self.cache

    def _run(self, ids: Array, fed: int, rows: int, extended: dict[str, Any]) -> Array:
        inputs = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=fed, is_first_iteration=self._first, **self._arguments | extended
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = rows
        return self._model(**inputs, return_dict=True).logits[:, -rows:]

    def _feed_chunks(self) -> None:
        if self._chunk is None or self._has("inputs_embeds"):
            return
        names = [name for name in ("attention_mask", "position_ids", *_TOKEN_TYPES) if self._has(name)]
        for stop in range(self._held + self._chunk, self._columns, self._chunk):
            cut = {name: self._arguments[name][..., :stop] for name in names}
            self._run(self._sequences.prefix(stop - self._before), self._chunk, 1, cut)
            self.cache.crop(0)
            self._held = stop

    def _has(self, name: str) -> bool:
        return self._arguments.get(name) is not None

    def _extended(self, drafted: Sequence[int]) -> dict[str, Any]:
        """Return what has a column for each token, with those of this forward."""
        extended = {}
        lengths = np.array(self._sequences.lengths)[:, None]
        if self._has("position_ids"):
            # What is fed after the last draft of a row must not count on, beyond what the model has positions for.
            steps = np.minimum(np.arange(self._width + 1), np.array(drafted)[:, None])
            steps += lengths - self._sequences.prompt.shape[1]
            extended["position_ids"] = self._after_prompt("position_ids", torch.from_numpy(steps))
        for name in filter(self._has, _TOKEN_TYPES):
            extended[name] = self._after_prompt(name, torch.zeros(len(lengths), self._width + 1, dtype=torch.int64))
        shift = lengths * 0 if self._first else self._held + 1 - self._before - lengths
        if self._mask is not None or shift.any():
            extended["attention_mask"] = self._shifted_mask(shift)
        return extended

    def _after_prompt(self, name: str, steps: Array) -> Array:
        """Return the columns of this forward: ``steps`` from the prompt's last one, which belongs to its last token."""
        prompt = self._arguments[name]
        # Token types go on as text, whose type is the last one only where there is no other kind.
        last = prompt[..., -1:] * (not name.endswith("mm_token_type_ids"))
        new = last + steps.to(prompt.device)
        return torch.cat([prompt.expand(*new.shape[:-1], -1), new[..., 1:]], -1) if self._first else new

    def _shifted_mask(self, shift: Any) -> Array:
        places = torch.from_numpy(np.arange(self._end) - shift).to(self._sequences.prompt.device)
        mask = torch.ones_like(places[:, : self._columns]) if self._mask is None else self._mask
        known = mask.gather(1, places.clamp(0, self._columns - 1))
        return torch.where(places < self._columns, known, 1) * (places >= 0)
