"""The contestants of ``compare`` and their runs: plain decoding, prompt lookup and drafts, all in ``generate()``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..decoding import Stats
from ..drafters.base import Drafter
from ..types import SamplingParams
from .models import Loaded, encode
from .prompts import Prompt

PLAIN, OWN = "plain", "draftproof"
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


@dataclass(frozen=True)
class Run:
    """One prompt, decoded once. ``stats`` is what draftproof counted itself, None for the others.

    Of its ``seconds`` the model was at work for ``inside``. ``forwards`` are counted at the model, for everybody alike,
    and so is what the others ``drafted``; ``accepted`` are the tokens beyond one a forward (a draft that ends the text
    counts as the token of its forward). ``same`` as plain decoding, None if sampled.
    """

    kind: str
    prompt: int
    repetition: int
    arm: str
    seconds: float
    inside: float
    tokens: int
    forwards: int
    drafted: int
    accepted: int
    same: bool | None
    stats: Stats | None


class Forwards:
    """Counts the forwards of a model, the tokens fed to it and its seconds by a clock."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.reset()
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        model.register_forward_hook(self._time)

    def reset(self) -> None:
        """Start from nothing."""
        self.count = self.fed = 0
        self.seconds = self._begun = 0.0

    def _count(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        self.count += 1
        self.fed += named["input_ids"].shape[1]
        self._begun = self._clock()

    def _time(self, model: Any, arguments: Any, output: Any) -> None:
        self.seconds += self._clock() - self._begun


class Contest:
    """Runs prompts through every contestant, one after the other, so that all meet the same machine."""

    def __init__(
        self,
        target: Loaded,
        drafter: Drafter,
        width: int | Literal["auto"],
        rule: Literal["token", "block", "match"] | None,
        lookups: list[int],
        params: SamplingParams,
        max_new: int,
        seed: int,
        clock: Literal["cpu", "wall"],
    ) -> None:
        from ..integrations.transformers import Speculative

        self._target, self._seed, self._clock = target, seed, CLOCKS[clock]
        self._forwards = Forwards(target.model, CLOCKS[clock])
        self._speculative = Speculative(drafter, k=width, rule=rule)
        self.arms: dict[str, dict[str, Any]] = {PLAIN: {}}
        self.arms |= {f"lookup {n}": {"prompt_lookup_num_tokens": n} for n in lookups}
        self.arms[OWN] = {"custom_generate": self._speculative}
        self._greedy = params.temperature == 0
        chosen = {name: value for name, value in asdict(params).items() if value is not None}
        # transformers has a top_k of 50 unless it is turned off.
        chosen["top_k"] = max(0, params.top_k or 0)
        self._options = {"max_new_tokens": max_new, "do_sample": not self._greedy} | ({} if self._greedy else chosen)

    def warm_up(self) -> None:
        """Decode a little with everybody: first forwards are slow."""
        ids = encode(self._target.tokenizer, "one two one two", raw=True)
        for arm in self.arms:
            self._generate(arm, ids, 0, max_new_tokens=4)

    def run(self, prompt: Prompt, repetitions: int, of_lookup: int | None = None) -> list[Run]:
        """Decode a prompt ``repetitions`` times with each contestant, ``of_lookup`` by lookup; who begins changes."""
        ids = encode(self._target.tokenizer, prompt.text, raw=False)
        runs = list[Run]()
        for repetition in range(repetitions):
            left_out = of_lookup is not None and repetition >= of_lookup
            names = [PLAIN, OWN] if left_out else list(self.arms)
            turn, outputs = (prompt.number + repetition) % len(names), dict[str, list[int]]()
            for arm in names[turn:] + names[:turn]:
                outputs[arm], seconds = self._generate(arm, ids, repetition)
                tokens, forwards = len(outputs[arm]), self._forwards.count
                # The first forward has the prompt in it, every other one token before the drafts.
                stats = self._speculative.stats[0] if arm == OWN else None
                drafted = stats.drafted if stats else self._forwards.fed - len(ids) - (forwards - 1)
                counts = (tokens, forwards, drafted, tokens - forwards)
                times = seconds, self._forwards.seconds
                runs.append(Run(prompt.kind, prompt.number, repetition, arm, *times, *counts, same=None, stats=stats))
            if self._greedy:
                latest = runs[-len(names) :]
                runs[-len(names) :] = [replace(run, same=outputs[run.arm] == outputs[PLAIN]) for run in latest]
        return runs

    def _generate(self, arm: str, ids: list[int], repetition: int, **changes: Any) -> tuple[list[int], float]:
        import torch

        prompt = torch.tensor([ids])
        eos = self._target.model.generation_config.eos_token_id
        options = self._options | {"pad_token_id": eos[0] if isinstance(eos, list) else eos} | self.arms[arm] | changes
        torch.manual_seed(self._seed + repetition)
        self._forwards.reset()
        start = self._clock()
        output = self._target.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        seconds = self._clock() - start
        return output[0, len(ids) :].tolist(), seconds
