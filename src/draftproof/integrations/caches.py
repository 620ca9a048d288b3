"""The key/value caches of transformers: which can go back, and how the rows of a batch go back by different counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import cache_utils
from transformers.generation import GenerateDecoderOnlyOutput

from ..errors import ValueRangeError

# What the installed transformers calls a cache, in `forward`, in `generate` and in its output.
NAME = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"

# Layers that hold keys and values [B, heads, length, ...] and nothing else, so that rows can be moved.
_MOVABLE = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer,
    getattr(cache_utils, "DummyLayer", None),
)


def check_cache(cache: Any, model: Any, batch: int) -> None:
    """Refuse a cache that rejected drafts could not be removed from."""
    name = type(model).__name__
    if cache is None:
        raise ValueRangeError(
            f"the model must keep a key/value cache, got none from {name}: "
            "pass use_cache=True, or leave out custom_generate if the model has no such cache"
        )
    for layer in cache.layers:
        if not layer.is_croppable or (batch > 1 and type(layer) not in _MOVABLE):
            raise ValueRangeError(
                f"the cache must let rejected drafts be removed{' from each row of a batch' * (batch > 1)}, got a "
                f"{type(cache).__name__} of {name} with {type(layer).__name__}: {_remedy(layer)}"
            )


def _remedy(layer: Any) -> str:
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        return "linear-attention and state-space layers cannot go back, leave out custom_generate"
    if layer.is_croppable:
        return "pass one sequence at a time"
    return "leave out cache_implementation and cache"


@contextmanager
def recording(cache: Any) -> Iterator[None]:
    """Let layers of limited memory keep what a crop needs, and forget it afterwards as they did before."""
    forgetful = [layer for layer in cache.layers if not getattr(layer, "record_past", True)]
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer in forgetful:
            layer.record_past = False


def fed_at_once(model: Any, tokens: int) -> int:
    """Return how many tokens to feed a model that is to see ``tokens`` of one sequence.

    Two or three take a CPU longer in float32 than four (three 1.4 times as long, measured with MKL on Zen 4).
    """
    slow = 1 < tokens < 4 and model.dtype == torch.float32 and model.device.type == "cpu"
    return 4 if slow else tokens


def move_rows(cache: Any, by: Sequence[int]) -> None:
    """Move row b of every layer ``by[b]`` places towards the end; what leaves there comes in at the beginning."""
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            for row, places in enumerate(by):
                if places and states is not None:
                    states[row] = states[row].roll(places, dims=-2)
