"""Drafts inside ``generate``: what ``custom_generate`` takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from .. import _checks
from ..decoding import SpeculativeDecoder, Stats
from ..decoding.draft_length import COSTS, DraftLength, LengthPolicy, draft_length
from ..decoding.rules import Rule
from ..drafters import MixDrafter, ModelDrafter
from ..drafters.base import Drafter, Noise
from ..drafters.checks import check_count, check_drafter, check_methods, is_drafter, kind_of
from ..errors import DtypeError, ShapeError, ValueRangeError
from ..rng.streams import row_seeds
from ..types import Array, Draft, SamplingParams
from .batch import Forward, Sequences
from .caches import NAME, check_cache, recording
from .causal_lm import CausalLM, model_drafter
from .lockstep import Kept, Lockstep
from .logits_processors import Processors

SampleRule = Literal["token", "block", "match"]
# About the width of a draft that pays in a batch.
_LEAD = 16


class Speculative:
    """Makes ``model.generate(..., custom_generate=Speculative())`` draft, and return what it returns without drafts.

    Everything else is said to ``generate`` as ever: sampling parameters, logits processors, stopping criteria, lengths,
    padding, caches, ``num_return_sequences``, ``return_dict_in_generate``, ``output_scores``, ``output_logits``.

    Parameters
    ----------
    drafter : "mix", Drafter, PreTrainedModel or None
        Where drafts come from: what the text so far and the model's rows suggest (``MixDrafter``), any drafter, or a
        smaller model of the same vocabulary, through ``model_drafter``, which has more arguments. None drafts nothing:
        ``generate`` with a fast sampler that has a seed.
    rule : {"token", "block", "match"}, optional
        How drafts are verified when ``do_sample=True``. None: "token" for drafts with the logits they were drawn from,
        "match" for others. ``do_sample=False`` is greedy decoding under any rule.
    k : int, "auto" or policy
        Most tokens to draft at a time; "auto" as many, none included, as are expected to pay. What forwards
        cost is measured for one row in float32 on a CPU, unless there is a seed; otherwise a table says.
    seed : int or int64 [rows], optional
        Of the draws; every call with it repeats them. None takes one from torch's generator for each row:
        ``torch.manual_seed`` fixes the output.
    streamer : BaseStreamer, optional
        Gets the prompt and each token, as from ``generate``, whose own argument ``streamer`` never arrives here.

    Attributes
    ----------
    stats : list of Stats
        Of the latest call, one for each row of the output.

    Raises
    ------
    ValueRangeError
        From the constructor: ``drafter`` or ``rule`` is none of these, or ``k`` below 0.
        From the call, before the model has run: the model is an encoder-decoder or in training mode; its cache cannot
        go back (linear attention, state space, quantized, static with a sliding window); beams or another strategy
        than greedy search and sampling; attentions or hidden states asked for; a logits processor with a state; a draft
        model with another vocabulary; ``seed`` out of range. From a round: a row without a law.
    DtypeError
        From the constructor: ``k`` is no int, "auto" or policy, ``rule`` no str, ``streamer`` lacks ``put`` or ``end``,
        ``drafter`` something that every drafter has. From the call: the class was passed, without parentheses;
        ``seed`` is no integers.
    ShapeError
        From the call: ``attention_mask`` does not fit ``input_ids``, or ``seed`` the rows.

    Notes
    -----
    **Exactness.** Given equal rows from the model: ``do_sample=False`` gives the tokens of greedy search; rule match
    those of ``sample`` at ``seed`` and ``offset`` = position in the sequence, padding not counted, the same with any
    drafter and none; token and block the law of sampling. A forward over several tokens may round unlike forwards over
    one: in float32 this hardly ever changes a token, in bfloat16 it does.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from draftproof.integrations.transformers import Speculative
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> prompt, settings = torch.tensor([[3, 5, 6]]), {"max_new_tokens": 20, "eos_token_id": None}
    >>> speculative = Speculative()
    >>> ours = model.generate(prompt, **settings, custom_generate=speculative)
    >>> bool((ours == model.generate(prompt, **settings)).all()), speculative.stats[0].tokens
    (True, 20)
    """

    def __init__(
        self,
        drafter: Literal["mix"] | Drafter | PreTrainedModel | None = "mix",
        *,
        rule: SampleRule | None = None,
        k: int | Literal["auto"] | LengthPolicy = "auto",
        seed: Any = None,
        streamer: Any = None,
    ) -> None:
        if is_drafter(drafter):
            check_drafter("drafter", drafter)
        elif not (drafter is None or drafter == "mix" or isinstance(drafter, PreTrainedModel)):
            got = repr(drafter) if isinstance(drafter, str) else kind_of(drafter)
            raise ValueRangeError(
                f"drafter must be 'mix', a drafter, a model or None, got {got}: "
                "pass an object such as NgramDrafter(), or a model that is loaded"
            )
        if rule is not None:
            _checks.one_of("rule", rule, ("token", "block", "match"))
        draft_length(k)
        if streamer is not None:
            check_methods("streamer", streamer, "put", "end")
        self.drafter, self.rule, self.k, self.seed, self.streamer = drafter, rule, k, seed, streamer
        self.stats: list[Stats] = []
        # What forwards of a model cost is measured once.
        self._lengths: WeakKeyDictionary[Any, LengthPolicy] = WeakKeyDictionary()

    # With the signature that help shows.
    @functools.wraps(__init__, assigned=())  # type: ignore[misc]
    def __new__(cls, *_: Any, **named: Any) -> Self:
        if "generation_config" in named:
            # From generate() itself, which takes a class for a function.
            raise DtypeError(
                f"custom_generate must be an object, got {kind_of(cls)}: pass {cls.__name__}(), with parentheses"
            )
        return super().__new__(cls)

    def __call__(
        self,
        model: Any,
        input_ids: Array,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **arguments: Any,
    ) -> Any:
        """Do what ``generate`` asks of ``custom_generate``; not to be called otherwise."""
        check_request(model, generation_config)
        batch, pad = len(input_ids), generation_config._pad_token_tensor
        cache: Any = arguments.get(NAME)
        check_cache(cache, model, batch)
        mask = arguments.get("attention_mask")
        columns = getattr(generation_config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
        rows = batch if mask is None else len(mask)
        if rows != batch or columns < input_ids.shape[1]:
            raise ShapeError(
                f"attention_mask must be [{batch}, {input_ids.shape[1]} or more], like input_ids, got "
                f"[{rows}, {columns}]: pass the tokenizer's mask with its ids"
            )
        starts = _starts(mask, batch, columns - input_ids.shape[1])
        processors = Processors.of(logits_processor, starts)
        sequences = Sequences(input_ids, 0 if pad is None else int(pad))
        decoders = self._decoders(model, batch, bool(generation_config.do_sample), processors.fused, stopping_criteria)
        longest = _longest(stopping_criteria, generation_config, input_ids.shape[1])
        texts = zip(decoders, input_ids.cpu().numpy(), starts, strict=True)
        generations = [decoder.stream(row[start:], longest) for decoder, row, start in texts]
        self.stats = [generation.stats for generation in generations]
        full = bool(generation_config.return_dict_in_generate)
        scores, logits = full and generation_config.output_scores, full and generation_config.output_logits
        kept = Kept(batch, bool(scores), bool(logits), sequences.pad)
        forward = Forward(model, sequences, arguments, columns, generation_config.prefill_chunk_size)
        parts = (generations, sequences, forward, processors, stopping_criteria, starts, kept, self.streamer)
        rounds = Lockstep(*parts, lead=_LEAD if self.k == "auto" else None)
        with recording(cache):
            rounds.run()
        length = max(sequences.lengths)
        if not full:
            return sequences.prefix(length)
        count = length - input_ids.shape[1]
        return GenerateDecoderOnlyOutput(
            sequences=sequences.prefix(length),
            scores=kept.scores(count),
            logits=kept.logits(count),
            **{NAME: forward.aligned()},
        )

    def _decoders(
        self, model: Any, batch: int, do_sample: bool, fused: SamplingParams, criteria: Sequence[Any]
    ) -> list[SpeculativeDecoder]:
        """Return the parts that each row is decoded with."""
        eos = [int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id]
        drafters = [self._drafter(model, do_sample) for _ in range(batch)]
        # Greedy search may need what rule greedy has not: a penalty, and drafts that share a noise which is then none.
        greedy = not do_sample and fused.repetition_penalty is None and drafters[0].noise != "shared"
        rule: Rule = "greedy" if greedy else "match"
        if do_sample:
            rule = self.rule or ("token" if drafters[0].has_q else "match")
        params = fused if do_sample else SamplingParams(0.0, repetition_penalty=fused.repetition_penalty)
        settings: dict[str, Any] = {"k": self._length(model, batch), "greedy": greedy, "rule": rule, "eos": eos}
        settings |= {} if greedy else asdict(params)
        seeds = self._seeds(batch) if do_sample else [0] * batch
        return [
            SpeculativeDecoder(drafter, model.forward, seed=seed, **settings)
            for drafter, seed in zip(drafters, seeds, strict=True)
        ]

    def _drafter(self, model: Any, do_sample: bool) -> Any:
        """Return a drafter for one sequence."""
        if self.drafter is None:
            return _NoDrafter()
        if isinstance(self.drafter, str):
            return MixDrafter()
        if isinstance(self.drafter, PreTrainedModel):
            noise: Noise = ("shared" if self.rule == "match" else "private") if do_sample else None
            return model_drafter(self.drafter, model, noise=noise)
        if isinstance(self.drafter, ModelDrafter) and isinstance(self.drafter.step, CausalLM):
            # A cache serves one sequence at a time.
            return ModelDrafter(self.drafter.step.fork(), noise=self.drafter.noise, cost=self.drafter.cost)
        return self.drafter

    def _length(self, model: Any, batch: int) -> int | LengthPolicy:
        if self.drafter is None:
            return 0
        if self.k != "auto":
            return self.k
        exact = model.dtype == torch.float32 and model.device.type == "cpu"
        costs = _costs_of_batch(COSTS["float32" if exact else "bfloat16"], batch)
        # Where rows depend on the width of a forward, or a seed asks for the same again, no clock may choose widths. In
        # a batch it would not tell whose draft took the time.
        if batch > 1 or not exact or self.seed is not None:
            return DraftLength(costs, measure=False)
        return self._lengths.setdefault(model, DraftLength(costs))

    def _seeds(self, batch: int) -> list[int]:
        seed = self.seed
        if seed is None:
            seed = torch.randint(-(2**63), 2**63 - 1, (batch,))
        rows = np.zeros((batch, 1), dtype=np.float32)
        seeds = _checks.seed(seed.cpu().numpy() if isinstance(seed, torch.Tensor) else seed, rows)
        return list((seeds if seeds.ndim else row_seeds(seeds, np.arange(batch))).tolist())


class _NoDrafter:
    """Drafts nothing and learns nothing."""

    has_q, noise = False, None

    def start(self) -> Self:
        return self

    def propose(self, context: Any, width: int, **_: Any) -> Draft:
        return Draft(np.zeros(0, dtype=np.int64), None)

    def accept(self, num_accepted: int, next_token: int, target_logits: Array) -> None:
        pass


def _costs_of_batch(costs: Sequence[float], batch: int) -> list[float]:
    """Return costs by width for each row of a batch.

    A forward costs what one over as many tokens of one row does. All rows wait for it, so a draft has to pay for all.
    """
    last = len(costs) - 1
    tokens = [batch * (width + 1) - 1 for width in range(len(costs))]
    forwards = [costs[min(w, last)] + max(0, w - last) * (costs[last] - costs[last - 1]) for w in tokens]
    return [1 + batch * (forward / forwards[0] - 1) for forward in forwards]


def check_request(model: Any, config: GenerationConfig) -> None:
    """Refuse what drafts are not for, before any work."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueRangeError(
            f"the model must be decoder-only, got the encoder-decoder {name}: leave out custom_generate"
        )
    if model.training:
        raise ValueRangeError("the model must be in evaluation mode, got training mode: call model.eval()")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueRangeError(
            f"generate() must be asked for greedy search or sampling, got {mode.value}: leave out what asks for it "
            "(num_beams, prompt_lookup_num_tokens, ...) or custom_generate"
        )
    if config.prefill_chunk_size is not None:
        check_count("prefill_chunk_size", config.prefill_chunk_size, 1)
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueRangeError(
            "output_attentions and output_hidden_states must be off, got True: leave them out, or custom_generate, "
            "since one forward serves several tokens"
        )


def _starts(mask: Array | None, batch: int, before: int) -> list[int]:
    """Return where each row's history begins: after the padding on its left."""
    if mask is None or mask.shape[1] == before:
        return [0] * batch
    return list((mask[:, before:] != 0).int().argmax(1).tolist())


def _longest(criteria: Sequence[Any], config: GenerationConfig, prompt: int) -> int:
    """Return the largest number of new tokens; there is always one, as in ``generate``."""
    ends = [c.max_length for c in criteria if type(c) is MaxLengthCriteria] or [config.max_length]
    return max(1, min(ends) - prompt)
