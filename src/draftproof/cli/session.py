"""One request of ``generate``: its decoder, and the same text decoded without drafts."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..decoding import SpeculativeDecoder
from ..sampling.api import sample
from ..types import SamplingParams
from .models import Loaded
from .text import Plain


@dataclass(frozen=True)
class Session:
    """A decoder with what it was made from."""

    target: Loaded
    decoder: SpeculativeDecoder
    params: SamplingParams
    eos: list[int]

    def decode_plainly(self, ids: list[int], max_new: int) -> Plain:
        """Decode without drafts: the model's own ``generate`` at temperature 0, else ``sample`` token by token."""
        start = time.perf_counter()
        tokens = self._own_generate(ids, max_new) if self.params.temperature == 0 else self._sampled(ids, max_new)
        return Plain(tokens, time.perf_counter() - start)

    def figures(self, prompt_tokens: int, seconds: float, plain: Plain | None) -> dict[str, Any]:
        """Return what was generated with all counts and times, for JSON."""
        generation, stats = self.decoder.generation, self.decoder.stats
        tokens = generation.tokens if generation else []
        return {
            "text": self.target.tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": tokens,
            "prompt_tokens": prompt_tokens,
            "rule": self.decoder.rule,
            "seed": generation.seed if generation and self.decoder.rule != "greedy" else None,
            "seconds": seconds,
            "tokens_per_second": stats.tokens / seconds,
            "tokens_per_forward": stats.tokens_per_forward,
            "acceptance": stats.acceptance,
            "stats": asdict(stats),
            "plain": plain and plain._asdict() | {"same_tokens": tokens == plain.tokens},
        }

    def same_tokens(self, plain: Plain) -> str:
        """Return the line that says whether drafts changed the tokens, and why if they did."""
        generation = self.decoder.generation
        if generation is not None and generation.tokens == plain.tokens:
            return "same tokens as plain decoding: yes"
        line = "same tokens as plain decoding: no"
        if self.decoder.rule in ("token", "block") and self.params.temperature > 0:
            return f"{line} (rule {self.decoder.rule} keeps the law, with other draws)"
        return f"{line} (a forward of several tokens rounds unlike forwards of one: {self.target.model.dtype})"

    def _own_generate(self, ids: list[int], max_new: int) -> list[int]:
        import torch

        if max_new == 0:
            return []
        prompt = torch.tensor([ids], device=self.target.model.device)
        # -1 is no token: None would bring back the model's own.
        eos = self.eos or [-1]
        made = self.target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new,
            eos_token_id=eos,
            pad_token_id=eos[0],
            repetition_penalty=float(self.params.repetition_penalty or 1),
        )
        return list(made[0, len(ids) :].tolist())

    def _sampled(self, ids: list[int], max_new: int) -> list[int]:
        from ..integrations.transformers import CausalLM

        target, generation = CausalLM(self.target.model), self.decoder.generation
        if generation is None:
            return []
        seen = np.array(ids, dtype=np.int64)
        while len(seen) < len(ids) + max_new and not (len(seen) > len(ids) and seen[-1] in self.eos):
            row = target(seen, seen[:0])
            history: Any = row.new_tensor(seen)[None].long() if self.params.repetition_penalty is not None else None
            token = sample(row, **asdict(self.params), prev_tokens=history, seed=generation.seed, offset=len(seen))
            seen = np.append(seen, int(token[0]))
        return list(seen[len(ids) :].tolist())
