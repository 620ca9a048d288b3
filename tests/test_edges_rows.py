"""Bad rows, bad parameters on a device, and rows that a rule does not need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftproof import Status, ValueRangeError
from edges import (
    DEAD,
    EVERY,
    INF,
    NAN,
    ROWS,
    RULES,
    SEEDS,
    Arrays,
    System,
    check_layout,
    make_round,
    pick,
    same,
    tensor,
)

# --- bad rows ---------------------------------------------------------------------------------------------------------

BAD_LOGITS = {"one NaN": Status.NAN, "all NaN": Status.NAN, "all -inf": Status.EMPTY_SUPPORT}
BAD_PROBABILITIES = {
    "NaN": Status.BAD_PROBABILITY,
    "inf": Status.BAD_PROBABILITY,
    "negative": Status.BAD_PROBABILITY,
    "zeros": Status.EMPTY_SUPPORT,
}


def spoil(rows: Arrays, index: Any, how: str) -> Arrays:
    """A copy of the rows with a bad one."""
    rows = rows.copy()
    if how.startswith("one ") or how in ("NaN", "inf", "negative"):
        rows[(index, -1) if isinstance(index, int) else (*index, -1)] = {"inf": INF, "negative": -1}.get(how, NAN)
    else:
        rows[index] = {"all NaN": NAN, "all -inf": -INF, "zeros": 0}[how]
    return rows


@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("how", BAD_LOGITS)
@EVERY
def test_dead_row(system: System, how: str, bad: int) -> None:
    """A bad row gets token -1 and its flag; its neighbours do not change by a bit."""
    given = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
    others = [b for b in range(5) if b != bad]
    rows = spoil(ROWS, bad, how)
    clean = system("sample_with_logprobs", ROWS, seed=SEEDS, **given)
    result = system("sample_with_logprobs", rows, seed=SEEDS, check=False, **given)
    same(pick(result, others), pick(clean, others))
    assert result.tokens[bad] == -1
    assert np.isnan([result.logprobs[bad], result.raw_logprobs[bad]]).all()
    assert (result.kept[bad], result.status[bad]) == (0, BAD_LOGITS[how])
    same(system("sample", rows, seed=SEEDS, check=False, **given), result.tokens)
    filtered = system("filter_logits", rows, check=False, **given)
    same(pick(filtered, others), pick(system("filter_logits", ROWS, **given), others))
    assert np.isnan(filtered[bad]).all()


@pytest.mark.parametrize("how", BAD_PROBABILITIES)
@EVERY
def test_dead_row_of_probabilities(system: System, how: str) -> None:
    probs = abs(ROWS)
    rows = spoil(probs, 2, how)
    clean, result = system("sample_probs", probs, seed=SEEDS), system("sample_probs", rows, seed=SEEDS, check=False)
    assert result.tolist() == [-1 if b == 2 else token for b, token in enumerate(clean)]
    for rule in RULES:
        tokens = np.tile(np.arange(2), (5, 1))
        target = np.repeat(rows[:, None], 3, 1)
        result = system("verify_probs", target, None, tokens, rule=rule, seed=SEEDS, check=False)
        assert result.status.tolist() == [BAD_PROBABILITIES[how] if b == 2 else 0 for b in range(5)]
        assert (result.num_accepted[2], result.next_token[2], result.num_emitted[2]) == (0, -1, 0)
        assert (result.tokens[2].tolist(), result.eos_hit[2]) == ([-1] * 3, False)
        check_layout(result, tokens)


@EVERY
def test_masked_logits_are_not_looked_at(system: System) -> None:
    """NaN, infinities and the maximum behind a mask change nothing; a mask of nothing is an empty support."""
    mask = np.ones((5, 40), bool)
    mask[:, 7] = False
    mask[3] = False
    expected = None
    for hidden in (0.0, NAN, INF, 1e30, -INF):
        rows = ROWS.copy()
        rows[:, 7] = hidden
        result = system("sample_with_logprobs", rows, mask=mask, top_p=0.8, seed=SEEDS, check=False)
        expected = expected or result
        same(result.tokens, expected.tokens)
        same(result.logprobs, expected.logprobs)
        assert result.status.tolist() == [0, 0, 0, Status.EMPTY_SUPPORT, 0]
    # The raw log-probability is that of the logits as given: NaN where they hold one.
    rows[:, 7] = NAN
    assert np.isnan(system("sample_with_logprobs", rows, mask=mask, seed=SEEDS, check=False).raw_logprobs).all()


CHECKED: dict[str, Callable[..., Any]] = {
    "sample": lambda s, **g: s("sample", spoil(ROWS, 2, "all NaN"), seed=SEEDS, **g),
    "sample_with_logprobs": lambda s, **g: s("sample_with_logprobs", spoil(ROWS, 2, "all NaN"), seed=SEEDS, **g),
    "filter_logits": lambda s, **g: s("filter_logits", spoil(ROWS, 2, "all NaN"), **g),
    "sample_probs": lambda s, **g: s("sample_probs", spoil(abs(ROWS), 2, "zeros"), seed=SEEDS, **g),
    "verify": lambda s, **g: s(
        "verify", spoil(ROWS, 2, "all NaN")[:, None], None, np.zeros((5, 0), int), seed=SEEDS, **g
    ),
    "verify_probs": lambda s, **g: s(
        "verify_probs", spoil(abs(ROWS), 2, "zeros")[:, None], None, np.zeros((5, 0), int), seed=SEEDS, **g
    ),
    "verify_greedy": lambda s, **g: s("verify_greedy", spoil(ROWS, 2, "all NaN")[:, None], np.zeros((5, 0), int), **g),
}


@pytest.mark.parametrize("operation", CHECKED)
@EVERY
def test_check(system: System, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a dead row raises unless check=False; on a device, where looking costs a wait, if check=True."""
    call = CHECKED[operation]
    for check in (None, True):
        with pytest.raises(ValueRangeError, match=rf"^{operation}: row 2 "):
            call(system, check=check)
    expected = call(system, check=False)
    if system.put is tensor and system.backend == "eager":
        elsewhere(monkeypatch)
        same(call(system, check=None), expected)
        same(call(system, check=False), expected)
        with pytest.raises(ValueRangeError, match=rf"^{operation}: row 2 "):
            call(system, check=True)


# --- parameters on a device -------------------------------------------------------------------------------------------


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch tensors pass for tensors of a device, whose values nobody looks at."""
    from draftproof._torch_arrays import TorchArrays

    monkeypatch.setattr(TorchArrays, "on_host", staticmethod(lambda _: False))


BAD_PARAMETERS: dict[str, tuple[Any, Any]] = {  # name -> (good, bad)
    "temperature": (0.7, [-1.0, NAN, INF]),
    "top_k": (3, [-2]),
    "top_p": (0.9, [1.5, -0.1, NAN]),
    "min_p": (0.1, [1.5, -0.1, NAN]),
    "repetition_penalty": (1.5, [0.0, -1.0, NAN, INF]),
    "offset": (7, [-1]),
}


@pytest.mark.parametrize("name", [*BAD_PARAMETERS, "draft_index"])
def test_bad_parameter_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)
    system = System(tensor, "eager")
    good, bad = BAD_PARAMETERS.get(name, (3, [-1, 1 << 24]))
    given = {"prev_tokens": np.tile(np.arange(3), (5, 1))}
    clean = system("sample_with_logprobs", ROWS, seed=SEEDS, **given, **{name: np.full(5, good)})
    for value in bad:
        column = np.full(5, good)
        column[2] = value
        result = system("sample_with_logprobs", ROWS, seed=SEEDS, **given, **{name: column})
        others = [0, 1, 3, 4]
        same(pick(result, others), pick(clean, others))
        assert (result.tokens[2], result.kept[2], result.status[2]) == (-1, 0, Status.BAD_PARAMETER)
        assert np.isnan([result.logprobs[2], result.raw_logprobs[2]]).all()
        with pytest.raises(ValueRangeError, match=r"^sample: row 2 has a parameter out of range; .* status 64"):
            system("sample", ROWS, seed=SEEDS, check=True, **given, **{name: column})


@pytest.mark.parametrize("rule", RULES)
def test_bad_parameter_of_verification_on_a_device(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)
    system = System(tensor, "eager")
    target, draft, tokens, seed, offset = make_round(5)
    names = [n for n in BAD_PARAMETERS if n != "offset"]
    cases: dict[str, tuple[Any, Any]] = {**BAD_PARAMETERS, **{f"draft_{n}": BAD_PARAMETERS[n] for n in names}}
    cases |= {"offset": (7, [-1, 2**63 - 3]), "num_draft_tokens": (2, [-1, 4])}
    for name, (good, bad) in cases.items():
        given = {"seed": seed, "offset": offset, "rule": rule, name: np.full(5, good)}
        clean = system("verify", target, draft, tokens, **given)
        for value in bad:
            given[name] = np.array([good, good, value, good, good])
            result = system("verify", target, draft, tokens, **given)
            others = [0, 1, 3, 4]
            same(pick(result, others), pick(clean, others))
            dead = [a[2].tolist() for a in result]
            assert dead == [0, -1, [-1] * 4, 0, False, Status.BAD_PARAMETER], name
    uniforms = np.full((5, 4), 0.5)
    uniforms[2, 1] = NAN
    for given in ({"uniform_accept": uniforms[:, :3]}, {"uniform_sample": uniforms}):
        result = system("verify_probs", abs(target), abs(draft), tokens, rule=rule, seed=seed, **given)
        assert (result.status & Status.BAD_PARAMETER).tolist() == [0, 0, Status.BAD_PARAMETER, 0, 0]


# --- which rows a rule needs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["verify", "verify_probs"])
@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_rows_that_are_needed(system: System, rule: str, operation: str) -> None:
    """Every row poisoned in turn: those the rule needs kill the sequence, all others leave every bit as it was."""
    target, draft, tokens, seed, offset = make_round()
    length = np.arange(24) % 4
    if operation == "verify_probs":
        target, draft = np.exp(target), np.exp(draft)
    given = {"rule": rule, "num_draft_tokens": length, "seed": seed, "offset": offset, "check": False}
    clean = system(operation, target, draft, tokens, **given)
    tau = clean.num_accepted
    assert len(set(tau)) > 2, "the rounds must end in different places"
    assert (clean.status & DEAD == 0).all()
    ratio = rule in ("token", "block")
    for i in range(4):
        needed = i <= np.maximum(tau, length - 1) if rule == "block" else i <= tau
        check_poisoned(system(operation, poison(target, i), draft, tokens, **given), clean, needed)
        if i < 3:
            needed = i < length if rule == "block" else (i <= np.minimum(tau, length - 1)) & ratio
            check_poisoned(system(operation, target, poison(draft, i), tokens, **given), clean, needed)


def poison(rows: Arrays, i: int) -> Arrays:
    rows = rows.copy()
    rows[:, i] = NAN
    return rows


def check_poisoned(result: Any, clean: Any, needed: Arrays) -> None:
    same(pick(result, ~needed), pick(clean, ~needed))
    dead = pick(result, needed)
    assert (dead.status & DEAD != 0).all()
    assert not dead.num_accepted.any()
    assert not dead.num_emitted.any()
    assert not dead.eos_hit.any()
    assert (dead.next_token == -1).all()
    assert (dead.tokens == -1).all()


@EVERY
def test_rows_that_greedy_needs(system: System) -> None:
    target, _, tokens, _, _ = make_round()
    clean = system("verify_greedy", target, tokens, check=False)
    for i in range(4):
        check_poisoned(system("verify_greedy", poison(target, i), tokens, check=False), clean, i <= clean.num_accepted)
