"""The law of what the draft/verify loop emits, and its acceptance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from draftproof import SpeculativeDecoder
from draftproof.drafters import ModelDrafter
from draftproof.testing import g_test

VOCAB = 11
P = np.array([0.4, 0.3, 0.2, 0.1, 0.0])


Q = np.array([0.1, 0.2, 0.3, 0.2, 0.2])


TARGET_LAWS = np.stack([P, P[::-1], np.roll(P, 2), np.roll(P, 1), P])


DRAFT_LAWS = np.stack([np.roll(Q, i) for i in range(5)])


# transformers issues 30608 and 28166, PR 28508: acceptance was not sum min(p, q).
# transformers issue 32867: argmax drafts verified with soft rows came out as (.75, .25) for (.8, .2).
# transformers issue 47932: the rows returned were not those the drafts were drawn from.
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafts", ["drawn", "argmax"])
def test_law_of_the_first_two_tokens(rule: str, drafts: str) -> None:
    """Seeded G-test of the 16 possible pairs in 2000 sequences at alpha = 1e-3: finds with a power of 99 % a law that
    is 0.083 of the mass away, spread evenly over the pairs. Argmax drafts verified with soft rows are 0.3 away.
    """
    rng = np.random.default_rng(11)
    runs = 2000

    def draft(prefix: list[int], k: int) -> tuple[list[int], Any]:
        tokens = [prefix[-1]]
        for _ in range(k):
            law = DRAFT_LAWS[tokens[-1]]
            tokens.append(int(law.argmax() if drafts == "argmax" else rng.choice(5, p=law)))
        return tokens[1:], DRAFT_LAWS[tokens[:-1]].astype(np.float32) if drafts == "drawn" else None

    def target(prefix: list[int], proposed: list[int]) -> Any:
        return TARGET_LAWS[[prefix[-1], *proposed]].astype(np.float32)

    counts = np.zeros((5, 5))
    accepted = 0
    for seed in range(runs):
        decoder = SpeculativeDecoder(draft, target, k=2, greedy=False, rule=rule, rows="probs", seed=seed)
        first, second = [event for event, _ in zip(decoder.stream([1], max_new=3), range(2), strict=False)]
        counts[first.token, second.token] += 1
        accepted += first.drafted
    law = TARGET_LAWS[1][:, None] * TARGET_LAWS
    fit = g_test(counts.ravel(), law.ravel(), alpha=1e-3)
    assert fit.p_value > 1e-3
    assert fit.detectable < 0.084
    if rule == "token":
        q = np.eye(5)[DRAFT_LAWS[1].argmax()] if drafts == "argmax" else DRAFT_LAWS[1]
        rate = np.minimum(TARGET_LAWS[1], q).sum()
        assert abs(accepted / runs - rate) < 4 * math.sqrt(rate * (1 - rate) / runs)


def test_acceptance_of_shared_noise() -> None:
    """Position by position the drafts that share the target's noise agree with it independently, with probability
    sum_j 1 / sum_i max(p_i / p_j, q_i / q_j): 4 standard errors of some 1200 tests are 0.05.
    """
    rng = np.random.default_rng(3)
    target = rng.normal(scale=1.5, size=VOCAB).astype(np.float32)
    drafter = (target + rng.normal(scale=0.7, size=VOCAB)).astype(np.float32)

    def constant(row: Any) -> Any:
        return lambda _, proposed: np.repeat(row[None], len(proposed) + 1, axis=0)

    p, q = (np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in (target, drafter))
    rate = sum(1 / np.maximum(p / p[j], q / q[j]).sum() for j in range(VOCAB))
    assert 0.5 < rate < 1 - np.abs(p - q).sum() / 2
    decoder = SpeculativeDecoder(
        ModelDrafter(constant(drafter), noise="shared"), constant(target), k=4, greedy=False, seed=12
    )
    decoder.generate([0], max_new=1600)
    stats = decoder.stats
    rejected = stats.rounds - stats.accepted_by_position[3] - 1
    tests = stats.accepted + rejected
    assert tests > 1200
    assert abs(stats.accepted / tests - rate) < 4 * math.sqrt(rate * (1 - rate) / tests)
