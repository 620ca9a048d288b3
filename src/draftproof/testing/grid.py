"""A batched implementation against the exact rules, on every point of a grid of injected uniforms."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from ..rng.uniforms import LARGEST_UNIFORM, Choose, Masses, Uniforms
from ..types import Array, VerifyResult
from ..verification.chain import reference as chain
from .enumerate_law import enumerate_law, midpoints

# Ends of the interval, and thresholds that a ratio of powers of two can hit exactly: `<` must be strict.
EDGES = (Fraction(0), Fraction(1, 8), Fraction(1, 4), Fraction(1, 2), LARGEST_UNIFORM)
_UNREAD = 0.5
# Counts do not show whether the right one of several uniforms decided; single points do.
_SPOTS = 64

VerifyProbs = Callable[..., VerifyResult]


class Shape(NamedTuple):
    """One kind of cases: sizes, the uniforms of every coordinate, and how many pairs of models are drawn."""

    vocab: int
    drafted: int
    uniforms: tuple[Fraction, ...]
    models: int


SMALL = (
    Shape(2, 1, tuple(midpoints(8)), 4),
    Shape(3, 2, tuple(midpoints(4)), 2),
    Shape(3, 1, EDGES, 8),
)
FULL = (
    *(Shape(vocab, 1, tuple(midpoints(8)), 16) for vocab in (1, 2, 3, 4)),
    *(Shape(vocab, 2, tuple(midpoints(8)), 4) for vocab in (2, 3, 4)),
    Shape(2, 3, tuple(midpoints(8)), 2),
    Shape(3, 3, tuple(midpoints(4)), 3),
    Shape(4, 3, tuple(midpoints(4)), 2),
    *(Shape(vocab, 2, EDGES, 4) for vocab in (2, 4)),
)


@dataclass(frozen=True)
class Case:
    """One draft path under a rule: its laws, and how often each (accepted, next) must come out."""

    rule: chain.Rule
    target: tuple[Masses, ...]  # rows 0..n
    draft: tuple[Masses, ...] | None  # rows 0..n-1
    tokens: tuple[int, ...]  # n drafts
    counts: dict[tuple[int, int], int]
    exact: bool  # every threshold and residual probability falls between grid points: the counts are the law

    def __str__(self) -> str:
        rows = {"target": self.target, "draft": self.draft}
        laws = {name: laws and [list(map(str, row)) for row in laws] for name, laws in rows.items()}
        return f"rule {self.rule.__name__}, {laws}, tokens {self.tokens}"


class Report(NamedTuple):
    """What ``check_grid`` has run."""

    evaluations: int
    cases: int
    exact: int


def check_grid(
    verify_probs: VerifyProbs,
    *,
    rules: Sequence[str] = tuple(chain.RULES),
    shapes: Sequence[Shape] = FULL,
    seed: int = 0,
) -> dict[str, Report]:
    """Check an implementation of ``verify_probs`` on all drafts and all points of grids of uniforms.

    Laws are random rows whose entries are zero or powers of two, so that float32 holds every product and quotient that
    the rules ``token`` and ``match`` form. Sampled drafts, point masses, drafts that end early and drafts with q = 0
    all occur. Rows that a rule must not read hold NaN. All cases of one shape go through one call.

    Parameters
    ----------
    verify_probs
        Called as ``draftproof.verify_probs`` is, with ``rule``, ``uniform_accept`` and ``uniform_sample`` and without a
        seed; a uniform that the rule does not read is None. It gets NumPy arrays and returns a ``VerifyResult`` of
        arrays that NumPy can read.
    rules, shapes, seed
        What is run; ``FULL`` is 421,320 evaluations of each sampling rule, a second or two, ``SMALL`` 4,880.

    Returns
    -------
    dict
        For each rule how many evaluations and cases were run, and in how many of the cases the counts are the exact
        law.

    Raises
    ------
    AssertionError
        With the first case whose counts differ from those of the rule in ``reference.py`` on Fractions.

    Exactness
    ---------
    Counts are compared with ``==``. In the cases counted as ``exact`` they equal the enumerated law of the rule itself.

    Examples
    --------
    >>> import draftproof
    >>> check_grid(draftproof.verify_probs, rules=["block"], shapes=SMALL)
    {'block': Report(evaluations=4880, cases=140, exact=89)}
    """
    reports = {}
    for name in rules:
        cases = evaluations = exact = 0
        for shape, point_mass in itertools.product(shapes, (False, True)):
            batch = grid_cases(chain.RULES[name], shape, point_mass, seed)
            evaluations += _run(verify_probs, name, batch, shape)
            cases += len(batch)
            exact += sum(case.exact for case in batch)
        reports[name] = Report(evaluations, cases, exact)
    return reports


@functools.cache
def dyadic_laws(vocab: int) -> list[Masses]:
    """Return all laws over ``vocab`` ids whose entries are zero or powers of two, none below 1/8."""
    entries = [Fraction(0), *(Fraction(1, 1 << k) for k in range(4))]
    return [row for row in itertools.product(entries, repeat=vocab) if sum(row) == 1]


@functools.cache
def grid_cases(rule: chain.Rule, shape: Shape, point_mass: bool, seed: int) -> list[Case]:
    """Return every draft of up to ``shape.drafted`` tokens under ``shape.models`` pairs of models."""
    cases = []
    for model in range(shape.models):
        for n in range(shape.drafted + 1):
            for tokens in itertools.product(range(shape.vocab), repeat=n):
                target = tuple(_row(shape.vocab, f"p {seed} {model} {tokens[:i]}") for i in range(n + 1))
                draft = tuple(_row(shape.vocab, f"q {seed} {model} {tokens[:i]}") for i in range(n))
                cases.append(_case(rule, target, None if point_mass else draft, tokens, shape.uniforms))
    return cases


def _row(vocab: int, seed: str) -> Masses:
    return random.Random(seed).choice(dyadic_laws(vocab))


def _case(
    rule: chain.Rule,
    target: tuple[Masses, ...],
    draft: tuple[Masses, ...] | None,
    tokens: tuple[int, ...],
    uniforms: Sequence[Fraction],
) -> Case:
    def program(choose: Choose) -> tuple[int, int]:
        return rule(target, draft, tokens, choose)

    law = enumerate_law(program, uniforms=uniforms)
    points = len(uniforms) ** _coordinates(rule, len(tokens))
    counts = {outcome: int(weight * points) for outcome, weight in law.items()}
    return Case(rule, target, draft, tokens, counts, law == enumerate_law(program))


def _coordinates(rule: chain.Rule, n: int) -> int:
    """Return how many uniforms can decide a case of n drafts: each of the tests, and what is drawn."""
    return 0 if rule is chain.greedy else n + 1


def _run(verify_probs: VerifyProbs, name: str, cases: Sequence[Case], shape: Shape) -> int:
    """Run all points of all cases in one call and compare the counts; return how many there were."""
    vocab, drafted, uniforms, _ = shape
    owner, accept, sample = _points(cases, drafted, uniforms)
    target = np.full((len(cases), drafted + 1, vocab), np.nan, np.float32)
    draft = np.full((len(cases), drafted, vocab), np.nan, np.float32)
    # Whatever ends a draft, and whatever stands behind its end.
    tokens = np.resize(np.array([-1, vocab, -7]), (len(cases), drafted))
    for i, case in enumerate(cases):
        n = len(case.tokens)
        target[i, : n + 1] = np.array(case.target, np.float64)
        tokens[i, :n] = case.tokens
        tokens[i, n + 1 :] = 0
        if case.draft:
            draft[i, :n] = np.array(case.draft, np.float64)
    result = verify_probs(
        target[owner],
        None if cases[0].draft is None else draft[owner],
        tokens[owner],
        rule=name,
        uniform_accept=accept if name in ("token", "block") else None,
        uniform_sample=None if name == "greedy" else sample,
    )
    accepted, following = np.asarray(result.num_accepted), np.asarray(result.next_token)
    _compare(cases, owner, accepted, following)
    _check_layout(result, tokens[owner])
    for b in random.Random(0).sample(range(len(owner)), min(_SPOTS, len(owner))):
        choose = Uniforms(accept=_fractions(accept[b]), sample=_fractions(sample[b]), invert=True)
        case = cases[owner[b]]
        expected = case.rule(case.target, case.draft, case.tokens, choose)
        if expected != (accepted[b], following[b]):
            raise AssertionError(
                f"uniforms {accept[b].tolist()} and {sample[b].tolist()} give {(accepted[b], following[b])}, "
                f"expected {expected}, for {case}"
            )
    return len(owner)


def _points(cases: Sequence[Case], drafted: int, uniforms: Sequence[Fraction]) -> tuple[Array, Array, Array]:
    """Return the case of every evaluation and its uniforms; coordinates that cannot matter are not multiplied out."""
    # The largest uniform goes in as 1, which counts as that.
    values = np.array([1.0 if u == LARGEST_UNIFORM else u for u in uniforms], np.float32)
    owner, accept, sample = [], [], []
    for i, case in enumerate(cases):
        n, count = len(case.tokens), _coordinates(case.rule, len(case.tokens))
        index = np.indices((len(uniforms),) * count).reshape(count, -1).T if count else np.zeros((1, 0), np.int64)
        owner.append(np.full(len(index), i))
        rows = np.full((2, len(index), drafted + 1), _UNREAD, np.float32)
        if case.rule is chain.match:
            rows[1, :, : n + 1] = values[index]
        elif count:
            rows[0, :, :n] = values[index[:, :n]]
            # One of these is read; each takes every value, but no two the same one.
            rows[1] = values[(index[:, n:] + np.arange(drafted + 1)) % len(uniforms)]
        accept.append(rows[0, :, :drafted])
        sample.append(rows[1])
    return np.concatenate(owner), np.concatenate(accept), np.concatenate(sample)


def _fractions(uniforms: Array) -> list[Fraction]:
    return [Fraction(u) for u in uniforms.tolist()]


def _compare(cases: Sequence[Case], owner: Array, accepted: Array, following: Array) -> None:
    keys, counts = np.unique(np.stack([owner, accepted, following]), axis=1, return_counts=True)
    actual: list[dict[Any, int]] = [{} for _ in cases]
    for (i, a, x), count in zip(keys.T.tolist(), counts.tolist(), strict=True):
        actual[i][a, x] = count
    for case, found in zip(cases, actual, strict=True):
        if found != case.counts:
            raise AssertionError(f"(accepted, next) came out as {found}, expected {case.counts}, for {case}")


def _check_layout(result: VerifyResult, drafts: Array) -> None:
    """Check that what is emitted is the accepted drafts and the next token, padded with -1."""
    accepted, emitted = np.asarray(result.num_accepted)[:, None], np.asarray(result.tokens)
    padded = np.concatenate([drafts, np.full((len(drafts), 1), -1)], axis=1)
    position = np.arange(emitted.shape[1])
    expected = np.where(position < accepted, padded, -1)
    expected = np.where(position == accepted, np.asarray(result.next_token)[:, None], expected)
    if not np.array_equal(expected, emitted) or not np.array_equal(np.asarray(result.num_emitted), accepted[:, 0] + 1):
        raise AssertionError("tokens and num_emitted do not follow from num_accepted and next_token")


def batched(rule: chain.Rule, interpreter: Callable[..., Choose] = Uniforms) -> VerifyProbs:
    """Return a ``verify_probs`` that runs one rule row by row, whatever the name it is asked for."""

    def verify_probs(target: Array, draft: Array | None, tokens: Array, **options: Any) -> VerifyResult:
        accept, sample = options["uniform_accept"], options["uniform_sample"]

        def choose(b: int) -> Choose:
            given = (None if u is None else u[b].tolist() for u in (accept, sample))
            return interpreter(**dict(zip(("accept", "sample"), given, strict=True)), invert=True)

        def rows(b: int) -> tuple[chain.Laws, chain.Laws | None]:
            return target[b].tolist(), None if draft is None else draft[b].tolist()

        batch, drafted = tokens.shape
        length = np.full(batch, drafted)
        return chain.verify_rows(rule, rows, tokens, length, target.shape[2], None, map(choose, range(batch)))

    return verify_probs
