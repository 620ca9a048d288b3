"""The pinned arithmetic against the reference in float64: equal tokens, or a decision closer than rounding can move it.

The error of every mass is measured and held against a bound from the number of roundings. From the measured errors
follows how far rounding can move each decision's boundary. A request is blind if one of its decisions lies closer than
that; blind requests are counted, for there a fault could hide.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

import draftproof
from draftproof import SamplingParams
from draftproof._arrays import namespace
from draftproof.numerics.exp2 import exp2, exponent, scale
from draftproof.numerics.masses import masses
from draftproof.rng.uniforms import Draw, Uniforms
from draftproof.sampling import reference as sampling
from draftproof.types import DEAD, Array
from draftproof.verification.chain import reference as chain

UNIT = 2.0**-24
# As measured and documented in draftproof.numerics.
EXP2_ERROR, EXPONENTIAL_ERROR = 1.04e-7, 3.15e-7
CUT = 2.0**-40
DRAFTED = 4


class Law:
    """A filtered row, with the relative error that the pinned arithmetic makes at each token."""

    def __init__(self, logits: list[float], params: SamplingParams, history: list[int], allowed: list[bool]) -> None:
        row = sampling.filtered(logits, params, history, allowed)
        self.row = chain.law(row.masses)
        kept = np.array(row.masses) > 0
        exact = np.array(row.masses)[kept]
        weight, mass = pinned(sampling.allowed_logits(logits, params, history, allowed), params.temperature)
        # Roundings of t: l - m, LOG2E, its quotient by T, the product. Then the polynomial of 2**t.
        weight_errors = np.abs(weight[kept] / exact - 1)[exact > CUT]
        assert (weight_errors <= (4 * UNIT * -np.log(exact) + EXP2_ERROR)[exact > CUT]).all()
        # Masses are cut at 2**-40 of the largest.
        errors = np.abs(mass[kept] / exact - 1)
        assert (errors[exact > CUT] <= weight_errors + (CUT / exact)[exact > CUT]).all()
        self.mean_error = float(errors @ exact / exact.sum())
        # f32(W), its reciprocal, the product.
        self.errors = np.zeros(len(logits))
        self.errors[kept] = errors + self.mean_error + 3 * UNIT
        # Two keys, each a sum of exponentials divided by a weight.
        self.race_bound = float(2 * (EXPONENTIAL_ERROR + weight_errors.max() + 2 * UNIT))


def pinned(logits: list[float], temperature: float) -> tuple[Array, Array]:
    """Return the weights of the pinned arithmetic, and its masses as numbers beside them."""
    rows, maximum = np.array([logits], np.float32), np.array([[max(logits)]], np.float32)
    xp = namespace(rows)
    weights = exp2(xp, exponent(xp, rows, maximum, scale(xp, np.array([[temperature]], np.float32))))
    return weights[0].astype(np.float64), masses(xp, weights)[0] * CUT


class Outcome(NamedTuple):
    token: Any
    blind: bool


def sample_row(law: Law, seed: int, offset: int, draft_index: int | None) -> Outcome:
    choose = Uniforms(seed, offset)
    draw: Draw = ("race", 0) if draft_index is None else ("draft", draft_index)
    return Outcome(choose.race(law.row, draw=draw), choose.margin < law.race_bound)


def verify_row(rule: str, target: Any, draft: Any, tokens: list[int], seed: int, offset: int) -> Outcome:
    """Run the reference on one request; ``target`` and ``draft`` make a ``Law`` of a position."""
    choose = Uniforms(seed, offset)
    targets = chain.LazyLaws(target)
    drafts = None if draft is None else chain.LazyLaws(draft)
    p_of = chain.LazyLaws(lambda i: targets[i].row)
    q_of = chain.LazyLaws(lambda i: drafts[i].row) if drafts is not None else chain.point_masses(tokens)
    outcome = chain.verify_one(chain.RULES[rule], p_of, q_of, tokens, (), choose)

    def draft_error(i: int) -> Any:
        return drafts[i].errors if drafts is not None else np.zeros_like(targets[i].errors)

    def ratio_error(i: int) -> float:
        x = tokens[i]
        return float(targets[i].errors[x] + draft_error(i)[x]) + 3 * UNIT

    def residual_error(i: int, scale_error: float) -> float:
        """Sum over the row of the absolute errors of max(P p - q, 0)."""
        p, q = np.array(p_of[i]), np.zeros(len(p_of[i]))
        q[: len(q_of[i])] = q_of[i]
        return float((targets[i].errors + scale_error + UNIT) @ p + (draft_error(i) + UNIT) @ q) + len(p) * 2.0**-61

    def bound(draw: Draw) -> float:
        kind, i = draw
        if kind == "race":
            return targets[i].race_bound
        scale_errors = np.cumsum([0.0] + [ratio_error(j) for j in range(i if kind == "emit" else i + 1)])
        if kind == "accept":
            n = i + 1
            if rule == "token":
                return ratio_error(i)
            if n == len(tokens):
                return float(scale_errors[n])
            scale = chain.prefix_scales(p_of, q_of, tokens)[n]
            rest = sum(chain.excess(p_of[n], q_of[n], scale)) + 1 - scale
            return (residual_error(n, scale_errors[n]) + scale_errors[n]) / max(rest, 1e-30) + 4 * UNIT
        if i == len(tokens):
            return 2 * targets[i].mean_error
        scale = chain.prefix_scales(p_of, q_of, tokens)[i] if rule == "block" else 1
        mass = sum(chain.excess(p_of[i], q_of[i], scale))
        return 2 * residual_error(i, scale_errors[i] if rule == "block" else 0.0) / max(mass, 1e-30)

    blind = any(margin < bound(draw) for draw, margin in choose.margins.items())
    return Outcome((outcome.num_accepted, outcome.next_token), blind)


class Batch(NamedTuple):
    """Random requests with parameters of their own, as the public functions take them."""

    target: Array  # [B, K+1, V]
    draft: Array  # [B, K, V]
    tokens: Array  # [B, K]
    filters: dict[str, Array]
    mask: Array  # [B, K+1, V]
    seed: Array
    offset: Array


@functools.cache
def law(vocab: int, rows: int, side: str, b: int, i: int) -> Law:
    case = batch(vocab, rows)
    logits = case.target if side == "target" else case.draft
    params = SamplingParams(**{name: value[b].item() for name, value in case.filters.items()})
    return Law(sampling.rounded(logits[b, i]), params, case.tokens[b, :i].tolist(), case.mask[b, i].tolist())


@functools.cache
def batch(vocab: int, rows: int) -> Batch:
    rng = np.random.default_rng(0)
    target = rng.normal(0, 3, (rows, DRAFTED + 1, vocab)).astype(np.float32)
    draft = (target[:, :DRAFTED] + rng.normal(0, 0.7, (rows, DRAFTED, vocab))).astype(np.float32)
    filters = {
        "temperature": rng.choice([0.7, 1.0, 1.3], rows).astype(np.float32),
        "top_k": rng.choice([0, 50, 200], rows),
        "min_p": rng.choice([0.0, 0.001], rows).astype(np.float32),
        "repetition_penalty": rng.choice([1.0, 1.2], rows).astype(np.float32),
    }
    mask = rng.random((rows, DRAFTED + 1, vocab)) < 0.9
    seeds, offset = rng.integers(-(2**63), 2**63, rows), rng.integers(0, 2**40, rows)
    tokens = np.full((rows, DRAFTED), -1)
    for i in range(DRAFTED):
        tokens[:, i] = draftproof.sample(
            draft[:, i], **filters, prev_tokens=tokens[:, :i], mask=mask[:, i], seed=seeds, offset=offset, draft_index=i
        )
    return Batch(target, draft, tokens, filters, mask, seeds, offset)


def faults(actual: list[Any], expected: list[Outcome]) -> list[int]:
    """Return the rows that rounding cannot explain."""
    return [b for b, (a, e) in enumerate(zip(actual, expected, strict=True)) if a != e.token and not e.blind]


def examine(actual: list[Any], expected: list[Outcome]) -> None:
    """No fault, few rows where one could hide, and four planted faults are found."""
    assert faults(actual, expected) == []
    sighted = [b for b, e in enumerate(expected) if not e.blind]
    assert len(sighted) >= 0.98 * len(expected)
    planted = sighted[1::2][:4]
    for b in planted:
        actual[b] = None
    assert len(planted) == 4
    assert faults(actual, expected) == planted


SIZES = [(1000, 150), (32000, 12)]


@pytest.mark.parametrize(("vocab", "rows"), SIZES)
@pytest.mark.parametrize("draft_index", [None, 3])
def test_sample(vocab: int, rows: int, draft_index: int | None) -> None:
    case = batch(vocab, rows)
    expected = [
        sample_row(law(vocab, rows, "target", b, 0), int(case.seed[b]), int(case.offset[b]), draft_index)
        for b in range(rows)
    ]
    actual = draftproof.sample(
        case.target[:, 0],
        **case.filters,
        mask=case.mask[:, 0],
        seed=case.seed,
        offset=case.offset,
        draft_index=draft_index,
    )
    examine(actual.tolist(), expected)


@pytest.mark.parametrize(("vocab", "rows"), SIZES)
@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_verify(rule: str, point_mass: bool, vocab: int, rows: int) -> None:
    case = batch(vocab, rows)
    expected = []
    for b in range(rows):
        target, draft = (functools.partial(law, vocab, rows, side, b) for side in ("target", "draft"))
        key = int(case.seed[b]), int(case.offset[b])
        expected.append(verify_row(rule, target, None if point_mass else draft, case.tokens[b].tolist(), *key))
    result = draftproof.verify(
        case.target,
        None if point_mass else case.draft,
        case.tokens,
        rule=rule,
        **case.filters,
        mask=case.mask,
        seed=case.seed,
        offset=case.offset,
    )
    actual: list[Any] = list(zip(result.num_accepted.tolist(), result.next_token.tolist(), strict=True))
    assert result.status.tolist() == [0] * rows
    examine(actual, expected)


def test_kept_sets_on_the_masses_of_the_arithmetic() -> None:
    """On the operation's own integer masses there is nothing to round: the kept sets are equal."""
    rng = np.random.default_rng(2)
    sizes: dict[int, int] = {}
    for vocab in (1, 3, 17, 64) * 50:
        steps = rng.choice([0.0, 0.25, 2.0**-10, 100.0])
        logits = rng.normal(0, 2, vocab).astype(np.float32)
        logits = np.round(logits / steps).astype(np.float32) * np.float32(steps) if steps else logits
        temperature, top_k = float(rng.choice([0.5, 1.0, 2.0])), int(rng.integers(0, vocab + 1))
        top_p, min_p = (np.float32(rng.choice(choices)) for choices in ([0.0, 0.3, 0.5, 0.9, 0.999, 1.0], [0, 0.07]))
        row = logits.tolist()
        own = [Fraction(mass) for mass in pinned(row, temperature)[1].tolist()]
        scaled = sampling.rounded([logit / temperature for logit in row])
        units = Fraction(int(top_p * 2**30), 2**30)
        expected = sampling.kept(row, scaled, own, top_k, units, Fraction(float(min_p)))
        filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        actual = draftproof.filter_logits(logits[None], **filters)[0]
        assert np.flatnonzero(actual > -np.inf).tolist() == sorted(expected)
        rows = np.broadcast_to(logits, (50, vocab))
        assert set(draftproof.sample(rows, **filters, seed=0).tolist()) <= set(expected)
        sizes[len(expected)] = sizes.get(len(expected), 0) + 1
    assert len(sizes) > 20


@pytest.mark.parametrize("rule", chain.RULES)
@pytest.mark.parametrize("seed", range(8))
def test_every_argument_means_the_same(rule: str, seed: int) -> None:
    """Small requests with everything at once, result for result: the margins of so few decisions are wide."""
    rng = np.random.default_rng(seed)
    rows, vocab = 24, int(rng.integers(2, 70))
    draft_vocab = vocab + seed % 3 - 1
    target = rng.normal(0, 2, (rows, DRAFTED + 1, vocab)).astype(np.float32)
    draft = rng.normal(0, 2, (rows, DRAFTED, draft_vocab)).astype(np.float32)
    target[rng.random(target.shape[:2]) < 0.05] = rng.choice([np.nan, -np.inf, np.inf])
    filters = {
        "temperature": rng.choice([0, 0.8, 1, 2], rows),
        "top_k": rng.integers(-1, vocab, rows),
        "top_p": rng.choice([0, 0.5, 0.9, 1], rows),
        "min_p": rng.choice([0, 0.05], rows),
        "repetition_penalty": rng.choice([0.8, 1, 1.3], rows),
    }
    # Most bits set, so that some drafts are accepted.
    words = np.bitwise_or.reduce(rng.integers(-(2**31), 2**31, (4, 2, rows, DRAFTED + 1, 3)), axis=0).astype(np.int32)
    given: dict[str, Any] = {
        **filters,
        **({f"draft_{name}": rng.permutation(value) for name, value in filters.items()} if seed % 2 else {}),
        "rule": rule,
        "prev_tokens": rng.integers(-1, vocab, (rows, 5)),
        "mask": words[0, ..., : (vocab + 31) // 32],
        "draft_mask": words[1, :, :DRAFTED, : (draft_vocab + 31) // 32] if seed % 4 == 0 else None,
        "num_draft_tokens": rng.integers(0, DRAFTED + 1, rows),
        "eos": rng.integers(-1, vocab, (rows, 2)),
        "seed": rng.integers(-(2**63), 2**63, rows),
        "offset": rng.integers(0, 2**40, rows),
        "check": False,
    }
    likely = np.where(np.isnan(target[:, :DRAFTED]), 0, target[:, :DRAFTED]).argmax(axis=2)
    tokens = np.where(rng.random(likely.shape) < 0.4, rng.integers(-2, vocab + 2, likely.shape), likely)
    for rows_of_draft in (draft, None):
        expected, actual = (
            draftproof.verify(target, rows_of_draft, tokens, **given, backend=backend)
            for backend in ("reference", "eager")
        )
        # The reference stops at a dead row, and says nothing of the tests before it.
        alive = (expected.status & DEAD) == 0
        np.testing.assert_array_equal((actual.status & DEAD) == 0, alive)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a[alive], e[alive])
        assert len(np.unique(expected.num_accepted)) > 1
