"""Small rows against the pinned arithmetic in exact numbers: Fractions, rounded where the arithmetic rounds.

``docs/arithmetic.md`` in integers and Fractions, for V <= 16. The kept sets are also held against ``reference.kept`` on
the same integer masses, draws by inverse CDF are those of ``Uniforms``, and where no uniform comes close to a threshold
a round must end as the rules of the reference end on the exact laws. Environment variables as in ``test_fuzz_core.py``.
"""

import itertools
import math
import os
import time
from fractions import Fraction

import numpy as np
import pytest

import draftproof
from draftproof import _native
from draftproof.numerics import constants
from draftproof.rng.streams import Purpose, words
from draftproof.sampling import reference
from draftproof.testing import Uniforms
from draftproof.verification.chain.reference import RULES, law

pytestmark = pytest.mark.fuzz

SECONDS = float(os.environ.get("DRAFTPROOF_FUZZ_SECONDS", "3"))
SEED = int(os.environ.get("DRAFTPROOF_FUZZ_SEED", str(time.time_ns())))
FIRST = int(os.environ.get("DRAFTPROOF_FUZZ_CASE", "0"))
INFINITY = math.inf
FLT_MAX = Fraction(constants.FLT_MAX)
ONE = 1 << 40


# --- rounding and elementary functions --------------------------------------------------------------------------------


def rn(x):
    """Return the float32 nearest to a Fraction, ties to even, as a Fraction; infinities stay what they are."""
    if x in (0, INFINITY, -INFINITY):
        return x
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(size / unit) * unit
    if rounded > FLT_MAX:
        rounded = INFINITY
    return rounded if x > 0 else -rounded


def exact(values):
    return [v if math.isinf(v) else Fraction(v) for v in np.asarray(values, np.float32).tolist()]


def horner(x, coefficients):
    value = Fraction(coefficients[-1])
    for c in coefficients[-2::-1]:
        value = rn(rn(value * x) + Fraction(c))
    return value


def exp2(t):
    if t < -40:
        return Fraction(0)
    n = math.floor(rn(t + Fraction(1, 2)))
    r = rn(t - n)
    return rn(1 + rn(r * horner(r, constants.EXP2))) * Fraction(2) ** n


def split(x):
    """Return e and f with x = 2^e (1 + f), 1 + f in [3/4, 3/2)."""
    e = x.numerator.bit_length() - x.denominator.bit_length() - 1
    while x / Fraction(2) ** e >= Fraction(3, 2):
        e += 1
    return e, x / Fraction(2) ** e - 1


def log2(x):
    small = x < Fraction(2) ** -126
    e, f = split(x * 2**32 if small else x)
    return rn(e - 32 * small + rn(f * horner(f, constants.LOG2)))


def exponential(word):
    u = min(rn(rn(rn(Fraction(word)) + Fraction(1, 2)) / 2**32), 1 - Fraction(1, 1 << 24))
    e, f = split(rn(1 - u))
    f = -u if e == 0 else f
    return rn(rn(-e * Fraction(constants.LN2)) - rn(f * horner(f, constants.LOG1P)))


# --- one row ----------------------------------------------------------------------------------------------------------


class Row:
    """Penalty, mask and filters on one row: kept ids best first, integer masses, divided logits."""

    def __init__(self, logits, filters, history=(), allowed=None):
        temperature, top_k, top_p, min_p, penalty = filters
        row = exact(logits)
        for x in {x for x in history if 0 <= x < len(row)}:
            row[x] = row[x] if math.isinf(row[x]) else rn(row[x] * penalty if row[x] < 0 else row[x] / penalty)
        self.logits = row = [v if allowed is None or allowed[x] else -INFINITY for x, v in enumerate(row)]
        top = max(row)
        self.dead = top == -INFINITY
        self.masses = [0] * len(row)
        if self.dead:
            return
        self.greedy = temperature == 0
        if self.greedy:
            self.kept, self.divided = [row.index(top)], row
            self.masses[self.kept[0]] = ONE
            return
        self.divided = [v if math.isinf(v) else rn(v / temperature) for v in row]
        scale = min(rn(Fraction(constants.LOG2E) / temperature), FLT_MAX)
        self.t = [Fraction(0) if v == top else self._exponent(v, top, scale) for v in row]
        self.weights = [exp2(t) for t in self.t]
        masses = [math.floor(w * ONE) for w in self.weights]
        self.kept = self._kept(masses, top_k, top_p, min_p)
        for x in self.kept:
            self.masses[x] = masses[x]

    @staticmethod
    def _exponent(v, top, scale):
        if math.isinf(v) or math.isinf(top):
            return -INFINITY
        distance = rn(v - top)
        return distance if math.isinf(distance) else rn(distance * scale)

    def _kept(self, masses, top_k, top_p, min_p):
        on = 0 < top_k < len(masses)
        kth = sorted(self.divided, reverse=True)[top_k - 1] if on else -INFINITY
        order = [x for x, s in enumerate(self.divided) if s >= kth and self.logits[x] > -INFINITY]
        order.sort(key=lambda x: (-self.logits[x], x))
        if top_p < 1:
            share = Fraction(math.floor(top_p * 2**30), 1 << 30)
            total = sum(masses[x] for x in order)
            theta = max(math.ceil(share * total) - (total >> 21), 1)
            above = itertools.accumulate((masses[x] for x in order), initial=0)
            survivors = [x for x, a in zip(order, above, strict=False) if Fraction(a) < theta]
            self._check_reference(masses, top_k, share, total, survivors)
            order = survivors
        if min_p > 0:
            order = [x for x in order if self.t[x] >= log2(min_p)]
        return order

    def _check_reference(self, masses, top_k, share, total, survivors):
        """Theta is the reference's limit, rounded up by less than two units of mass."""
        low, high = (
            reference.kept(self.logits, self.divided, masses, top_k, top_p)
            for top_p in (share, share + Fraction(2, total))
        )
        assert set(low) <= set(survivors)
        assert set(survivors) <= set(high) or share + Fraction(2, total) >= 1

    def race(self, seed, offset, draft_index=None):
        if self.greedy:
            return self.kept[0]
        token, block = Purpose.RACE_TOKEN, Purpose.RACE_BLOCK
        if draft_index is not None:
            token, block = Purpose.DRAFT_TOKEN, Purpose.DRAFT_BLOCK
        index = draft_index or 0
        minimum, holder, _, _ = words(seed, offset, block, index, 0)  # one block holds up to 64 ids
        least = exponential(minimum) / 64
        keys = []
        for x in self.kept:
            own = words(seed, offset, token, index, x >> 2)[x & 3]
            noise = least if holder >> 26 == x else rn(least + exponential(own))
            if self.weights[x]:
                keys.append((rn(noise / self.weights[x]), x))
        return min(keys)[1]

    def filtered(self):
        if self.dead:
            return [math.nan] * len(self.logits)
        return [float(s) if x in self.kept else -INFINITY for x, s in enumerate(self.divided)]


# --- rounds -----------------------------------------------------------------------------------------------------------


def probability(masses, x):
    return rn(rn(Fraction(masses[x])) * rn(1 / rn(Fraction(sum(masses))))) if x < len(masses) else Fraction(0)


def residual(p, q, draft, scale):
    if q is None:
        return [0 if x == draft else m for x, m in enumerate(p)]
    rests = (rn(rn(scale * probability(p, x)) - probability(q, x)) for x in range(len(p)))
    return [math.floor(max(r, 0) * 2**61) for r in rests]


def verified(rule, target, draft, tokens, choose, seed, offset):
    """Return ``(num_accepted, next_token)`` of a round over rows that are alive."""
    n = len(tokens)
    p = [row.masses for row in target]
    q = None if draft is None else [row.masses for row in draft]

    def uniform(i):
        return Fraction(choose._uniform(("accept", i)))

    def emit(i, scale=1):
        masses = p[i] if i == n else residual(p[i], q and q[i], tokens[i], scale)
        return i, choose.categorical(masses if any(masses) else p[i], draw=("emit", i))

    def chances(i):
        return probability(p[i], tokens[i]), Fraction(1) if q is None else probability(q[i], tokens[i])

    if rule == "token":
        for i in range(n):
            p_x, q_x = chances(i)
            if not rn(uniform(i) * q_x) < p_x:
                return emit(i)
        return emit(n)
    if rule == "block":
        scales, tau = [Fraction(1)], 0
        for i in range(n):
            p_x, q_x = chances(i)
            a = rn(scales[i] * p_x)
            scales.append(Fraction(0) if a == 0 else Fraction(1) if a >= q_x else rn(a / q_x))
        for i in range(1, n + 1):
            keep = scales[i] if i == n else stop_probability(p[i], q and q[i], tokens[i], scales[i])
            tau = i if uniform(i - 1) < keep else tau
        return emit(tau, scales[tau])
    for i in range(n + 1):
        best = target[i].logits.index(max(target[i].logits))
        x = best if rule == "greedy" else target[i].race(seed, offset + i)
        if i == n or x != tokens[i]:
            return i, x
    raise AssertionError("unreachable")


def stop_probability(p, q, draft, scale):
    rest = residual(p, q, draft, scale)
    if q is None:
        share = rn(scale * rn(rn(Fraction(sum(rest))) * rn(1 / rn(Fraction(sum(p))))))
    else:
        share = rn(Fraction(sum(rest))) / 2**61
    whole = rn(share + rn(1 - scale))
    return rn(share / whole) if whole else Fraction(1)


# --- cases ------------------------------------------------------------------------------------------------------------


def pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def logits(rng, shape):
    kind = rng.integers(5)
    if kind == 0:
        a = rng.integers(pick(rng, -3, 0), pick(rng, 1, 4), shape).astype(float)
    elif kind == 1:
        a = rng.choice([0.0, -0.0, constants.FLT_MAX, -constants.FLT_MAX, 1e-45, -1e-45, 1.0, -27.7], shape)
    elif kind == 2:
        a = np.log(rng.integers(1, 10, shape) / 10)
    elif kind == 3:
        a = -rng.uniform(20, 30, shape) * (rng.random(shape) < 0.8)
    else:
        a = rng.standard_normal(shape) * pick(rng, 1e-3, 1, 5, 1e36)
    a = np.where(rng.random(shape) < pick(rng, 0, 0, 0.2, 0.7), -INFINITY, a)
    return np.where(rng.random(shape) < pick(rng, 0, 0, 0, 0.1), INFINITY, a).astype(np.float32)


def parameters(rng, vocab):
    """Temperature, top_k, top_p, min_p, penalty: float32 numbers."""
    n = pick(rng, 2, 4, 8, 16)
    # Where n tokens weigh the same, the last of these puts theta exactly on the mass of some of them.
    top_p = pick(rng, 1, 1, 0, 0.5, 0.8, 0.9, 1 - 2.0**-24, rng.random(), rng.integers(n) / n + 2.0**-21)
    values = (
        pick(rng, 1, 1, 0, 0.7, 3, 1e-38, 1e-45, FLT_MAX, rng.uniform(0.1, 2)),
        0,
        top_p,
        pick(rng, 0, 0, 1, 0.1, 2.0**-40, 1e-45, rng.random()),
        pick(rng, 1, 1, 1.3, 0.7, 1e30, 1e-45, 1 + 2.0**-23),
    )
    temperature, _, top_p, min_p, penalty = exact([float(v) for v in values])
    return temperature, int(rng.integers(0, vocab + 2)), top_p, min_p, penalty


def arguments(values, prefix=""):
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {prefix + name: v if name == "top_k" else float(v) for name, v in zip(names, values, strict=True)}


def on_every_backend(note, function, *arrays, **settings):
    """Return what the operation says, which is the same on eager and on a level of the core."""
    said = [function(*arrays, **settings, check=False, backend="eager")]
    if _native.core is not None:
        said.append(function(*arrays, **settings, check=False, backend="cpu"))
    columns = [[np.asarray(a).tolist() for a in (s if isinstance(s, tuple) else (s,))] for s in said]
    assert all(str(c) == str(columns[0]) for c in columns), f"{note}: {columns}"
    return said[0]


def cases(check):
    """Run a check on case after case for as long as the test may take."""
    core = _native.core
    level, threads = (core.level(), core.num_threads()) if core else (None, None)
    print(f"DRAFTPROOF_FUZZ_SEED={SEED}", end=" ")  # noqa: T201
    end = time.monotonic() + SECONDS
    try:
        for case in itertools.count(FIRST):
            if time.monotonic() > end:
                break
            rng = np.random.default_rng([SEED, case])
            if core:
                core.set_level(pick(rng, *core.levels()))
                core.set_num_threads(int(rng.integers(1, 4)))
            check(rng, f"DRAFTPROOF_FUZZ_SEED={SEED} DRAFTPROOF_FUZZ_CASE={case}")
        print(f"{case - FIRST} cases")  # noqa: T201
    finally:
        if core:
            core.set_level(level)
            core.set_num_threads(threads)


def test_kept_sets_and_draws():
    def check(rng, note):
        vocab = int(rng.integers(1, 17))
        row, values = logits(rng, (1, vocab)), parameters(rng, vocab)
        history = rng.integers(-1, vocab + 1, int(rng.integers(0, 4)))
        allowed = rng.random((1, vocab)) < pick(rng, 0.3, 0.9, 1.0)
        seed, offset, draft_index = int(rng.integers(2**62)), int(rng.integers(2**40)), pick(rng, None, 0, 5)
        settings = {**arguments(values), "prev_tokens": history[None], "mask": allowed}
        expected = Row(row[0], values, history.tolist(), allowed[0])
        filtered = on_every_backend(note, draftproof.filter_logits, row, **settings)[0]
        assert np.array_equal(filtered, np.float32(expected.filtered()), equal_nan=True), f"{note}: {row} {settings}"
        drawn = on_every_backend(
            note, draftproof.sample_with_logprobs, row, **settings, seed=seed, offset=offset, draft_index=draft_index
        )
        token = -1 if expected.dead else expected.race(seed, offset, draft_index)
        assert drawn.tokens[0] == token, f"{note}: {row} {settings}"
        if expected.dead:
            return
        assert drawn.kept[0] == sum(expected.divided[x] > -INFINITY for x in expected.kept), f"{note}: {row} {settings}"
        if not expected.greedy:
            share = rn(Fraction(sum(expected.masses))) / ONE
            logprob = rn(rn(expected.t[token] - log2(share)) * Fraction(constants.LN2))
            assert drawn.logprobs[0] == float(logprob), f"{note}: {row} {settings}"

    cases(check)


def test_rounds():
    def check(rng, note):
        vocab, drafted = int(rng.integers(1, 17)), int(rng.integers(0, 4))
        draft_vocab = pick(rng, vocab, vocab, int(rng.integers(1, 17)))
        target = logits(rng, (1, drafted + 1, vocab))
        draft = pick(rng, None, logits(rng, (1, drafted, draft_vocab)), logits(rng, (1, drafted, draft_vocab)))
        if draft is not None and draft_vocab == vocab and rng.random() < 0.5:
            draft = np.where(rng.random(draft.shape) < 0.7, target[:, :drafted], draft)
        values, draft_values = parameters(rng, vocab), parameters(rng, draft_vocab)
        widest = vocab if draft is None else max(vocab, draft_vocab)
        likely = target[:, :drafted] if draft is None else draft
        tokens = np.where(rng.random((1, drafted)) < 0.6, likely.argmax(-1), rng.integers(0, widest, (1, drafted)))
        history = tokens[0].tolist()
        rows = [Row(target[0, i], values, history[:i]) for i in range(drafted + 1)]
        drafts = None if draft is None else [Row(draft[0, i], draft_values, history[:i]) for i in range(drafted)]
        if any(row.dead for row in rows + (drafts or [])):
            return
        seed, offset = int(rng.integers(2**62)), int(rng.integers(2**40))
        settings = {**arguments(values), **arguments(draft_values, "draft_"), "seed": seed, "offset": offset}
        for rule in RULES:
            said = on_every_backend(note, draftproof.verify, target, draft, tokens, rule=rule, **settings)
            got = int(said.num_accepted[0]), int(said.next_token[0])
            expected = verified(rule, rows, drafts, history, Uniforms(seed, offset), seed, offset)
            assert got == expected, f"{note} {rule}: {target} {draft} {tokens} {settings}"
            # Drafts that their own law could not have drawn leave the exact rules at the mercy of quotients 0/0.
            if rule in ("token", "block") and not said.status[0] & draftproof.Status.OFF_SUPPORT:
                choose = Uniforms(seed, offset)
                laws = [[law(row.masses) for row in side] if side else None for side in (rows, drafts)]
                meant = RULES[rule](*laws, history, choose)
                assert got == meant or choose.margin < 2.0**-18, f"{note} {rule}: {target} {draft} {tokens} {settings}"

    cases(check)
