"""Faults reported against other samplers and verifiers: the law of what comes out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import draftproof as dp
from draftproof import Status, ValueRangeError
from draftproof._arrays import NumpyArrays
from draftproof.numerics.draws import race_keys
from draftproof.numerics.noise import exponential, uniform
from draftproof.rng.streams import accept_word
from public_issues import BOTH, RATIO_RULES, Arrays, assert_law, first, rows_of, softmax, speculate, torch, wide
from public_issues import backend as backend  # of every test here

# --- distribution and tails -------------------------------------------------------------------------------------------


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


# --- features dropped under speculation -------------------------------------------------------------------------------


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


# --- zeros ------------------------------------------------------------------------------------------------------------


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
