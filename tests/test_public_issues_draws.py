"""Faults reported against other samplers: seeds, determinism, batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

import draftproof as dp
from draftproof._arrays import NumpyArrays
from draftproof.numerics.noise import uniform
from draftproof.rng.philox import philox
from draftproof.rng.streams import accept_word
from public_issues import (
    BACKENDS,
    BOTH,
    INF,
    RATIO_RULES,
    Arrays,
    assert_law,
    kept,
    rows_of,
    softmax,
    speculate,
    torch,
    wide,
)
from public_issues import backend as backend  # of every test here

# --- seeds, determinism, batch ----------------------------------------------------------------------------------------


# flashinfer#4861, #2345, #1104: only the first of [B] seeds was used. TensorRT-LLM#17172, #17599: the seed was ignored
# when batched, or the draw depended on the engine's step. TensorRT-LLM#1742: seeds by batch index instead of request.
# vllm#17498, #17509: ranks disagreed. 1Cat-vLLM#656: wrong rows beyond two sequences.
@BOTH
def test_a_draw_belongs_to_its_row_and_seed(put: Callable[[Any], Any]) -> None:
    rows, seed, offset = rows_of(16, 300), np.arange(16) * 7, np.arange(16) % 3
    target, draft = rows.reshape(4, 4, 300), rows_of(12, 300, 1).reshape(4, 3, 300)
    tokens = draft.argmax(-1)

    def run(order: Any) -> list[Arrays]:
        streams = {"seed": put(seed[order]), "offset": put(offset[order])}
        four = [i for i in order if i < 4]
        verified = dp.verify(
            put(target[four]), put(draft[four]), put(tokens[four]), seed=put(seed[four]), offset=put(offset[four])
        )
        return [np.asarray(dp.sample(put(rows[order]), **streams)), np.asarray(verified.tokens)]

    together = run(np.arange(16))
    order = np.random.default_rng(3).permutation(16)
    torch.rand(5), np.random.rand(5), dp.sample(put(rows), seed=99)  # noqa: NPY002
    again, permuted = run(np.arange(16)), run(order)
    for a, b, c, taken in zip(together, again, permuted, (order, [i for i in order if i < 4]), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[taken], c)
    for i in range(4):
        alone = run(np.array([i]))
        assert [a[i].tolist() for a in together] == [a[0].tolist() for a in alone]
    assert len(set(dp.sample(put(np.zeros((16, 300), np.float32)), seed=put(seed)).tolist())) > 12


# TensorRT-LLM#19487: unseeded requests shared a stream. vllm#50440: one seed gave every prompt the same noise.
@pytest.mark.parametrize("seed", [None, 5], ids=["TensorRT-LLM#19487", "vllm#50440"])
def test_rows_without_seeds_of_their_own_differ(seed: Any) -> None:
    rows = np.zeros((64, 1000), np.float32)
    assert len(set(dp.sample(rows, seed=dp.random_seeds(64) if seed is None else seed))) > 50
    if isinstance(seed, int):
        # Rows 0 and 1 are independent: 4 x 4 outcomes, equally likely.
        pairs = np.array([dp.sample(np.zeros((2, 4), np.float32), seed=s) for s in range(1500)])
        assert_law(pairs @ [4, 1], np.ones(16), 0.13)


# TensorRT-Edge-LLM#211: the same noise at every step. ROCm/aiter#2035: the offset did not advance.
def test_steps_are_independent() -> None:
    row, seed = np.zeros((50_000, 8), np.float32), np.arange(50_000)
    steps = [dp.sample(wide(row[0], 50_000), seed=seed, offset=t) for t in (41, 42)]
    assert_law(steps[0] * 8 + steps[1], np.ones(64), 0.03)
    assert_law(dp.sample(wide(row[0], 50_000), seed=3, offset=np.arange(50_000)), np.ones(8), 0.03)


# vllm#51226: a seed was ignored beside an unseeded row. vllm#6034, #6038, #10863: speculation ignored seeds.
def test_a_seeded_row_beside_unseeded_ones() -> None:
    rows, target = rows_of(3, 500), rows_of(9, 500).reshape(3, 3, 500)
    tokens = target[:, :2].argmax(-1)
    drawn, verified = set(), set()
    for _ in range(5):
        seed = dp.random_seeds(3)
        seed[1] = 77
        drawn.add(int(dp.sample(rows, seed=seed)[1]))
        verified.add(tuple(dp.verify(target, None, tokens, seed=seed).tokens[1].tolist()))
    assert drawn == {int(dp.sample(rows[1:2], seed=77)[0])}
    assert verified == {tuple(dp.verify(target[1:2], None, tokens[1:2], seed=77).tokens[0].tolist())}


# vllm#13196: the uniforms collapsed to 0 and 1 and the seed had no effect.
def test_accept_uniforms_are_uniform() -> None:
    seed = np.arange(20_000)
    u = uniform(NumpyArrays, accept_word(seed, seed * 0 + 5, 1))
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    assert len(set(u.tolist())) > 19_900


# vllm#54282, #47386; local-inference-lab/vllm#205: the draft's noise was the correction's, too.
@RATIO_RULES
def test_drafts_and_corrections_share_no_noise(rule: str) -> None:
    target = rows_of(2, 16)
    result = speculate(target, -target[:1], 200_000, rule)
    assert_law(result.tokens[:, 0], softmax(target[0]), 0.011)
    assert 0.05 < (result.num_accepted == 0).mean() < 0.95


# vllm#59786: the winner at seed + 1 was the winner at seed, shifted by one.
def test_neighbouring_seeds_are_independent() -> None:
    # Several blocks of 64 ids, which share noise of their own.
    drawn = dp.sample(wide(np.zeros(512, np.float32), 20_001), seed=np.arange(20_001))
    assert_law((drawn[1:] - drawn[:-1]) % 512, np.ones(512), 0.08)
    law = 1 / np.arange(1, 65)
    zipf = dp.sample(wide(np.log(law).astype(np.float32), 40_000), seed=np.arange(40_000))
    assert_law(zipf, law, 0.04)


# vllm#54143, #51367: a stateless generator whose bits do not depend on the backend. The vectors are Random123's.
def test_the_generator_is_stateless_and_the_same_everywhere() -> None:
    ones = 0xFFFFFFFF
    vectors = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((ones,) * 4, (ones, ones)): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    }
    for (counter, key), words in vectors.items():
        for form in (int, lambda word: np.array([word]), torch.tensor):
            made = philox(tuple(map(form, counter)), tuple(map(form, key)))
            assert [int(np.asarray(word).item()) for word in made] == [*words]


# sglang#35697: a seeded row's token changed when another row of the batch turned a filter on.
# SGLang: top-k and top-p of a row meant something else beside a row with min-p.
def test_a_filter_of_one_row_leaves_the_others_alone() -> None:
    row = np.log([0.4, 0.3, 0.2, 0.1])
    rows = np.tile(row, (2, 1)).astype(np.float32)
    both = dp.filter_logits(rows, top_k=2, top_p=0.5, min_p=np.array([0, 0.9]))
    alone = dp.filter_logits(rows[:1], top_k=2, top_p=0.5)
    assert kept(row, top_k=2, top_p=0.5) == [0]
    np.testing.assert_array_equal(both[:1], alone)
    rows = rows_of(40, 200)
    plain = dp.sample(rows, seed=np.arange(40))
    for given in ({"top_k": [0, 5]}, {"top_p": [1, 0.3]}, {"min_p": [0, 0.5]}, {"temperature": [1, 0]}):
        mixed = {name: np.tile(value, 20) for name, value in given.items()}
        np.testing.assert_array_equal(dp.sample(rows, seed=np.arange(40), **mixed)[::2], plain[::2])


# sglang#38565, flashinfer#5034: sums in another order in every call.
@BOTH
def test_calls_and_thread_counts_do_not_matter(put: Callable[[Any], Any]) -> None:
    rows, seed = put(rows_of(4, 20_000)), put(np.arange(4))
    given = {"temperature": 0.8, "top_k": 1000, "top_p": 0.95}
    before, seen = torch.get_num_threads(), set()

    def set_threads(count: int) -> None:
        torch.set_num_threads(count)
        if "cpu" in BACKENDS:
            dp.set_num_threads(count)

    try:
        for count in (1, 2, 1, 2, 1):
            set_threads(count)
            filtered = np.asarray(dp.filter_logits(rows, **given))
            seen.add((filtered.tobytes(), *dp.sample(rows, seed=seed, **given).tolist()))
    finally:
        set_threads(before)
    assert len(seen) == 1


# sglang#33695, #33699: min-p with a seed was refused.
def test_min_p_with_a_seed() -> None:
    rows = rows_of(64, 50)
    given = {"min_p": np.linspace(0, 1, 64), "seed": np.arange(64)}
    drawn = dp.sample(rows, **given)
    assert (dp.filter_logits(rows, min_p=given["min_p"])[np.arange(64), drawn] > -INF).all()
    np.testing.assert_array_equal(drawn, dp.sample(rows, **given))


# ROCm/aiter#2035: the prefix scan was wrong. Integer masses, so that the exact answer is known.
def test_the_scan_is_exact() -> None:
    rng = np.random.default_rng(0)
    p = rng.integers(0, 1000, (50, 777)).astype(np.float32)
    u = rng.random((50, 1)).astype(np.float32)
    drawn = dp.verify_probs(p[:, None], None, np.zeros((50, 0), int), rule="match", uniform_sample=u).next_token
    for row, point, token in zip(p.astype(int).tolist(), u[:, 0].tolist(), drawn.tolist(), strict=True):
        prefix = list(itertools.accumulate(row))
        assert token == next(i for i, s in enumerate(prefix) if s > Fraction(point) * prefix[-1])


# flashinfer#2132, #2432: seed and offset were constants of a captured graph.
def test_seed_and_offset_tensors_are_read_when_called() -> None:
    rows, seed, offset = torch.zeros(1, 10_000), torch.tensor([1]), torch.tensor([5])
    drawn = []
    for _ in range(4):
        drawn.append(int(dp.sample(rows, seed=seed, offset=offset)))
        assert drawn[-1] == int(dp.sample(rows, seed=int(seed), offset=int(offset)))
        offset += 1
    seed += 1
    assert len({*drawn, int(dp.sample(rows, seed=seed, offset=offset))}) == 5
