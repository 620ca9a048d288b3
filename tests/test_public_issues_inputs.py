"""Faults reported against other samplers: inputs at the edge, filters."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import draftproof as dp
from draftproof import Status, ValueRangeError
from draftproof._arrays import NumpyArrays
from draftproof.numerics.exp2 import exp2, exponent, scale
from draftproof.numerics.masses import masses, theta
from public_issues import BOTH, INF, NAN, TESTS, Arrays, kept, rows_of, softmax, torch, wide
from public_issues import backend as backend  # of every test here

# --- edge inputs ------------------------------------------------------------------------------------------------------


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


# --- filters, as reported against transformers ------------------------------------------------------------------------


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


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_names_tests_that_exist() -> None:
    table = (TESTS.parent / "docs" / "public-issues.md").read_text()
    defined = {
        name for file in TESTS.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    named = set(re.findall(r"`(test_\w+)`", table))
    assert named <= defined
    here = {
        name
        for file in TESTS.glob("test_public_issues_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    } - {"test_the_table_names_tests_that_exist"}
    assert here <= named
    # Each row has a test or a reason.
    rows = [line for line in table.splitlines() if re.match(r"\| \d+ ", line)]
    assert len(rows) == 95
    assert [row for row in rows if not re.search(r"`test_|not yet: |not offered: ", row)] == []
