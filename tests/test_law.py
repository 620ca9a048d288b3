"""The law of every lossless rule, exactly; the mutants that the kit must tell from it; implementations on the grid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import draftproof
from draftproof import testing
from draftproof._dispatch import BACKENDS, REFERENCE
from draftproof.rng.uniforms import Choose
from draftproof.testing import Model, ReusedDraw, System, check_law, enumerate_law, grid, strategies
from draftproof.verification.chain import reference as chain
from draftproof.verification.chain.reference import RULES

FEATURES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "point mass": {"point_mass": True},
    "ragged": {"ragged": True},
    "ragged point mass": {"ragged": True, "point_mass": True},
    "eos": {"eos": frozenset([1])},
    "ragged point mass with two eos": {"eos": frozenset([0, 2]), "point_mass": True, "ragged": True},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": Fraction(3, 5)},
}
lossless = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@lossless
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_speculation_has_the_target_law(rule: chain.Rule, features: dict[str, Any]) -> None:
    @hypothesis.settings(max_examples=30)
    @hypothesis.given(st.one_of(strategies.models(3, drafted, **features) for drafted in (0, 1, 2)))
    def check(model: Model) -> None:
        check_law(System(rule=rule), [model])

    check()
    check_law(System(rule=rule), testing.models(8, vocab=4, drafted=2, **features))


@lossless
@pytest.mark.parametrize("point_mass", [False, True])
def test_four_tokens_and_three_drafts(rule: chain.Rule, point_mass: bool) -> None:
    check_law(System(rule=rule), testing.models(8, vocab=4, drafted=3, point_mass=point_mass))


@lossless
def test_rounds_on_end(rule: chain.Rule) -> None:
    """Round after round, no random number used twice."""
    check_law(System(rule=rule), testing.models(8, vocab=2), to_end=True)
    check_law(System(rule=rule), testing.models(8, vocab=3, drafted=1), to_end=True)
    check_law(System(rule=rule), testing.models(8, vocab=2, ragged=True, eos=frozenset([1])), to_end=True)


@pytest.mark.parametrize("rule", [chain.token, chain.block, chain.match])
@hypothesis.settings(max_examples=60)
@hypothesis.given(strategies.distributions(4), strategies.distributions(4), strategies.distributions(4))
def test_one_draft_of_any_law(rule: chain.Rule, p: list[Fraction], q: list[Fraction], bonus: list[Fraction]) -> None:
    def program(choose: Choose) -> int:
        x = choose.race(q, draw=("draft", 0))
        accepted, following = rule([p, bonus], [q], [x], choose)
        return x if accepted else following

    assert enumerate_law(program) == {x: p_x for x, p_x in enumerate(p) if p_x}


def test_block_accepts_no_less_than_token() -> None:
    """The two toy laws of the paper: 10/9 and 11/9 accepted drafts on average."""
    p, q = (Fraction(1, 3), Fraction(2, 3)), (Fraction(2, 3), Fraction(1, 3))

    def accepted(rule: chain.Rule, choose: Choose) -> int:
        return rule([p] * 3, [q] * 2, [choose.race(q, draw=("draft", i)) for i in range(2)], choose)[0]

    means = [
        sum(n * weight for n, weight in enumerate_law(functools.partial(accepted, rule)).items())
        for rule in (chain.token, chain.block)
    ]
    assert means == [Fraction(10, 9), Fraction(11, 9)]


# --- the kit must tell right from wrong ------------------------------------------------------------------------------


@functools.cache
def passes(check: Callable[[System], None], original: System) -> bool:
    check(original)
    return True


@pytest.mark.parametrize("name", testing.MUTANTS)
def test_mutant_is_dead(name: str) -> None:
    mutant = testing.MUTANTS[name]
    assert passes(mutant.check, mutant.original)
    with pytest.raises(AssertionError):
        mutant.check(mutant.system)


def test_mutants_are_many_and_described() -> None:
    assert len(testing.MUTANTS) >= 20
    assert all(mutant.description for mutant in testing.MUTANTS.values())


def test_shared_numbers_bias_the_law() -> None:
    """Private drafts keyed by position under block: not a matter of taste."""
    system = testing.MUTANTS["private drafts keyed by position"].system
    with pytest.raises(AssertionError, match=r"off by 0\.0327"):
        check_law(system, testing.models(1, vocab=2), to_end=True, shared=True)
    with pytest.raises(ReusedDraw):
        check_law(system, testing.models(1, vocab=2), to_end=True)


def test_enumerator_finds_its_own_faults() -> None:
    fickle = itertools.count()
    with pytest.raises(AssertionError, match="add up"):
        enumerate_law(lambda choose: choose.categorical([1, 1 + next(fickle)], draw=("emit", 0)))
    with pytest.raises(AssertionError, match="no law"):
        enumerate_law(lambda choose: choose.categorical([0, 0], draw=("emit", 0)))
    with pytest.raises(AssertionError, match="no law"):
        enumerate_law(lambda choose: choose.bernoulli(Fraction(3, 2), draw=("accept", 0)))


def test_boundaries_of_the_filters_on_logits() -> None:
    """The same boundaries from float32 logarithms: what the slack of top-p is for."""

    def kept(masses: Sequence[Any], *_: Any, **filters: Any) -> list[int]:
        logits = np.log(np.array([masses], np.float64)).astype(np.float32)
        filtered = draftproof.filter_logits(logits, **{name: np.float32(value) for name, value in filters.items()})[0]
        return [x for x in np.argsort(-logits[0], kind="stable").tolist() if filtered[x] > -np.inf]

    testing.check_kept(System(kept=kept))


# --- implementations on the grid -------------------------------------------------------------------------------------


def on_torch(target: Any, draft: Any, tokens: Any, **options: Any) -> Any:
    def tensor(value: Any) -> Any:
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    result = draftproof.verify_probs(
        tensor(target), tensor(draft), tensor(tokens), **{name: tensor(value) for name, value in options.items()}
    )
    return type(result)(*(array.numpy() for array in result))


AVAILABLE = [n for n in (*BACKENDS["cpu"], REFERENCE) if draftproof.backends()["verify_probs"][n] == "available"]
IMPLEMENTATIONS = {name: functools.partial(draftproof.verify_probs, backend=name) for name in AVAILABLE}
IMPLEMENTATIONS["torch"] = on_torch


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_grid(name: str) -> None:
    reports = testing.check_grid(IMPLEMENTATIONS[name], shapes=grid.SMALL if name == "reference" else grid.FULL)
    assert list(reports) == list(RULES)
    for rule, report in reports.items():
        assert report.exact >= report.cases / 3, rule
        assert rule == "greedy" or report.evaluations > 30 * report.cases


def test_grid_has_the_hard_cases() -> None:
    cases = [case for shape in grid.FULL for case in grid.grid_cases(chain.token, shape, False, 0)]
    impossible = [case for case in cases if any(q[x] == 0 for q, x in zip(case.draft or (), case.tokens, strict=True))]
    ended = [case for case in cases if len(case.tokens) < 3]
    assert len(impossible) > 100
    assert len(ended) > 100


@pytest.mark.parametrize("fault", ["accept", "sample", "row"])
def test_grid_finds_faults(fault: str) -> None:
    def verify_probs(target: Any, draft: Any, tokens: Any, **options: Any) -> Any:
        if fault == "accept":  # the next smaller uniform: `u <= r`
            options["uniform_accept"] = np.nextafter(options["uniform_accept"], np.float32(-1)).clip(0, 1)
        if fault == "sample":  # the uniform of another position
            options["uniform_sample"] = np.roll(options["uniform_sample"], 1, axis=1)
        if fault == "row":
            target = np.where(np.isnan(target), np.roll(target, 1, axis=1), target)[:, [1, *range(1, target.shape[1])]]
        return draftproof.verify_probs(target, draft, tokens, check=False, **options)

    with pytest.raises(AssertionError):
        testing.check_grid(verify_probs, rules=["token"], shapes=grid.SMALL)


@lossless
def test_streams_decide_as_uniforms_do(rule: chain.Rule) -> None:
    """From a seed, on rows that float32 holds exactly: equal to the reference, with no margin to excuse a row."""
    rng = np.random.default_rng(1)
    laws = np.array(grid.dyadic_laws(4), np.float64).astype(np.float32)
    rows, drafted = 1000, 3
    target, draft = (laws[rng.integers(len(laws), size=(rows, n))] for n in (drafted + 1, drafted))
    tokens = rng.integers(-1, 4, (rows, drafted))
    options = {
        "rule": rule.__name__,
        "seed": rng.integers(-(2**63), 2**63, rows),
        "offset": rng.integers(0, 2**62, rows),
        "eos": 3,
    }
    expected = draftproof.verify_probs(target, draft, tokens, backend="reference", **options)
    actual = draftproof.verify_probs(target, draft, tokens, backend="eager", **options)
    assert [a.tolist() for a in actual] == [a.tolist() for a in expected]
    assert set(actual.num_accepted.tolist()) == {0, 1, 2, 3}


# --- goodness of fit -------------------------------------------------------------------------------------------------


def test_g_test_sees_what_it_says() -> None:
    """At level 1 % and power 90 %: deviations of the detectable size are found, and the law itself is not accused."""
    rng = np.random.default_rng(3)
    law, draws, runs = np.array([0.25, 0.25, 0.2, 0.2, 0.0999, 1e-4]), 4000, 400
    claim = testing.g_test(rng.multinomial(draws, law), law, alpha=0.01, power=0.9)
    assert claim.cells == 5
    shift = claim.detectable * np.array([1, -1, 0, 0, 0, 0])

    def rejected(true: Any) -> int:
        return sum(testing.g_test(c, law).p_value < 0.01 for c in rng.multinomial(draws, true, runs))

    assert 0.85 * runs < rejected(law + shift)
    assert rejected(law) < 0.03 * runs


def test_g_test_knows_the_impossible() -> None:
    assert testing.g_test([999, 1000, 1], [0.5, 0.5, 0.0]).p_value == 0.0
    assert testing.g_test([2000, 0], [1.0, 0.0]).p_value == 1.0
    with pytest.raises(ValueError, match="too few"):
        testing.g_test([3, 4], [0.5, 0.5])
