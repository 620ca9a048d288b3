"""Values of parameters, uniforms, seeds and offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import draftproof as dp
from draftproof._arrays import NumpyArrays
from draftproof.numerics.noise import uniform
from draftproof.rng.streams import accept_word
from edges import (
    EVERY,
    HISTORY,
    INF,
    NAN,
    ROWS,
    RULES,
    SEEDS,
    System,
    check_layout,
    make_round,
    penalised,
    pick,
    same,
    tensor,
)

# --- values of parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "repetition_penalty"])
@EVERY
def test_off_values(system: System, name: str) -> None:
    """The ways of writing off are one and the same, as numbers and in arrays, beside rows where the filter is on."""
    offs: list[Any] = {
        "top_k": [0, -1, 40, 41, 2**30, 10**30],
        "top_p": [1, 1.0],
        "min_p": [0],
        "repetition_penalty": [1],
    }[name]
    on = {"top_k": 2, "top_p": 0.2, "min_p": 0.5, "repetition_penalty": 3.0}[name]
    given = {"prev_tokens": np.tile(np.arange(20), (5, 1)), "seed": SEEDS, "temperature": 1.5}
    plain = system("sample_with_logprobs", ROWS, **given)
    alone = system("sample_with_logprobs", ROWS, **given, **{name: on})
    for off in offs:
        same(system("sample_with_logprobs", ROWS, **given, **{name: off}), plain)
        if off < 2**62:
            mixed = system("sample_with_logprobs", ROWS, **given, **{name: np.array([off, on, off, on, off])})
            same(pick(mixed, [0, 2, 4]), pick(plain, [0, 2, 4]))
            same(pick(mixed, [1, 3]), pick(alone, [1, 3]))


@EVERY
def test_numbers_and_arrays_are_the_same(system: System) -> None:
    """A number, a 0-D array, a list and a [B] array of any width are rounded to float32 alike."""
    number = {"temperature": 0.7, "top_k": 10, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    streams = {"seed": SEEDS, "prev_tokens": HISTORY}
    expected = system("sample_with_logprobs", ROWS, **number, offset=3, **streams)
    forms: list[Callable[[Any], Any]] = [np.array, lambda v: [v] * 5, lambda v: np.full(5, v)]
    forms += [lambda v: np.full(5, v, np.int32 if isinstance(v, int) else np.float32)]
    for form in forms:
        made = {name: form(value) for name, value in number.items()}
        same(system("sample_with_logprobs", ROWS, **made, offset=form(3), **streams), expected)


@EVERY
def test_greedy_rows_beside_others(system: System) -> None:
    """Temperature 0 is the lowest id among the maxima, row by row, whatever the other rows and filters do."""
    rows = np.random.default_rng(4).integers(-2, 3, (8, 40)).astype(np.float32)
    temperature = np.array([0, 1, 0, 0.5, 0, 2, 0, 1])
    seeds = np.arange(8) * 77
    for given in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 1, "top_p": 0.1, "min_p": 1.0}):
        result = system("sample_with_logprobs", rows, temperature=temperature, seed=seeds, **given)
        greedy = temperature == 0
        assert result.tokens[greedy].tolist() == rows[greedy].argmax(1).tolist()
        assert (result.logprobs[greedy] == 0).all()
        assert (result.kept[greedy] == 1).all()
        for b in np.flatnonzero(~greedy):
            alone = system(
                "sample_with_logprobs", rows[b : b + 1], temperature=temperature[b], seed=seeds[b : b + 1], **given
            )
            same(pick(result, [b]), alone)
        filtered = system("filter_logits", rows, temperature=temperature, **given)
        for b in np.flatnonzero(greedy):
            top = rows[b].argmax()
            assert np.flatnonzero(filtered[b] > -INF).tolist() == [top]
            assert filtered[b, top] == rows[b, top]


@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_temperature_zero_verifies_greedily(system: System, rule: str) -> None:
    """With both sides at temperature 0 every rule emits the argmax of every position, beside rows that do not."""
    target, draft, tokens, seed, offset = make_round()
    target = np.round(target)  # ties
    temperature = np.where(np.arange(24) % 2, 0.0, 1.0)
    given = {"rule": rule, "seed": seed, "offset": offset}
    result = system("verify", target, None, tokens, temperature=temperature, **given)
    greedy = system("verify_greedy", target, tokens)
    odd = temperature == 0
    same(pick(result, odd), pick(greedy, odd))
    if rule != "greedy":
        same(pick(result, ~odd), pick(system("verify", target, None, tokens, **given), ~odd))
    # A greedy draft against a greedy target: accepted where the argmaxes agree.
    drafts = draft.argmax(-1)
    both = system("verify", target, draft, drafts, temperature=0, **given)
    same(both._replace(status=greedy.status), system("verify_greedy", target, drafts))


@EVERY
def test_greedy_operations_agree(system: System) -> None:
    target, draft, tokens, seed, _ = make_round()
    result = system("verify_greedy", target, tokens)
    same(result, system("verify", target, draft, tokens, rule="greedy", seed=seed))
    same(result, system("verify_probs", np.exp(target), np.exp(draft), tokens, rule="greedy"))
    same(result, system("verify_greedy", np.exp(target), tokens))
    for b in range(24):
        choices = target[b].argmax(1).tolist()
        tau = next((i for i in range(3) if tokens[b, i] != choices[i]), 3)
        assert result.tokens[b, : tau + 1].tolist() == choices[: tau + 1]
        assert result.num_accepted[b] == tau


@EVERY
def test_top_k_one_draws_among_ties(system: System) -> None:
    rows = np.tile(np.float32([1, 5, 5, -0.0, 5, 2]), (60, 1))
    drawn = system("sample", rows, top_k=1, seed=np.arange(60))
    assert set(drawn) == {1, 2, 4}
    assert set(system("sample", rows, top_k=1, temperature=0, seed=np.arange(60))) == {1}


@EVERY
def test_boundaries(system: System) -> None:
    """Kept sets worked out by hand."""

    def kept(row: list[float], **given: Any) -> list[int]:
        return np.flatnonzero(system("filter_logits", np.array([row], np.float32), **given)[0] > -INF).tolist()

    logs = np.log([0.5, 0.3, 0.1, 0.1]).tolist()
    assert kept([3, 2, 2, 2, 1, 0], top_k=2) == [0, 1, 2, 3]
    assert kept([0, -0.0, -1], top_k=1) == [0, 1]
    assert kept([-0.0, 0, -1], top_p=0) == [0]
    assert kept([1, 2, 2], top_p=0) == [1]
    assert kept(logs, top_p=0.8) == [0, 1]
    assert kept(logs, top_p=0.81) == [0, 1, 2]
    assert kept(logs, top_p=0.5) == [0]
    assert kept(logs, top_p=1) == [0, 1, 2, 3]
    assert kept(logs, min_p=0.19) == [0, 1, 2, 3]
    assert kept(logs, min_p=0.3) == [0, 1]
    assert kept([1, 2, 2, 0], min_p=1) == [1, 2]
    # top-p counts the mass of the top-k survivors: .5 of .8 is .625.
    assert kept(logs, top_k=2, top_p=0.62) == [0]
    assert kept(logs, top_k=2, top_p=0.63) == [0, 1]
    # Tokens without mass stay unless a filter removes them; those at -inf never do.
    assert kept([0, -200, -INF]) == [0, 1]
    assert kept([0, -200, -INF], top_k=5) == [0, 1]
    assert kept([0, -200, -INF], top_p=0.999) == [0]
    assert kept([INF, 5, INF]) == [0, 1, 2]
    assert kept([INF, 5, INF], min_p=1e-9) == [0, 2]
    assert kept([INF, 5, INF], top_p=0.9) == [0, 2]
    assert kept([INF, 5, INF], top_p=0.4) == [0]


@EVERY
def test_infinite_logits_are_a_limit(system: System) -> None:
    """Only the +inf tokens have mass, equally."""
    rows = np.tile(np.float32([1, INF, 80, INF, -INF]), (60, 1))
    for given in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.1}, {"temperature": 1e-8}, {"temperature": 50}):
        result = system("sample_with_logprobs", rows, seed=np.arange(60), **given)
        assert set(result.tokens) == {1, 3}
        np.testing.assert_allclose(result.logprobs, np.log(0.5), rtol=1e-6)
    assert set(system("sample", rows, temperature=0, seed=np.arange(60))) == {1}
    target = np.tile(rows[:, None], (1, 3, 1))
    for rule in RULES:
        result = system("verify", target, None, np.tile([1, 0], (60, 1)), rule=rule, seed=np.arange(60))
        assert set(result.tokens[:, 0]) <= {1, 3}
        assert set(result.num_accepted) <= {0, 1}


@EVERY
def test_logprobs(system: System) -> None:
    """``logprobs`` under the filtered law, ``raw_logprobs`` of the logits as given, ``kept`` as in filter_logits."""
    rows = np.random.default_rng(6).normal(size=(16, 40)).astype(np.float32) * 3
    given: dict[str, Any] = {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.4}
    given["prev_tokens"] = np.tile(np.arange(10), (16, 1))
    result = system("sample_with_logprobs", rows, seed=np.arange(16), **given)
    same(result.tokens, system("sample", rows, seed=np.arange(16), **given))
    filtered = system("filter_logits", rows, **given).astype(np.float64)
    assert result.kept.tolist() == (filtered > -INF).sum(1).tolist()
    # What is kept is one division in float32.
    penalty = given["repetition_penalty"]
    divided = np.array([penalised(row, penalty, list(range(10))) for row in rows]) / np.float32(0.7)
    assert (filtered[filtered > -INF] == divided[filtered > -INF]).all()
    for logits, logprobs in ((filtered, result.logprobs), (rows.astype(np.float64), result.raw_logprobs)):
        exact = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        np.testing.assert_allclose(logprobs, exact[np.arange(16), result.tokens], rtol=3e-7, atol=3e-6)


# --- match is sampling ------------------------------------------------------------------------------------------------


@EVERY
def test_match_is_sampling_position_by_position(system: System) -> None:
    """With every filter, mask and penalty: rule match emits what ``sample`` draws at offset + i, bit for bit."""
    target, draft, tokens, seed, offset = make_round(24, 3, 40)
    rng = np.random.default_rng(9)
    filters: dict[str, Any] = {
        "temperature": rng.choice([0, 0.3, 1, 2], 24),
        "top_k": rng.choice([0, 1, 3, 20], 24),
        "top_p": rng.choice([0.3, 0.9, 1], 24),
        "min_p": rng.choice([0, 0.1], 24),
        "repetition_penalty": rng.choice([0.8, 1, 1.5], 24),
    }
    history = rng.integers(-1, 45, (24, 6))
    mask = rng.random(target.shape) < 0.8
    # Drafts that are right to a random depth.
    right = np.zeros((24, 4), int)
    for i in range(4):
        before = np.concatenate([history, right[:, :i]], 1)
        given = {**filters, "prev_tokens": before, "mask": mask[:, i]}
        right[:, i] = system("sample", target[:, i], seed=seed, offset=offset + i, **given)
    depth = rng.integers(0, 4, 24)
    tokens = np.where(np.arange(3) < depth[:, None], right[:, :3], tokens)
    given = {**filters, "prev_tokens": history, "mask": mask, "seed": seed, "offset": offset}
    for draft_rows in (draft, None, np.full_like(draft, NAN)):
        result = system("verify", target, draft_rows, tokens, rule="match", **given)
        tau = np.where(tokens == right[:, :3], 1, 0).cumprod(1).sum(1)
        assert result.num_accepted.tolist() == tau.tolist()
        assert result.next_token.tolist() == right[np.arange(24), tau].tolist()
        check_layout(result, tokens)


@EVERY
def test_match_of_probabilities_is_sample_probs(system: System) -> None:
    target, _, tokens, seed, offset = make_round(48)
    probs = np.exp(target)
    right = np.stack([system("sample_probs", probs[:, i], seed=seed, offset=offset + i) for i in range(4)], 1)
    tokens[:24] = right[:24, :3]
    result = system("verify_probs", probs, None, tokens, rule="match", seed=seed, offset=offset)
    tau = (tokens == right[:, :3]).cumprod(1).sum(1)
    assert result.num_accepted.tolist() == tau.tolist()
    assert result.next_token.tolist() == right[np.arange(48), tau].tolist()
    # Given uniforms, it is the inverse CDF of each at its position.
    u = np.random.default_rng(1).random((48, 4)).astype(np.float32)
    cdf = probs.astype(np.float64).cumsum(-1)
    drawn = (cdf <= u[..., None] * cdf[..., -1:]).sum(-1)
    result = system("verify_probs", probs, None, drawn[:, :3], rule="match", uniform_sample=u)
    assert (result.num_accepted == 3).all()
    assert result.next_token.tolist() == drawn[:, 3].tolist()


# --- uniforms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
@EVERY
def test_uniforms_not_given_come_from_the_seed(system: System, rule: str) -> None:
    target, draft, tokens, seed, offset = make_round()
    rows = np.exp(target), np.exp(draft)
    given = {"rule": rule, "seed": seed, "offset": offset}
    from_seed = system("verify_probs", *rows, tokens, **given)
    words = [accept_word(seed, offset, i) for i in range(3)]
    accept = np.stack([uniform(NumpyArrays, word) for word in words], 1)
    same(system("verify_probs", *rows, tokens, uniform_accept=accept, **given), from_seed)
    # Without drafts there is nothing to accept.
    none = {"uniform_sample": np.full((24, 1), 0.5), "rule": rule}
    bonus = system("verify_probs", rows[0][:, :1], rows[1][:, :0], tokens[:, :0], **none)
    same(bonus, system("verify_probs", rows[0][:, :1], rows[1][:, :0], tokens[:, :0], seed=5, **none))
    # Both given: no seed is read.
    both = {"uniform_accept": accept, "uniform_sample": np.random.default_rng(0).random((24, 4)), "rule": rule}
    same(system("verify_probs", *rows, tokens, **both), system("verify_probs", *rows, tokens, seed=5, **both))


@pytest.mark.parametrize("rule", ["token", "block"])
@EVERY
def test_ends_of_the_uniforms(system: System, rule: str) -> None:
    """0 accepts only what has mass, 1 counts as the number below it, and no token without mass comes out."""
    p = np.array([[[0.0, 0.5, 0.5, 0.0]] * 2], np.float32)
    q = np.array([[[0.25] * 4]], np.float32)
    for token in range(4):
        for u in (0.0, 1 - 2**-24, 1.0):
            uniforms = {"uniform_accept": np.full((1, 1), u), "uniform_sample": np.full((1, 2), u)}
            result = system("verify_probs", p, q, np.array([[token]]), rule=rule, **uniforms)
            assert result.num_accepted[0] == (p[0, 0, token] > 0)
            assert result.next_token[0] == (1 if u == 0 else 2)
    # A draft of the target itself is never rejected.
    for u in (0.0, 1.0):
        uniforms = {"uniform_accept": np.full((1, 1), u), "uniform_sample": np.full((1, 2), u)}
        result = system("verify_probs", np.repeat(q, 2, 1), q, np.array([[3]]), rule=rule, **uniforms)
        assert result.num_accepted[0] == 1


# --- seeds and offsets ------------------------------------------------------------------------------------------------


@EVERY
def test_forms_of_a_seed(system: System) -> None:
    """An int is taken mod 2^64; int64, uint64 and 0-D arrays hold the same 64 bits."""
    row = np.zeros((1, 997), np.float32)
    for seed in (0, 7, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 12345678901234567890):
        expected = system("sample", row, seed=seed)
        bits = seed % 2**64
        unsigned = np.array([bits], np.uint64)
        forms = [bits, bits - 2**64 if bits >= 2**63 else bits, np.uint64(bits), unsigned, unsigned.view(np.int64)]
        forms += [unsigned[0:1].reshape(()), unsigned.view(np.int64).reshape(()), [int(unsigned.view(np.int64)[0])]]
        for form in forms:
            assert system("sample", row, seed=form) == expected, form
    assert len({int(system("sample", row, seed=seed)[0]) for seed in (0, 1, -1, 2**63, 2**32, 2**33)}) == 6


@EVERY
def test_one_seed_for_a_batch(system: System) -> None:
    """Row 0 uses the seed itself, each other row one derived from the seed and its number, whatever the batch."""
    rows = np.zeros((6, 997), np.float32)
    for seed in (5, np.array(5), np.array(5, np.uint64), np.int64(5)):
        result = system("sample", rows, seed=seed)
        assert len(set(result)) == 6
        assert result[0] == system("sample", rows[:1], seed=np.array([5]))[0]
        assert system("sample", rows[:4], seed=seed).tolist() == result[:4].tolist()
    target, draft, tokens, _, _ = make_round(1)
    for rule in RULES:
        one = system("verify", target, draft, tokens, rule=rule, seed=5)
        same(one, system("verify", target, draft, tokens, rule=rule, seed=np.array([5])))


@EVERY
def test_offsets_to_the_last(system: System) -> None:
    """Every offset below 2^63 has draws of its own, and match reaches the last of them."""
    row = np.zeros((1, 997), np.float32)
    offsets = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 2, 2**63 - 1]
    drawn = [int(system("sample", row, seed=3, offset=o)[0]) for o in offsets]
    assert len(set(drawn)) == len(offsets)
    assert [int(system("sample", row, seed=3, offset=np.array([o]))[0]) for o in offsets] == drawn
    result = system(
        "verify",
        np.zeros((1, 2, 997), np.float32),
        None,
        np.array([drawn[-2:-1]]),
        rule="match",
        seed=3,
        offset=2**63 - 2,
    )
    assert result.tokens[0].tolist() == drawn[-2:]
    for rule in ("token", "block"):
        assert system(
            "verify", np.zeros((1, 2, 9), np.float32), None, np.array([[1]]), rule=rule, seed=3, offset=2**63 - 2
        )


@EVERY
def test_private_drafts_have_streams_of_their_own(system: System) -> None:
    row = np.zeros((1, 997), np.float32)
    indices = [None, 0, 1, 2, 255, 256, 2**24 - 1]
    drawn = [int(system("sample", row, seed=3, offset=9, draft_index=i)[0]) for i in indices]
    assert len(set(drawn)) == len(indices)
    batch = system(
        "sample", np.zeros((6, 997), np.float32), seed=np.full(6, 3), offset=9, draft_index=np.array(indices[1:])
    )
    assert batch.tolist() == drawn[1:]


def test_random_seeds() -> None:
    seeds = dp.random_seeds(1000)
    assert (seeds.dtype, seeds.shape, len(set(seeds))) == (np.uint64, (1000,), 1000)
    assert not set(seeds) & set(dp.random_seeds(1000))
    # All 64 bits vary: each is set about half the time, 8 standard deviations allowed.
    bits = (seeds[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert (abs(bits.sum(0).astype(int) - 500) < 8 * 16).all()
    assert dp.random_seeds(0).shape == (0,)
    assert dp.random_seeds(np.int64(2)).shape == (2,)
    with pytest.raises(dp.ShapeError, match="batch must be an int"):
        dp.random_seeds(np.timedelta64(2, "s"))  # NumPy counts it among its integers
    rows = np.zeros((1000, 4), np.float32)
    same(dp.sample(tensor(rows), seed=seeds).numpy(), dp.sample(rows, seed=seeds))
