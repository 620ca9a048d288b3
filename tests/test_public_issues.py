"""Faults that were reported in public against other samplers and verifiers, as tests of the right behaviour here.

``docs/public-issues.md`` lists every report and the test that stands for it.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import draftproof as dp
from draftproof import Status, ValueRangeError, _dispatch
from draftproof._arrays import NumpyArrays
from draftproof.numerics.draws import race_keys
from draftproof.numerics.exp2 import exp2, exponent, scale
from draftproof.numerics.masses import masses, theta
from draftproof.numerics.noise import exponential, uniform
from draftproof.rng.philox import philox
from draftproof.rng.streams import accept_word
from draftproof.testing import g_test

torch = pytest.importorskip("torch")

Arrays = Any
INF, NAN = float("inf"), float("nan")
RATIO_RULES = pytest.mark.parametrize("rule", ["token", "block"])
BOTH = pytest.mark.parametrize("put", [np.asarray, lambda a: torch.from_numpy(np.array(a))], ids=["numpy", "torch"])
TESTS = Path(__file__).parent
BACKENDS = [name for name in _dispatch.BACKENDS["cpu"] if dp.backends()["sample"][name] == "available"]


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each backend of the CPU in turn the one that ``auto`` takes."""
    monkeypatch.setitem(_dispatch.BACKENDS, "cpu", (request.param,))


def rows_of(batch: int, vocab: int, seed: int = 0) -> Arrays:
    return np.random.default_rng(seed).normal(size=(batch, vocab)).astype(np.float32) * 2


def wide(row: Arrays, batch: int) -> Arrays:
    """One row for the whole batch, not copied."""
    return np.broadcast_to(row, (batch, *row.shape))


def softmax(logits: Arrays) -> Arrays:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kept(row: Any, **given: Any) -> list[int]:
    """The ids that the filters keep of one row."""
    return np.flatnonzero(dp.filter_logits(np.array([row], np.float32), **given)[0] > -INF).tolist()


def assert_law(tokens: Arrays, law: Arrays, detectable: float) -> None:
    """G-test at level 1e-6, which finds a law this far off in total variation with probability 0.99."""
    result = g_test(np.bincount(np.asarray(tokens).ravel(), minlength=len(law)), law)
    assert result.p_value > 1e-6
    assert result.detectable < detectable


def speculate(target: Arrays, draft: Arrays, batch: int, rule: str, **given: Any) -> Any:
    """Rounds of sampled drafts, one seed each, all on the same rows."""
    seed = np.arange(batch) * 31 + 7
    own = {name: value for name, value in given.items() if name != "mask"}
    tokens = np.stack(
        [
            dp.sample(wide(row, batch), seed=seed, draft_index=i, **own, mask=first(given, i, batch))
            for i, row in enumerate(draft)
        ],
        axis=1,
    )
    if "mask" in given:
        given = {**given, "mask": wide(given["mask"], batch)}
    return dp.verify(wide(target, batch), wide(draft, batch), tokens, rule=rule, seed=seed, **given)


def first(given: dict[str, Any], i: int, batch: int) -> Arrays | None:
    return wide(given["mask"][i], batch) if "mask" in given else None


# --- seeds, determinism, batch ---------------------------------------------------------------------------------------


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


# --- distribution and tails ------------------------------------------------------------------------------------------


# sglang#25106, #25133, #33423: a hash of all ones gave noise +inf and a masked token won. pytorch#48841, #4858, #50034,
# #47386, #192577: noise of 0 or -0.0 selected a token of weight zero.
def test_no_noise_lets_a_token_without_mass_win() -> None:
    words = np.array([0, 1, 2**24, 2**31, 2**32 - 2, 2**32 - 1])
    assert (uniform(NumpyArrays, words) > 0).all()
    assert (uniform(NumpyArrays, words) < 1).all()
    noise = exponential(NumpyArrays, words)
    assert (noise > 0).all()
    assert (noise < 17).all()
    lightest = np.float32(2.0**-40)
    for dead, live in itertools.product([0.0, -0.0, *noise.tolist()], noise.tolist()):
        weights = np.array([[0, lightest, 0]], np.float32)
        assert race_keys(NumpyArrays, np.array([[dead, live, dead]], np.float32), weights).argmin() == 1
    # The report's own draw, and a thousand others with one token allowed.
    mask = np.zeros((1000, 2000), bool)
    mask[np.arange(1000), np.arange(1000) * 2 % 1999] = True
    drawn = dp.sample(wide(np.zeros(2000, np.float32), 1000), mask=mask, seed=7847 + np.arange(1000), offset=12345)
    assert mask[np.arange(1000), drawn].all()


# sglang#30822: a coin rounded to 1.0 and a token of probability zero came out.
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_no_coin_lets_a_token_without_mass_out(rule: str) -> None:
    p = np.array([0, 0.3, 0, 0.7, 0], np.float32)
    q = np.full(5, 0.2, np.float32)
    coins = [0.0, 2.0**-33, 0.3, 0.5, 1 - 2.0**-24, 1.0]
    grid = np.array(list(itertools.product(coins, coins, range(5))))
    uniforms = {"uniform_accept": grid[:, :1], "uniform_sample": np.tile(grid[:, 1:2], 2)}
    n = len(grid)
    tokens = grid[:, 2:].astype(np.int64)
    for draft in (None, wide(q[None], n)):
        result = dp.verify_probs(wide(np.stack([p, p]), n), draft, tokens, rule=rule, **uniforms)
        assert set(result.tokens.ravel()) == {-1, 1, 3}


# vllm#43150, #34854, #37798, #45996: noise no smaller than 2^-24, so the tail was never drawn.
# flashinfer#2438: the tail was drawn too often.
def test_the_noise_reaches_the_tail_at_its_true_rate() -> None:
    """Of all 2^32 words, as many fall below x as a standard exponential has below x, from the smallest x on.

    A token d nats below the top wins on noise below about e^-d. The bound is the error of the noise, 3.2e-7, and
    half a step of the float32 that holds the word, each relative, and one word.
    """

    def count(x: float) -> int:
        low, high = -1, 2**32
        while high - low > 1:
            middle = (low + high) // 2
            below = exponential(NumpyArrays, np.array([middle]))[0] <= x
            low, high = (middle, high) if below else (low, middle)
        return high

    for x in (2.0 ** -np.arange(1, 32.5, 0.25)).tolist():
        expected = -math.expm1(-x) * 2**32
        assert abs(count(x) - expected) <= 1 + expected * 4e-7


# Megatron-LM#7182: bfloat16 sums stopped growing and the tail leaked in.
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_bfloat16_rows_are_summed_exactly(top_p: float) -> None:
    rows = torch.from_numpy(rows_of(2, 131_072)).bfloat16()
    inside = dp.filter_logits(rows, top_p=top_p).isfinite().numpy()
    for row, chosen in zip(rows.double().numpy(), inside, strict=True):
        order = np.lexsort((np.arange(len(row)), -row))
        above = softmax(row)[order].cumsum() - softmax(row)[order]
        # Outside the slack of 2^-21 and the rounding of the masses, the boundary is that of float64.
        assert chosen[order][above < top_p - 1e-6].all()
        assert not chosen[order][above > top_p + 1e-6].any()


MASK = np.array([[True] * 8 + [False] * 24, [False] * 10 + [True] * 22, [True, False] * 16])


# vllm#10198: the target was not filtered. vllm#42744, #42802, #31982, #38202, #38467: min-p and logit bias acted on the
# bonus token only. sglang#31214, #37134, #32922, #39253, #9127, #21275: sampled requests were verified greedily.
@pytest.mark.parametrize(
    "given",
    [{"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"min_p": 0.1}, {"mask": MASK}, {}],
    ids=["vllm#10198", "vllm#42744", "vllm#42802", "sglang#31214"],
)
@RATIO_RULES
def test_verified_tokens_have_the_law_of_sampled_ones(rule: str, given: dict[str, Any]) -> None:
    target, n = rows_of(3, 32), 60_000
    draft = target[:2] + rows_of(2, 32, 1) / 4
    result = speculate(target, draft, n, rule, **given)
    per_position = [{**given, "mask": given["mask"][i : i + 1]} if "mask" in given else given for i in range(3)]
    laws = [softmax(dp.filter_logits(target[i : i + 1], **per_position[i])[0]) for i in range(3)]
    assert_law(result.tokens[:, 0], laws[0], 0.04)
    on_row_0 = {**given, "mask": first(given, 0, n)}
    sampled = dp.sample(wide(target[0], n), seed=np.arange(n), **on_row_0)
    assert_law(sampled, laws[0], 0.04)
    if rule == "token":
        # Under token what follows an accepted draft does not depend on how that came to be accepted.
        assert_law(result.tokens[result.num_accepted >= 1, 1], laws[1], 0.06)
        assert_law(result.tokens[result.num_accepted == 2, 2], laws[2], 0.12)


# vllm#40149, sglang#10308: draft probabilities were dropped. transformers#30608, #28508, #28166: all was accepted.
@RATIO_RULES
def test_acceptance_is_the_overlap(rule: str) -> None:
    target, draft, n = rows_of(2, 16), rows_of(1, 16, 1), 200_000
    p, q = softmax(target[0]), softmax(draft[0])
    accepted = (speculate(target, draft, n, rule).num_accepted == 1).mean()
    overlap = np.minimum(p, q).sum()
    assert abs(accepted - overlap) < 5 * math.sqrt(overlap * (1 - overlap) / n)
    tokens = dp.sample(wide(draft[0], n), seed=np.arange(n) * 31 + 7, draft_index=0)[:, None]
    plain = (dp.verify(wide(target, n), None, tokens, rule=rule, seed=np.arange(n)).num_accepted == 1).mean()
    assert abs(plain - (p * q).sum()) < 5 * math.sqrt(0.25 / n)


# transformers#47932, #47961; deepseek-ai/DeepSpec#31: the q handed on was not the law that had been drawn from.
@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.6, "top_k": 7, "top_p": 0.8}], ids=["DeepSpec#31", "transformers#47932"]
)
def test_drafts_are_drawn_from_the_law_that_is_verified(given: dict[str, Any]) -> None:
    n = 50_000
    row = torch.from_numpy(rows_of(1, 16)).bfloat16()
    law = softmax(np.asarray(dp.filter_logits(row.float(), **given))[0])
    seeds = torch.arange(n)
    drawn = dp.sample(row.expand(n, 16), seed=seeds, draft_index=0, **given)
    assert torch.equal(drawn, dp.sample(row.float().expand(n, 16), seed=seeds, draft_index=0, **given))
    assert_law(drawn, law, 0.03)
    target = torch.from_numpy(rows_of(2, 16, 1)).expand(n, 2, 16)
    result = dp.verify(target, row.expand(n, 1, 16), drawn[:, None], seed=seeds, **given)
    filtered = np.asarray(dp.filter_logits(target[0, :1], **given))[0]
    assert_law(result.tokens[:, 0], softmax(filtered), 0.03)


# vllm-ascend#6685: logits were taken for probabilities.
def test_logits_do_not_pass_for_probabilities() -> None:
    logits, tokens = rows_of(2, 9)[None], np.array([[1]])
    with pytest.raises(ValueRangeError, match=r"^verify_probs: row 0 holds a negative"):
        dp.verify_probs(logits, None, tokens, seed=1)
    result = dp.verify_probs(logits, None, tokens, seed=1, check=False)
    assert (result.status[0], result.num_emitted[0]) == (Status.BAD_PROBABILITY, 0)
    with pytest.raises(ValueRangeError, match=r"^sample_probs: row 0 holds a negative"):
        dp.sample_probs(logits[0], seed=1)


# mlx-swift-lm#459, lablup/mlxcel#902, EAGLE#183, #283: accepting where the target's sample equals the draft is
# lossless, and q = 1 is right for drafts that no law was drawn from. transformers#32867: an argmax draft with a soft q.
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_deterministic_drafts_are_lossless(rule: str) -> None:
    target, n = np.log(np.float32([[0.6, 0.4], [0.1, 0.9]])), 100_000
    for draft in (0, 1):
        tokens = wide(np.array([draft]), n)
        result = dp.verify(wide(target, n), None, tokens, rule=rule, seed=np.arange(n))
        assert_law(result.tokens[:, 0], np.array([0.6, 0.4]), 0.02)
        accepted = result.num_accepted == 1
        assert abs(accepted.mean() - [0.6, 0.4][draft]) < 0.01
        assert_law(result.tokens[accepted, 1], np.array([0.1, 0.9]), 0.02)


# flashinfer#424, #425, #5201: the correction came from uniforms that had been used and a wrong normaliser.
@RATIO_RULES
def test_corrections_are_spread_over_the_residual(rule: str) -> None:
    n, half = 50_000, 500
    p, q = np.zeros((2, 1000), np.float32), np.zeros((1, 1000), np.float32)
    p[:, half:], q[:, :half] = 1, 1
    p[:, :half] = 0.25
    tokens = (np.arange(n) % half)[:, None]
    result = dp.verify_probs(wide(p, n), wide(q, n), tokens, rule=rule, seed=np.arange(n))
    rejected = result.next_token[result.num_accepted == 0]
    assert rejected.min() >= half
    assert abs(rejected.mean() - (half + 999) / 2) < 6 * half / math.sqrt(12 * len(rejected))
    assert abs(rejected.var() / (half**2 / 12) - 1) < 0.05
    u = uniform(NumpyArrays, accept_word(np.arange(n), np.zeros(n, np.int64), 0))[result.num_accepted == 0]
    assert abs(np.corrcoef(u, rejected)[0, 1]) < 6 / math.sqrt(len(rejected))


# --- edge inputs -----------------------------------------------------------------------------------------------------


# vllm#53029, #45060, #21876, #42722, #20531, GHSA-8wr5-jm2h-8r4f: an id of V came out. flashinfer#3470, #3624: the same
# for some vocabulary sizes. TensorRT-LLM#1590, #12088: invalid tokens under top-p and top-k.
@pytest.mark.parametrize("vocab", [1, 3, 7, 31, 100, 8193, 32_000, 151_936])
def test_ids_are_inside_the_vocabulary(vocab: int) -> None:
    rows = rows_of(6, vocab)
    rows[1, vocab // 2 + 1 :] = -INF
    rows[2] = NAN
    rows[3, -1] = 40.0
    expected = [0, 0, Status.NAN, 0, 0, 0]
    for given in ({}, {"top_k": 5}, {"top_p": 0.999}, {"top_k": 50, "top_p": 0.9, "temperature": 2.0}):
        result = dp.sample_with_logprobs(rows, seed=np.arange(6), check=False, **given)
        assert result.status.tolist() == expected
        assert (result.tokens[[0, 1, 3, 4, 5]] >= 0).all()
        assert result.tokens.max() < vocab
        assert (result.tokens[2], result.tokens[3]) == (-1, vocab - 1)
        assert result.tokens[1] <= vocab // 2
    target = np.repeat(rows[:, None], 2, 1)
    tokens = np.full((6, 1), vocab - 1)
    for rule in ("token", "block", "match", "greedy"):
        verified = dp.verify(target, target[:, :1], tokens, rule=rule, seed=np.arange(6), check=False)
        assert verified.status[[0, 2, 3]].tolist() == [0, Status.NAN, 0]
        assert verified.tokens.max() < vocab
        assert (verified.tokens[2] == -1).all()
    probs = np.nan_to_num(np.exp(rows))
    probs[4] = 0
    drawn = dp.sample_probs(probs, seed=np.arange(6), check=False)
    assert drawn.max() < vocab
    assert drawn[4] == -1


# The same reports: ids right up to the last can be drawn, whatever V is modulo the width of a vector.
def test_every_id_can_be_drawn() -> None:
    for vocab in (1, 2, 5, 8, 17, 33, 63, 64, 65, 129):
        rows = wide(np.zeros(vocab, np.float32), 40 * vocab)
        assert set(dp.sample(rows, seed=np.arange(40 * vocab))) == set(range(vocab))


# flashinfer#2402, #2455, #2456; vllm#26859, #23814, #26480: a NaN row brought the process down.
# vLLM's CPU sampler: NaN at id 0 made every draw 0.
@pytest.mark.parametrize("position", [0, 150, 299])
@pytest.mark.parametrize("bad", [0, 8, 15])
@BOTH
def test_a_nan_row_harms_nobody(put: Callable[[Any], Any], bad: int, position: int) -> None:
    rows = rows_of(16, 300)
    clean = np.asarray(dp.sample(put(rows), top_p=0.9, seed=3))
    rows[bad, position] = NAN
    result = dp.sample_with_logprobs(put(rows), top_p=0.9, seed=3, check=False)
    expected = clean.copy()
    expected[bad] = -1
    assert result.tokens.tolist() == expected.tolist()
    assert result.status.tolist() == [int(Status.NAN) if b == bad else 0 for b in range(16)]


# flashinfer#384: id 1061800448 from a one-hot row.
def test_a_one_hot_row() -> None:
    row = np.full((1, 32_000), -INF, np.float32)
    row[0, 12_345] = 0.0
    assert dp.sample(row, top_k=2**30, top_p=1.0, seed=1).tolist() == [12_345]
    assert dp.sample_probs((row == 0).astype(np.float32), seed=1).tolist() == [12_345]


# flashinfer#1049, #1050: top-k did not end on rows with -inf. flashinfer#1178: NaN where a lane saw only -inf.
@pytest.mark.parametrize("top_k", [1, 2, 5000])
def test_rows_that_are_mostly_minus_infinity(top_k: int) -> None:
    rows = np.full((3, 20_000), -INF, np.float32)
    rows[0, 7], rows[1, [100, 19_999]], rows[2, 4096:8192] = -5.0, [1.0, 1.0], 3.0
    result = dp.sample_with_logprobs(rows, top_k=top_k, top_p=0.99, seed=1)
    assert np.isfinite(result.logprobs).all()
    assert (rows[np.arange(3), result.tokens] > -INF).all()
    assert result.kept[0] == 1
    assert result.kept[1] == 2
    assert np.isfinite(dp.sample_with_logprobs(rows, seed=1).raw_logprobs).all()


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def check_subnormal_probabilities() -> None:
    p = np.array([[1, 0, 3]], np.int32).view(np.float32)  # in units of 2^-149
    u = (np.arange(64, dtype=np.float32)[:, None] + 0.5) / 64
    result = dp.verify_probs(wide(p, 64), None, np.zeros((64, 0), int), rule="match", uniform_sample=u)
    assert np.bincount(result.next_token).tolist() == [16, 0, 48]
    assert set(dp.sample_probs(wide(p[0], 64), seed=np.arange(64))) == {0, 2}
    tiny = np.full((8, 100), 1e-42, np.float32)
    assert (dp.sample(tiny, top_k=3, top_p=0.5, seed=1) >= 0).all()


# flashinfer#769, #774: a subnormal pivot was flushed to zero and the loop never ended.
def test_subnormal_probabilities() -> None:
    check_subnormal_probabilities()


@pytest.mark.usefixtures("flushing")
def test_subnormal_probabilities_under_flush_to_zero() -> None:
    check_subnormal_probabilities()


def integer_masses(row: Arrays, temperature: float = 1.0) -> Arrays:
    xp, rows = NumpyArrays, row[None]
    t = exponent(xp, rows, xp.max(rows), scale(xp, np.array([[temperature]], np.float32)))
    return masses(xp, exp2(xp, t))[0]


def check_top_p(row: Arrays, top_p: float) -> Arrays:
    """Assert both inequalities of the boundary in exact integers; return the kept ids."""
    mass = integer_masses(row)
    limit = max(int(theta(NumpyArrays, np.array([[top_p]], np.float32), np.array([[mass.sum()]]))[0, 0]), 1)
    ids = np.array(kept(row, top_p=top_p))
    order = np.lexsort((np.arange(len(row)), -row))
    assert set(ids) == set(order[: len(ids)])
    assert mass[ids].sum() >= limit
    assert mass[ids].sum() - mass[order[len(ids) - 1]] < limit
    return ids


# flashinfer#2202, #3623: the crossing token was dropped.
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_the_crossing_token_is_kept(top_p: float) -> None:
    for seed, vocab in itertools.product(range(4), (1, 2, 50, 5000)):
        row = rows_of(1, vocab, seed)[0]
        check_top_p(row, top_p)
        check_top_p(np.round(row), top_p)


# The vllm#33538 family, #44470; vllm-ascend#13847; FreeToken#345: an approximate pivot kept wrong sets.
def test_peaked_and_flat_rows_are_exact() -> None:
    peaks = rows_of(1, 131_072)[0] * 0.01
    peaks[[50_000, 100_000]] = 100.0, 99.5
    assert check_top_p(peaks, 0.5).tolist() == [50_000]
    assert len(check_top_p(np.zeros(131_072, np.float32), 0.5)) == 65_536
    check_top_p(rows_of(1, 131_072)[0] * 0.01, 0.5)
    rows = np.stack([peaks, np.zeros_like(peaks)])
    together = dp.filter_logits(np.concatenate([rows, rows_of(63, 131_072)[:, :131_072]])[:2], top_p=0.5)
    np.testing.assert_array_equal(together, np.concatenate([dp.filter_logits(r[None], top_p=0.5) for r in rows]))


# flashinfer#2325: a row with k >= V left its histogram to the next.
def test_rows_without_top_k_do_not_disturb_others() -> None:
    rng, rows = np.random.default_rng(1), rows_of(64, 300)
    k = np.where(rng.random(64) < 0.5, rng.integers(300, 400, 64), rng.integers(1, 20, 64))
    together = dp.filter_logits(rows, top_k=k)
    for b in range(64):
        np.testing.assert_array_equal(together[b], dp.filter_logits(rows[b : b + 1], top_k=int(k[b]))[0])
        assert (together[b] > -INF).sum() == min(k[b], 300)


# flashinfer#879: padding was accepted, four tokens came out of three.
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_padding_is_not_a_draft(rule: str) -> None:
    p = np.abs(rows_of(12, 9)).reshape(3, 4, 9)
    q = np.abs(rows_of(9, 9, 1)).reshape(3, 3, 9)
    tokens = q.argmax(-1)
    for b in range(3):
        tokens[b, b:], q[b, b:], p[b, b + 1 :] = -1, 0, 0
    for seed in range(20):
        result = dp.verify_probs(p, q, tokens, rule=rule, seed=seed)
        assert (result.num_accepted <= [0, 1, 2]).all()
        np.testing.assert_array_equal(result.num_emitted, result.num_accepted + 1)
        assert ((result.tokens >= 0).sum(1) == result.num_emitted).all()


# TensorRT-LLM#19485: the sum never reached the threshold and the index was V.
@pytest.mark.parametrize("top_p", [0.9999999, 1 - 2**-24, 0.999999])
def test_top_p_just_below_one(top_p: float) -> None:
    row = rows_of(1, 151_936)
    drawn = dp.sample(wide(row[0], 40), top_p=top_p, seed=np.arange(40))
    assert drawn.min() >= 0
    assert drawn.max() < 151_936
    dropped = softmax(row[0])[dp.filter_logits(row, top_p=top_p)[0] == -INF].sum()
    assert dropped <= 1 - top_p + 2**-20


# TensorRT-LLM (sanitize_top_k), llama-cpp-python#220, Megatron-LM#2456: top_k = 0 masked the row, meant 1, or was off.
@pytest.mark.parametrize("top_k", [0, -1, 40, 41, 2**30])
def test_top_k_off(top_k: int) -> None:
    rows = rows_of(8, 40)
    for form in (top_k, np.full(8, top_k), np.full(8, top_k, np.int32)):
        np.testing.assert_array_equal(dp.filter_logits(rows, top_k=form), rows)
        np.testing.assert_array_equal(dp.sample(rows, top_k=form, seed=1), dp.sample(rows, seed=1))


# lmms-eval#1277, vllm#1748, transformers#19839: top_p = 0 was refused, or gave NaN; it keeps the top token.
def test_top_p_zero_keeps_the_top_token() -> None:
    rows = rows_of(50, 40)
    np.testing.assert_array_equal(dp.sample(rows, top_p=0, seed=1), rows.argmax(1))
    np.testing.assert_array_equal(dp.sample(rows, top_p=np.zeros(50), seed=1), rows.argmax(1))
    np.testing.assert_array_equal(dp.filter_logits(rows, top_p=1), rows)
    with pytest.raises(ValueRangeError, match=r"^top_p must be in \[0, 1\]"):
        dp.sample(rows, top_p=-0.1, seed=1)


# TensorRT-LLM#15715, #16287; vllm#3063, #2937, #890, #22180, #1623, #4151; transformers#11267, #26843: a tiny
# temperature gave infinities and NaN.
@pytest.mark.parametrize("temperature", [1e-2, 1e-5, 1e-12, 1e-30, 1e-38])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_tiny_temperatures(dtype: Any, temperature: float) -> None:
    rows = (rows_of(20, 300) * 5000).astype(dtype)
    result = dp.sample_with_logprobs(rows, temperature=temperature, seed=1)
    np.testing.assert_array_equal(result.tokens, rows.argmax(1))
    assert (result.logprobs == 0).all()
    target = np.repeat(rows[:, None], 2, 1)
    for rule in ("token", "block", "match"):
        tokens = rows.argmax(1)[:, None]
        verified = dp.verify(target, target[:, :1], tokens, rule=rule, temperature=temperature, seed=1)
        assert (verified.num_accepted == 1).all()


# vllm#5404, FreeToken#471: greedy split ties. vllm#37238, vllm-ascend#16396, #16430: in a mixed batch a greedy row gave
# the rank of the candidate instead of its id.
def test_greedy_is_the_lowest_id_in_every_path() -> None:
    rows = np.zeros((4, 100), np.float32)
    rows[:, [60, 61, 99]] = 2.0
    temperature = np.array([0.0, 1.0, 0.0, 1.0])
    for given in ({}, {"top_k": 2}, {"top_k": 3, "top_p": 0.9}, {"top_k": np.array([1, 50, 3, 0])}, {"min_p": 0.9}):
        for seed in range(5):
            drawn = dp.sample(rows, temperature=temperature, seed=seed, **given)
            assert drawn[[0, 2]].tolist() == [60, 60]
            assert dp.sample(rows, temperature=0, seed=seed, **given).tolist() == [60] * 4
        target = np.repeat(rows[:, None], 2, 1)
        tokens = np.full((4, 1), 60)
        result = dp.verify(target, None, tokens, temperature=temperature, seed=1, **given)
        assert result.tokens[[0, 2]].tolist() == [[60, 60], [60, 60]]
    assert set(dp.sample(wide(rows[0], 50), top_k=1, seed=np.arange(50))) == {60, 61, 99}


# vllm#50979: ties at the k-th place were kept or cut by the size of the batch.
def test_ties_at_the_kth_place_are_kept_in_every_batch() -> None:
    rows = torch.from_numpy(rows_of(64, 2000)).bfloat16()
    together = dp.filter_logits(rows, top_k=50).numpy()
    for b in range(0, 64, 9):
        row = rows[b].float().numpy()
        np.testing.assert_array_equal(together[b], dp.filter_logits(rows[b : b + 1], top_k=50).numpy()[0])
        np.testing.assert_array_equal(together[b] > -INF, row >= np.sort(row)[-50])
    assert ((together > -INF).sum(1) > 50).any()


# FlashInfer: an int32 top_k beside int64 indices was read as int64. Its chain kernel's counters were lost unless int32.
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"])
@BOTH
def test_integers_of_any_width(put: Callable[[Any], Any], dtype: str) -> None:
    rows = rows_of(6, 40)
    target, tokens = np.repeat(rows[:, None], 3, 1), np.tile(np.arange(2), (6, 1))
    given = {"top_k": np.array([0, 1, 2, 3, 5, 100]), "offset": np.arange(6)}
    length = np.array([0, 1, 2, 0, 1, 2])
    expected = dp.verify(
        put(target), None, put(tokens), seed=1, num_draft_tokens=put(length), **{k: put(v) for k, v in given.items()}
    )
    narrow = {name: put(value.astype(dtype)) for name, value in given.items()}
    length = put(length.astype(dtype))
    before = {name: value.tolist() for name, value in narrow.items()}
    result = dp.verify(put(target), None, put(tokens), seed=1, num_draft_tokens=length, **narrow)
    assert [a.tolist() for a in result] == [a.tolist() for a in expected]
    assert before == {name: value.tolist() for name, value in narrow.items()}
    assert length.tolist() == [0, 1, 2, 0, 1, 2]


# --- features dropped under speculation ------------------------------------------------------------------------------


# vllm#30846, #34497, #17876, #44727; llama.cpp#27972: log-probabilities were those of logits changed in place.
@BOTH
def test_logprobs_after_verification_are_those_without(put: Callable[[Any], Any]) -> None:
    target, tokens = rows_of(24, 60).reshape(6, 4, 60), np.random.default_rng(1).integers(0, 60, (6, 3))
    given = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3}
    before = target.copy()
    logits = put(target)
    verified = dp.verify(logits, None, put(tokens), rule="match", seed=put(np.arange(6)), offset=9, **given)
    np.testing.assert_array_equal(np.asarray(logits), before)
    row, tau = np.arange(6), np.asarray(verified.num_accepted)
    for i in range(4):
        history = tokens[:, :i]
        at = (row, np.full(6, i))
        plain = dp.sample_with_logprobs(
            put(before[at]), seed=put(np.arange(6)), offset=9 + i, prev_tokens=put(history), **given
        )
        after = dp.sample_with_logprobs(
            logits[:, i], seed=put(np.arange(6)), offset=9 + i, prev_tokens=put(history), **given
        )
        emitted = i <= tau
        assert np.asarray(verified.tokens)[emitted, i].tolist() == np.asarray(plain.tokens)[emitted].tolist()
        assert plain.logprobs.tolist() == after.logprobs.tolist()
        assert (np.asarray(plain.logprobs) < 0).all()


# vllm#7252, #5203, #10913, #42775, #38174: draft and target vocabularies that differ by padding.
@RATIO_RULES
def test_padding_of_a_vocabulary_is_never_emitted_and_the_rest_is_reachable(rule: str) -> None:
    n = 20_000
    target = np.zeros((2, 6), np.float32)
    for draft_vocab in (4, 9):
        draft = np.zeros((1, draft_vocab), np.float32)
        result = speculate(target, draft, n, rule)
        assert_law(result.tokens[:, 0], np.ones(6), 0.03)
        assert (result.status & Status.INVALID_DRAFT_ID == 0).all()


# vllm#8320: the bonus and the corrected token were confused.
@pytest.mark.parametrize("rule", ["token", "block", "match", "greedy"])
def test_bonus_and_correction_come_from_their_own_rows(rule: str) -> None:
    target = np.full((1, 4, 9), -50, np.float32)
    target[0, np.arange(4), [5, 6, 7, 8]] = 50
    for tokens, emitted in (([5, 6, 7], [5, 6, 7, 8]), ([5, 0, 7], [5, 6, -1, -1]), ([0, 6, 7], [5, -1, -1, -1])):
        assert dp.verify(target, None, np.array([tokens]), rule=rule, seed=1).tokens[0].tolist() == emitted
    assert dp.verify(target, None, np.array([[5, 6, 7]]), rule=rule, num_draft_tokens=1, seed=1).tokens[0, 1] == 6


# flashinfer#3122: the filtered law, its normaliser and the sample, wanted from one pass.
def test_what_is_said_about_a_draw_is_its_law() -> None:
    row, n = rows_of(1, 12), 100_000
    given = {"temperature": 0.8, "top_k": 8, "top_p": 0.9}
    result = dp.sample_with_logprobs(wide(row[0], n), seed=np.arange(n), **given)
    law = softmax(dp.filter_logits(row, **given)[0])
    assert_law(result.tokens, law, 0.02)
    np.testing.assert_allclose(np.exp(result.logprobs), law[result.tokens], rtol=4e-6)
    np.testing.assert_allclose(np.exp(result.raw_logprobs), softmax(row[0])[result.tokens], rtol=4e-6)
    assert (result.kept == (law > 0).sum()).all()


# --- zeros -----------------------------------------------------------------------------------------------------------


@functools.cache
def coins() -> Arrays:
    """Pairs of uniforms on a grid that holds both ends."""
    values = [0.0, *((np.arange(16) + 0.5) / 16).tolist(), 1 - 2.0**-24, 1.0]
    return np.array(list(itertools.product(values, values)), np.float32)


# A residual without mass gave token 0, V - 1 or an id that was never set (vLLM, SGLang, FlashInfer).
# jaymody/speculative-sampling#5: p = q made the residual NaN.
@RATIO_RULES
def test_equal_laws_are_never_rejected(rule: str) -> None:
    p = np.array([0, 0.5, 0.25, 0.25, 0], np.float32)
    n = len(coins())
    uniforms = {"uniform_accept": coins()[:, :1], "uniform_sample": np.tile(coins()[:, 1:], 2)}
    for token in (1, 2, 3):
        rows = wide(p[None], n), wide(np.stack([p, p]), n)
        result = dp.verify_probs(rows[1], rows[0], wide(np.array([token]), n), rule=rule, **uniforms)
        assert (result.num_accepted == 1).all()
        assert (result.status == 0).all()
        assert set(result.next_token) == {1, 2, 3}


# TensorRT-LLM (acceptDraftTokensKernel): p = q = 0 made NaN, which was accepted. transformers: the same raises in
# multinomial. NVIDIA-NeMo/Automodel#3166: `<=` accepts p = 0 when the uniform is 0.
@RATIO_RULES
def test_a_draft_without_target_mass_is_never_accepted(rule: str) -> None:
    p = np.array([0, 0.5, 0.5, 0], np.float32)
    n = len(coins())
    uniforms = {"uniform_accept": coins()[:, :1], "uniform_sample": np.tile(coins()[:, 1:], 2)}
    for q in (p, np.array([0.25] * 4, np.float32), None):
        draft = None if q is None else wide(q[None], n)
        for token in (0, 3):
            tokens = wide(np.array([token]), n)
            result = dp.verify_probs(wide(np.stack([p, p]), n), draft, tokens, rule=rule, **uniforms)
            assert (result.num_accepted == 0).all()
            assert set(result.next_token) == {1, 2}
            expected = Status.OFF_SUPPORT | Status.RESIDUAL_FALLBACK if q is p else 0
            assert (result.status == expected).all()


# FlashInfer's dual-pivot sampler: probabilities that do not sum to 1 were biased to the last token.
@pytest.mark.parametrize("factor", [2.0**-100, 0.37, 3.0, 1000.0, 2.0**90])
def test_the_scale_of_probabilities_does_not_matter(factor: float) -> None:
    p = softmax(rows_of(1, 20)[0]).astype(np.float32)
    u = ((np.arange(1000) + 0.5) / 1000)[:, None]
    seed = np.arange(1000)

    def run(scaled: Arrays) -> list[Arrays]:
        rows, none = wide(scaled, 1000), np.zeros((1000, 0), int)
        drawn = dp.verify_probs(rows[:, None], None, none, rule="match", uniform_sample=u).next_token
        return [drawn, dp.sample_probs(rows, seed=seed)]

    for plain, scaled in zip(run(p), run((p * np.float32(factor)).astype(np.float32)), strict=True):
        # A power of two changes no bit; other factors move each boundary by rounding only.
        assert (plain != scaled).sum() <= (0 if math.log2(factor).is_integer() else 1)


# pytorch in transformers#22979, #23088: multinomial drew tokens of probability zero, on 0.16% of the steps.
@BOTH
def test_tokens_without_mass_are_never_drawn(put: Callable[[Any], Any]) -> None:
    rng = np.random.default_rng(0)
    probs = rng.random((2000, 200)).astype(np.float32) * (rng.random((2000, 200)) < 0.1)
    probs[:, 100] = 0.5
    drawn = np.asarray(dp.sample_probs(put(probs), seed=1))
    assert (probs[np.arange(2000), drawn] > 0).all()
    with np.errstate(divide="ignore"):
        logits = np.log(probs)
    drawn = np.asarray(dp.sample(put(logits), seed=1))
    assert (probs[np.arange(2000), drawn] > 0).all()


# --- filters, as reported against transformers -----------------------------------------------------------------------


# transformers#18976, #18984: top-p kept one token too many where the sum met the threshold.
def test_top_p_at_an_exact_sum() -> None:
    assert kept(np.log([0.5, 0.3, 0.1, 0.1]), top_p=0.8) == [0, 1]
    assert kept(np.log([0.5, 0.25, 0.125, 0.125]), top_p=0.75) == [0, 1]


# transformers#24453: every filter keeps a token.
def test_every_filter_keeps_a_token() -> None:
    rows = rows_of(40, 30)
    for given in ({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-30}, {"min_p": 1}, {"top_k": 1, "top_p": 0, "min_p": 1}):
        assert ((dp.filter_logits(rows, **given) > -INF).sum(1) == 1).all()


# transformers#2302, #2303; transformers.js#1062: the penalty raised negative logits, and acted once per occurrence.
# transformers#48846: ids beyond the vocabulary. transformers#37625, #36642: a prompt that is not to be penalised.
def test_repetition_penalty() -> None:
    rows = np.array([[2.0, -2.0, 0.0, 4.0]], np.float32)
    filtered = dp.filter_logits(rows, repetition_penalty=2.0, prev_tokens=np.array([[0, 1, 2, 0, 0, -1, 4, 10**9]]))
    assert filtered.tolist() == [[1.0, -4.0, 0.0, 4.0]]
    # What is penalised is what the caller hands over: here the generated part alone.
    prompt, generated = [0, 1], [3]
    filtered = dp.filter_logits(rows, repetition_penalty=2.0, prev_tokens=np.array([(prompt + generated)[2:]]))
    assert filtered.tolist() == [[2.0, -2.0, 0.0, 2.0]]


# transformers#29769, #42655: speculation for one sequence only.
def test_sequences_of_a_batch_end_where_they_end() -> None:
    target = np.full((4, 4, 9), -50, np.float32)
    target[:, np.arange(4), [1, 2, 3, 4]] = 50
    tokens = np.array([[1, 2, 3], [1, 2, 0], [1, 0, 3], [0, 2, 3]])
    assert dp.verify(target, None, tokens, seed=1).num_accepted.tolist() == [3, 2, 1, 0]


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_names_tests_that_exist() -> None:
    table = (TESTS.parent / "docs" / "public-issues.md").read_text()
    defined = {
        name for file in TESTS.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    named = set(re.findall(r"`(test_\w+)`", table))
    assert named <= defined
    here = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.M)) - {
        "test_the_table_names_tests_that_exist"
    }
    assert here <= named
    # Each row has a test or a reason.
    rows = [line for line in table.splitlines() if re.match(r"\| \d+ ", line)]
    assert len(rows) == 95
    assert [row for row in rows if not re.search(r"`test_|not yet: |not offered: ", row)] == []
