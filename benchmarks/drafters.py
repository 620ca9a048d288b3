"""What a round of each table drafter and of the adaptive length costs: `python -m benchmarks.drafters`.

Processor time of `propose` and `accept` together, medians in microseconds, as a Markdown table. The tables are filled
by 8,192 tokens of context; each round brings three more tokens and fresh logits of 49,152.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from draftproof import SamplingParams
from draftproof.decoding import DraftLength
from draftproof.drafters import CorpusDrafter, MixDrafter, NgramDrafter, RecyclingDrafter, SuffixDrafter

VOCAB, CONTEXT, STEP, ROUNDS = 49152, 8192, 3, 400
CASES = (("text", 8), ("text", 63), ("copy", 63))
OPTIONS: dict[str, Any] = {"params": SamplingParams(), "seed": 0}


def tokens_of(kind: str, size: int) -> np.ndarray:
    """Zipf tokens with repeats of what came before, or one passage again and again."""
    rng = np.random.default_rng(0)
    if kind == "copy":
        return np.resize(rng.integers(VOCAB, size=3000), size)
    tokens: list[int] = []
    while len(tokens) < size:
        if tokens and rng.random() < 0.5:
            at = int(rng.integers(len(tokens)))
            tokens += tokens[at : at + int(rng.integers(3, 30))]
        else:
            tokens += (rng.zipf(1.3, 8) % VOCAB).tolist()
    return np.array(tokens[:size])


def rows_for(token: int, noise: np.ndarray) -> np.ndarray:
    rows = noise.copy()
    rows[-1, token] += 9
    return rows


def time_drafter(make: Callable[[np.ndarray], Any], kind: str, width: int) -> float:
    tokens = tokens_of(kind, CONTEXT + STEP * (ROUNDS + 1))
    tokens.flags.writeable = False
    noise = np.random.default_rng(1).standard_normal((STEP, VOCAB)).astype(np.float32)
    state, times = make(tokens).start(), []
    for at in range(100, len(tokens) - STEP, STEP):
        rows = rows_for(tokens[at + STEP - 1], noise)
        begin = time.thread_time_ns()
        state.propose(tokens[:at], width, **OPTIONS, offset=at)
        state.accept(STEP - 1, int(tokens[at + STEP - 1]), rows)
        times.append(time.thread_time_ns() - begin)
    return float(np.median(times[-ROUNDS:])) / 1e3


def time_policy(width: int) -> float:
    rng, times = np.random.default_rng(2), []
    state = DraftLength().start(SuffixDrafter(), "greedy")
    for _ in range(ROUNDS):
        acceptance = rng.uniform(0.5, 1, width).tolist()
        begin = time.thread_time_ns()
        state.limit(width)
        state.cut(acceptance)
        state.record(width, width // 2, 0.1 * state.costs[width])
        times.append(time.thread_time_ns() - begin)
    return float(np.median(times)) / 1e3


DRAFTERS: dict[str, Callable[[np.ndarray], Any]] = {
    "n-gram": lambda _: NgramDrafter(),
    "suffix": lambda _: SuffixDrafter(),
    "corpus": lambda tokens: CorpusDrafter(np.array_split(tokens[:CONTEXT][::-1], 16)),
    "recycling": lambda _: RecyclingDrafter(),
    "mix": lambda _: MixDrafter(),
}


def main() -> None:
    """Print the table."""
    print("| | " + " | ".join(f"{kind}, {width} asked for" for kind, width in CASES) + " |")
    print("|---|" + "---|" * len(CASES))
    for name, make in DRAFTERS.items():
        print(f"| {name} | " + " | ".join(f"{time_drafter(make, *case):.0f}" for case in CASES) + " |", flush=True)
    print("| policy | " + " | ".join(f"{time_policy(width):.0f}" for _, width in CASES) + " |")


if __name__ == "__main__":
    main()
