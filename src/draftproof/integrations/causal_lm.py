"""Causal language models of transformers as targets and as drafters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ..decoding.cache import reusable
from ..decoding.callbacks import Ids
from ..drafters import ModelDrafter
from ..drafters.base import Noise
from ..drafters.checks import kind_of
from ..errors import DtypeError, ShapeError, ValueRangeError
from ..types import Array
from .caches import NAME

# Layers of limited memory keep everything until the next crop, so one is due every so many tokens. A draft model must
# start anew when a draft is rejected that was fed just before such a crop: the larger, the rarer.
_TRIM = 64


class CausalLM:
    """A causal language model as ``target_step`` of a ``SpeculativeDecoder``, with its key/value cache.

    A call feeds what the cache does not hold yet: the prompt once, then each round the drafts and the one token before
    them. Rejected drafts are cropped from the cache; nothing is computed twice. The cache serves one sequence at a
    time: it starts anew when a call does not go on from the one before.

    Parameters
    ----------
    model
        A decoder-only ``PreTrainedModel`` in evaluation mode, on any device and of any dtype, whose cache can be
        cropped (full or sliding-window attention).

    Raises
    ------
    ValueRangeError
        The model is in training mode, its cache cannot be cropped, or a prompt id is outside its vocabulary.
    ShapeError
        The prompt is empty.
    DtypeError
        ``model`` is none.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from draftproof import SpeculativeDecoder
    >>> from draftproof.drafters import NgramDrafter
    >>> from draftproof.integrations.transformers import CausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> decoder = SpeculativeDecoder(NgramDrafter(), CausalLM(model))
    >>> decoder.generate(torch.tensor([1, 2, 3, 1, 2]), max_new=6).shape
    torch.Size([6])
    """

    def __init__(self, model: Any) -> None:
        if isinstance(model, type) or not hasattr(model, "get_input_embeddings"):
            remedy = "load one, as with AutoModelForCausalLM.from_pretrained(name).eval()"
            raise DtypeError(f"model must be a PreTrainedModel of transformers, got {kind_of(model)}: {remedy}")
        if model.training:
            raise ValueRangeError("model must be in evaluation mode, got training mode: call model.eval()")
        self.model = model
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self._cache: Any
        self._held: Ids
        # Layers of limited memory can go back to where they were cropped last, no further.
        self._floor: int
        self._forget()

    def fork(self) -> CausalLM:
        """Return one on the same model with a cache of its own, for another sequence at the same time."""
        return type(self)(self.model)

    def __call__(self, prefix: Any, proposed: Any) -> Array:
        """Return float32 logits ``[len(proposed) + 1, V]`` on the model's device."""
        rows = len(proposed) + 1
        ids = np.concatenate([self._known(prefix), self._drafts(proposed)])
        keep = reusable(self._held, ids, rows)
        try:
            if keep < self._floor:
                self._forget()
                keep = 0
            if keep < len(self._held) or keep - self._floor >= _TRIM:
                self._cache.crop(keep - len(self._held))
                self._floor = keep if any(self._cache.is_sliding) or any(self._cache.is_linear) else 0
            logits = self._forward(ids[keep:], rows)
        except BaseException:
            # Some layers may have been fed and others not.
            self._forget()
            raise
        self._held = ids
        return logits

    def _forward(self, ids: Ids, rows: int) -> Array:
        feed = torch.tensor(ids[None], device=self.model.device)
        with torch.no_grad():
            logits = self.model(input_ids=feed, use_cache=True, logits_to_keep=rows, **{NAME: self._cache}).logits
        if not self._cache.is_croppable:
            name = type(self.model).__name__
            raise ValueRangeError(
                f"model must have a cache that can be cropped, got {name}: pass one with attention only"
            )
        return logits[0].float()

    def _forget(self) -> None:
        self._cache = DynamicCache(config=self.model.config)
        self._cache.activate_past_recording()
        self._held = np.zeros(0, dtype=np.int64)
        self._floor = 0

    def _known(self, prefix: Any) -> Ids:
        ids = _int64(prefix)
        if not len(ids):
            raise ShapeError("prompt_ids must have at least one token for a causal model, got none: start with its bos")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise ValueRangeError(
                f"prompt_ids must be in [0, {self.vocab_size}), the model's vocabulary, got {wrong}: use its tokenizer"
            )
        return ids

    def _drafts(self, proposed: Any) -> Ids:
        ids = _int64(proposed)
        # A draft outside the vocabulary is rejected whatever follows; the model only has to get through.
        return np.where((ids >= 0) & (ids < self.vocab_size), ids, 0)


def model_drafter(
    draft_model: Any,
    target_model: Any,
    *,
    noise: Noise = "private",
    cost: float | None = None,
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
) -> ModelDrafter:
    """Return a drafter that runs ``draft_model``, after checking that it speaks the language of ``target_model``.

    Parameters
    ----------
    draft_model, target_model
        Decoder-only ``PreTrainedModel``; only the draft model is kept.
    noise : {"private", "shared", None}
        As in ``ModelDrafter``.
    cost : float, optional
        As in ``ModelDrafter``. None: the draft model's number of parameters by the target's.
    tokenizer, draft_tokenizer
        The tokenizers of target and draft. With both, every token must have the same id in both and the models may
        differ in unused ids. Without them the vocabulary sizes must be equal.

    Raises
    ------
    ValueRangeError
        Tokenizers or vocabulary sizes differ; the draft model is in training mode; wrong ``noise`` or ``cost``.
    """
    if tokenizer is not None and draft_tokenizer is not None:
        check_tokenizers(tokenizer, draft_tokenizer)
    else:
        sizes = [model.get_input_embeddings().num_embeddings for model in (target_model, draft_model)]
        if sizes[0] != sizes[1]:
            raise ValueRangeError(
                f"draft_model must have the target's vocabulary of {sizes[0]} ids, got {sizes[1]}: "
                "pass both tokenizers if the models differ only in unused ids"
            )
    if cost is None:
        cost = draft_model.num_parameters() / target_model.num_parameters()
    return ModelDrafter(CausalLM(draft_model), noise=noise, cost=cost)


def check_tokenizers(target: Any, draft: Any) -> None:
    """Raise ``ValueRangeError`` unless both tokenizers map the same tokens to the same ids."""
    ids, draft_ids = target.get_vocab(), draft.get_vocab()
    if ids == draft_ids:
        return
    token = min(token for token in ids.keys() | draft_ids.keys() if ids.get(token) != draft_ids.get(token))
    raise ValueRangeError(
        f"the draft's tokenizer must be the target's, got {len(draft_ids)} tokens against {len(ids)}: "
        f"{token!r} is {draft_ids.get(token)} in the draft and {ids.get(token)} in the target, take another draft"
    )


def _int64(ids: Any) -> Ids:
    return np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids, dtype=np.int64)
