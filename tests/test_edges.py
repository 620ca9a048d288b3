"""What the operations do at their edges: dead rows, ends of drafts, masks, vocabularies, seeds, shapes and strides."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import draftproof as dp
from draftproof import Status, ValueRangeError, _dispatch
from draftproof._arrays import NumpyArrays
from draftproof.numerics.noise import uniform
from draftproof.rng.streams import accept_word
from draftproof.testing.strategies import logits as hard_logits

torch = pytest.importorskip("torch")

Arrays = Any
RULES = ("token", "block", "match", "greedy")
INF, NAN = float("inf"), float("nan")
DEAD = Status.NAN | Status.EMPTY_SUPPORT | Status.BAD_PROBABILITY | Status.BAD_PARAMETER


class System(NamedTuple):
    """A backend on arrays of one library. Called with an operation and NumPy arrays, it returns NumPy arrays."""

    put: Callable[[Arrays], Any]
    backend: str

    def __call__(self, operation: str, *arrays: Any, **given: Any) -> Any:
        def put(value: Any) -> Any:
            return self.put(value) if isinstance(value, np.ndarray) else value

        named = {name: put(value) for name, value in given.items()}
        result = getattr(dp, operation)(*map(put, arrays), **named, backend=self.backend)
        return type(result)(*map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)


def tensor(array: Arrays) -> Any:
    return torch.from_numpy(np.array(array))


CPU = [name for name in _dispatch.BACKENDS["cpu"] if dp.backends()["sample"][name] == "available"]
EAGER = System(np.asarray, "eager")
FAST = {f"{kind}-{name}": System(put, name) for name in CPU for kind, put in (("numpy", np.asarray), ("torch", tensor))}
SYSTEMS = {**FAST, "reference": System(np.asarray, "reference")}
EVERY = pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
EVERY_FAST = pytest.mark.parametrize("system", FAST.values(), ids=FAST)


def same(a: Any, b: Any) -> None:
    """Assert that two results agree in every bit."""
    for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def pick(result: Any, rows: Any) -> Any:
    """Some rows of a result."""
    return type(result)(*(a[rows] for a in result)) if isinstance(result, tuple) else result[rows]


class Round(NamedTuple):
    """The arrays of a batch of rounds of which some drafts are accepted and some are not."""

    target: Arrays
    draft: Arrays
    tokens: Arrays
    seed: Arrays
    offset: Arrays

    @property
    def streams(self) -> dict[str, Arrays]:
        return {"seed": self.seed, "offset": self.offset}


def make_round(batch: int = 24, drafted: int = 3, vocab: int = 6, draft_vocab: int | None = None) -> Round:
    rng = np.random.default_rng(5)
    target = rng.normal(size=(batch, drafted + 1, vocab)).astype(np.float32) * 2
    draft = rng.normal(size=(batch, drafted, draft_vocab or vocab)).astype(np.float32)
    # Half of the drafts are what greedy decoding would say.
    tokens = rng.integers(0, draft_vocab or vocab, (batch, drafted))
    tokens = np.where(rng.random(tokens.shape) < 0.5, target[:, :drafted].argmax(-1), tokens)
    return Round(target, draft, tokens, rng.integers(-(2**63), 2**63, batch), rng.integers(0, 1000, batch))


def check_layout(result: Any, tokens: Arrays) -> None:
    """``tokens`` and ``num_emitted`` follow from the accepted drafts, the next token and the end of emission."""
    for b, accepted in enumerate(result.num_accepted):
        emitted = [*tokens[b, :accepted], result.next_token[b]][: result.num_emitted[b]]
        assert result.num_emitted[b] in ((accepted + 1, accepted) if result.status[b] & DEAD == 0 else (0,))
        assert result.tokens[b].tolist() == emitted + [-1] * (tokens.shape[1] + 1 - len(emitted))


# --- bad rows --------------------------------------------------------------------------------------------------------

ROWS = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
SEEDS = np.arange(5) * 1001
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


# --- parameters on a device ------------------------------------------------------------------------------------------


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


# --- which rows a rule needs -----------------------------------------------------------------------------------------


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


# --- where a draft ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_ragged_drafts(system: System, rule: str) -> None:
    """``num_draft_tokens``, -1, and an invalid id end a draft alike: as if the arrays ended there."""
    target, draft, tokens, seed, offset = make_round()
    given = {"rule": rule, "seed": seed, "offset": offset}
    for n, rows in itertools.product(range(4), (draft, None)):
        short = system("verify", target[:, : n + 1], None if rows is None else rows[:, :n], tokens[:, :n], **given)
        length = np.full(24, n)
        check_end(system("verify", target, rows, tokens, num_draft_tokens=length, **given), short, n, 0)
        check_end(system("verify", target, rows, tokens, num_draft_tokens=n, **given), short, n, 0)
        # Whatever follows the end is not looked at, ids out of range included.
        for end, flag in ((-1, 0), (-(2**40), 4), (6, 4)) if n < 3 else ():
            cut = tokens.copy()
            cut[:, n], cut[:, n + 1 :] = end, 2**50
            check_end(system("verify", target, rows, cut, **given), short, n, flag)
            check_end(system("verify", target, rows, cut, num_draft_tokens=n, **given), short, n, 0)


def check_end(result: Any, short: Any, n: int, flag: int) -> None:
    same(result._replace(tokens=result.tokens[:, : n + 1], status=result.status ^ flag), short)
    assert (result.tokens[:, n + 1 :] == -1).all()


@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_end_of_sequence(system: System, rule: str) -> None:
    """The draft is cut after its first eos; if that is accepted, emission ends with it and the bonus is only told."""
    target, draft, tokens, seed, offset = make_round(64)
    given = {"rule": rule, "seed": seed, "offset": offset, "temperature": 0.5, "check": False}
    rng = np.random.default_rng(2)
    per_row = rng.integers(-1, 6, (64, 2))
    length = rng.integers(0, 4, 64)
    finishes = 0
    for eos in (0, np.array([1, 4]), per_row, -1, np.array([], int)):
        ids = np.broadcast_to(np.atleast_1d(eos), (64, np.atleast_1d(eos).shape[-1]))
        ends = [[int(t) in set(ids[b]) - {-1} for t in tokens[b, : length[b]]] for b in range(64)]
        n = np.array([e.index(True) + 1 if any(e) else len(e) for e in ends])
        by_eos = np.array([any(e) for e in ends])
        cut = system("verify", target, draft, tokens, num_draft_tokens=n, **given)
        finished = by_eos & (cut.num_accepted == n)
        finishes += finished.sum()
        next_ends = (cut.next_token[:, None] == np.where(ids < 0, -2, ids)).any(1)
        laid_out = cut.tokens.copy()
        laid_out[finished, n[finished]] = -1
        expected = cut._replace(
            tokens=laid_out, num_emitted=cut.num_emitted - finished, eos_hit=finished | (next_ends & ~finished)
        )
        result = system("verify", target, draft, tokens, num_draft_tokens=length, eos=eos, **given)
        same(result, expected)
        check_layout(result, tokens)
        # A bad bonus row after an accepted eos spoils nothing but the bonus; rows beyond it are never read.
        spoilt = target.copy()
        spoilt[np.arange(64), n] = NAN
        spoilt[np.arange(4) > n[:, None]] = NAN
        late = system("verify", spoilt, draft, tokens, num_draft_tokens=length, eos=eos, **given)
        same(pick(late, finished), pick(expected._replace(next_token=np.full(64, -1)), finished))
        other = ~finished & (cut.num_accepted < n)
        same(pick(late, other), pick(expected, other))
    assert finishes > 10


@EVERY
def test_invalid_id_after_an_eos_is_not_seen(system: System) -> None:
    target, _, tokens, _, _ = make_round(1)
    tokens[0] = [target[0, 0].argmax(), 77, 0]
    result = system("verify_greedy", target, tokens, eos=int(tokens[0, 0]))
    assert (result.status[0], result.num_accepted[0], result.eos_hit[0]) == (0, 1, True)
    assert system("verify_greedy", target, tokens).status[0] == Status.INVALID_DRAFT_ID
    # It says what ended the draft, whatever was accepted.
    tokens[0, 0] = (tokens[0, 0] + 1) % 6
    result = system("verify_greedy", target, tokens)
    assert (result.num_accepted[0], result.status[0]) == (0, Status.INVALID_DRAFT_ID)


@EVERY
def test_information(system: System) -> None:
    """OFF_SUPPORT and RESIDUAL_FALLBACK, for the tests that were made and no others; the tokens are right."""

    def run(p: Any, q: Any, tokens: list[int], rule: str = "token", u: float = 0.5) -> tuple[int, int, int]:
        p, q = np.array([p], np.float32), np.array([q], np.float32)
        uniforms = np.full((1, 3), u, np.float32)
        given = {"uniform_accept": uniforms[:, :2], "uniform_sample": uniforms}
        result = system("verify_probs", p, q, np.array([tokens]), rule=rule, **given)
        return int(result.num_accepted[0]), int(result.next_token[0]), int(result.status[0])

    half, first, second = [0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    for rule in ("token", "block"):
        # q(0) = 0 < p(0): accepted, and the caller learns that the draft was not drawn from q.
        assert run([half, half, second], [second, half], [0, 1], rule) == (2, 1, Status.OFF_SUPPORT)
        # p = q = 0 at the draft, p = q elsewhere: rejected, nothing left in the residual, drawn from p.
        assert run([second, second, first], [second, second], [0, 1], rule, 0.0) == (0, 1, 24)
    # The second test is not made by token, and is by block.
    assert run([first, first, first], [second, second], [1, 0]) == (0, 0, 0)
    assert run([first, first, first], [second, second], [1, 0], "block") == (0, 0, Status.OFF_SUPPORT)


# --- vocabularies, masks, penalties ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.02}], ids=["", "all"]
)
@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_draft_vocabulary(system: System, rule: str, filters: dict[str, Any]) -> None:
    """A draft vocabulary of another size is the same as -inf where one side has no logit."""

    def padded(rows: Arrays, vocab: int) -> Arrays:
        return np.pad(rows, ((0, 0), (0, 0), (0, vocab - rows.shape[-1])), constant_values=-INF)

    for draft_vocab in (4, 9):
        target, draft, tokens, seed, offset = make_round(48, 3, 6, draft_vocab)
        given = {"rule": rule, "seed": seed, "offset": offset, **filters}
        result = system("verify", target, draft, tokens, **given)
        same(result, system("verify", padded(target, 9), padded(draft, 9), tokens, **given))
        assert (result.status & Status.INVALID_DRAFT_ID == 0).all()
        assert result.tokens.max() < 6
        check_layout(result, tokens)
        if rule in ("token", "block"):
            probs = system("verify_probs", np.exp(target), np.exp(draft), tokens, rule=rule, seed=seed)
            zeros = [np.where(np.isinf(padded(rows, 9)), 0, np.exp(padded(rows, 9))) for rows in (target, draft)]
            same(probs, system("verify_probs", *zeros, tokens, rule=rule, seed=seed))


def packed(mask: Arrays) -> Arrays:
    """The mask as int32 words; bits at or above V are garbage."""
    *lead, vocab = mask.shape
    words = -(-vocab // 32)
    bits = np.random.default_rng(3).random((*lead, words * 32)) < 0.5
    bits[..., :vocab] = mask
    return np.packbits(bits, axis=-1, bitorder="little").view("<i4").reshape(*lead, words).astype(np.int32)


@pytest.mark.parametrize("vocab", [1, 6, 31, 32, 33, 64, 70])
@EVERY
def test_mask(system: System, vocab: int) -> None:
    """A mask, bool or packed, is -inf where it forbids: bits at or above V are ignored."""
    rng = np.random.default_rng(vocab)
    rows = rng.normal(size=(5, vocab)).astype(np.float32)
    mask = rng.random((5, vocab)) < 0.5
    mask[np.arange(5), rng.integers(0, vocab, 5)] = True
    by_hand = np.where(mask, rows, -INF).astype(np.float32)
    for form in (mask, packed(mask)):
        for given in ({}, {"top_k": 3}, {"top_p": 0.7, "temperature": np.array([0, 1, 0.5, 2, 1])}):
            same(system("filter_logits", rows, mask=form, **given), system("filter_logits", by_hand, **given))
            same(system("sample", rows, mask=form, seed=SEEDS, **given), system("sample", by_hand, seed=SEEDS, **given))


@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_mask_per_position(system: System, rule: str) -> None:
    """In verification each position has its mask; it acts on the draft too, unless the draft has its own."""
    rng = np.random.default_rng(8)
    for draft_vocab in (6, 4, 9):
        target, draft, tokens, seed, offset = make_round(24, 3, 6, draft_vocab)
        given = {"rule": rule, "seed": seed, "offset": offset, "top_p": 0.95}
        mask = rng.random(target.shape) < 0.7
        mask[..., 0] = True
        own = rng.random(draft.shape) < 0.7
        own[..., 0] = True
        hidden = np.where(mask, target, -INF).astype(np.float32)
        # What the target's mask does not speak of is allowed in the draft.
        spoken = np.pad(mask[:, :3], ((0, 0), (0, 0), (0, 3)), constant_values=True)[..., :draft_vocab]
        alike = system("verify", hidden, np.where(spoken, draft, -INF).astype(np.float32), tokens, **given)
        apart = system("verify", hidden, np.where(own, draft, -INF).astype(np.float32), tokens, **given)
        for form, own_form in ((mask, own), (packed(mask), packed(own))):
            same(system("verify", target, draft, tokens, mask=form, **given), alike)
            same(system("verify", target, draft, tokens, mask=form, draft_mask=own_form, **given), apart)
        allowed = np.take_along_axis(mask, np.maximum(alike.tokens, 0)[..., None], -1)[..., 0]
        assert allowed[alike.tokens >= 0].all()
        same(
            system("verify", target, draft, tokens, draft_mask=own, **given),
            system("verify", target, np.where(own, draft, -INF).astype(np.float32), tokens, **given),
        )


def penalised(rows: Arrays, penalty: float, history: list[int]) -> Arrays:
    """By hand: once per id, ids outside the vocabulary are nobody's."""
    rows = rows.copy()
    for x in set(history):
        if 0 <= x < len(rows):
            rows[x] = rows[x] * np.float32(penalty) if rows[x] < 0 else rows[x] / np.float32(penalty)
    return rows


HISTORY = np.array([[0, 0, 3], [-1, 2, -1], [5, 5, 5], [-1, -1, -1], [99, 6, -7]])


@EVERY
def test_penalty(system: System) -> None:
    rows = np.concatenate([ROWS[:, :5], np.tile(np.float32([-0.0, INF, -INF]), (5, 1))], 1)
    for penalty in (1.3, 0.5):
        by_hand = np.array([penalised(r, penalty, h) for r, h in zip(rows, HISTORY.tolist(), strict=True)])
        for ids in (HISTORY, HISTORY.astype(np.int32)):
            result = system("filter_logits", rows, repetition_penalty=penalty, prev_tokens=ids)
            same(result, by_hand)
    # Without a history there is nothing to penalise.
    same(system("filter_logits", rows, repetition_penalty=2.0), rows)


@pytest.mark.parametrize("history", [HISTORY, None], ids=["history", "none"])
@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_penalty_sees_earlier_drafts(system: System, rule: str, history: Arrays) -> None:
    """Position i is penalised for the history and the drafts before it, on both sides, each by its own penalty."""
    for draft_vocab in (6, 9):
        target, draft, tokens, seed, offset = make_round(5, 3, 6, draft_vocab)
        before = [[]] * 5 if history is None else history.tolist()

        def by_hand(rows: Arrays, penalty: float) -> Arrays:
            return np.array(
                [
                    [penalised(row, penalty, before[b] + tokens[b, :i].tolist()) for i, row in enumerate(rows[b])]  # noqa: B023
                    for b in range(5)
                ]
            )

        given = {"rule": rule, "seed": seed, "offset": offset, "temperature": 0.8}
        for own in (None, 1, 0.5):
            result = system(
                "verify", target, draft, tokens, repetition_penalty=1.7, draft_repetition_penalty=own,
                prev_tokens=history, **given,
            )  # fmt: skip
            rows = by_hand(target, 1.7), by_hand(draft, own or 1.7)
            same(result, system("verify", *rows, tokens, **given))


@pytest.mark.parametrize("rule", ["token", "block"])
@EVERY
def test_draft_parameters_default_to_the_targets(system: System, rule: str) -> None:
    target, draft, tokens, seed, offset = make_round()
    given: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}
    streams = {"rule": rule, "seed": seed, "offset": offset}
    own = {f"draft_{name}": value for name, value in given.items()}
    result = system("verify", target, draft, tokens, **given, **streams)
    same(result, system("verify", target, draft, tokens, **given, **own, **streams))
    # Off is a value of its own.
    off = {"draft_temperature": 1, "draft_top_k": 0, "draft_top_p": 1, "draft_min_p": 0, "draft_repetition_penalty": 1}
    plain = system("verify", target, draft, tokens, **given, **off, **streams)
    assert not np.array_equal(plain.tokens, result.tokens)


# --- values of parameters --------------------------------------------------------------------------------------------


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


# --- match is sampling -----------------------------------------------------------------------------------------------


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


# --- uniforms --------------------------------------------------------------------------------------------------------


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


# --- seeds and offsets -----------------------------------------------------------------------------------------------


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


# --- shapes and layouts ----------------------------------------------------------------------------------------------


@EVERY
def test_small_shapes(system: System) -> None:
    for batch, vocab in itertools.product((0, 1, 3), (1, 2)):
        rows = np.zeros((batch, vocab), np.float32)
        seed = np.arange(batch)
        for given in (
            {},
            {"top_k": 1},
            {"top_k": 1, "top_p": 0.5, "min_p": 0.5, "temperature": 0.5},
            {"temperature": 0},
        ):
            assert system("sample", rows, seed=seed, **given).shape == (batch,)
            assert system("filter_logits", rows, **given).shape == (batch, vocab)
            assert system("sample_with_logprobs", rows, seed=seed, **given).kept.shape == (batch,)
        assert system("sample_probs", rows + 1, seed=7).shape == (batch,)
        for drafted, rule, point in itertools.product((0, 2), RULES, (True, False)):
            target, draft = (
                np.zeros((batch, drafted + 1, vocab), np.float32),
                np.zeros((batch, drafted, vocab), np.float32),
            )
            tokens = np.zeros((batch, drafted), np.int64)
            draft = None if point else draft
            for result in (
                system("verify", target, draft, tokens, rule=rule, seed=seed, top_k=1, eos=5),
                system("verify_probs", target + 1, None if point else draft + 1, tokens, rule=rule, seed=1),
                system("verify_greedy", target, tokens),
            ):
                assert [a.shape for a in result] == [
                    (batch,),
                    (batch,),
                    (batch, drafted + 1),
                    (batch,),
                    (batch,),
                    (batch,),
                ]
                check_layout(result, tokens)
                if vocab == 1:
                    assert (result.num_accepted == drafted).all()
                    assert (result.tokens == 0).all()


@EVERY
def test_types_of_results(system: System) -> None:
    result = dp.sample_with_logprobs(system.put(ROWS), seed=1, backend=system.backend)
    assert all(type(a) is type(system.put(ROWS)) for a in result)
    names = [str(a.dtype).removeprefix("torch.") for a in result]
    assert names == ["int64", "float32", "float32", "int64", "int32"]
    target, draft, tokens, _, _ = make_round(3)
    verified = dp.verify(*map(system.put, (target, draft, tokens)), seed=1, backend=system.backend)
    assert all(type(a) is type(system.put(ROWS)) for a in verified)
    names = [str(a.dtype).removeprefix("torch.") for a in verified]
    assert names == ["int64", "int64", "int64", "int64", "bool", "int32"]
    columns = [verified.num_accepted, verified.next_token, verified.eos_hit]
    packed = verified.packed()
    assert type(packed) is type(verified.tokens)
    assert str(packed.dtype).removeprefix("torch.") == "int32"
    assert packed.tolist() == [list(map(int, row)) for row in zip(*columns, strict=True)]
    for dtype in (np.float16, np.float64):
        assert system("filter_logits", ROWS.astype(dtype)).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
@EVERY
def test_types_of_ids(system: System, dtype: Any) -> None:
    target, draft, tokens, seed, _ = make_round()
    eos = np.array([2, 5])
    given = {"repetition_penalty": 2.0, "seed": seed}
    expected = system("verify", target, draft, tokens, prev_tokens=tokens, eos=eos, **given)
    as_type = {"prev_tokens": tokens.astype(dtype), "eos": eos.astype(dtype)}
    same(system("verify", target, draft, tokens.astype(dtype), **as_type, **given), expected)
    listed = {"prev_tokens": tokens.tolist(), "eos": eos.tolist()}
    same(system("verify", target, draft, tokens.tolist(), **listed, **given), expected)


def unaligned(a: Arrays) -> Arrays:
    return np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape)


def read_only(a: Arrays) -> Arrays:
    a = a.copy()
    a.flags.writeable = False
    return a


NUMPY_VIEWS: dict[str, Callable[[Arrays], Arrays]] = {
    "column-major": np.asfortranarray,
    "reversed": lambda a: np.flip(np.flip(a).copy()),
    "every second": lambda a: np.kron(a, np.ones((2,) * a.ndim, a.dtype))[(slice(None, None, 2),) * a.ndim],
    "offset": lambda a: np.pad(a, 1)[(slice(1, -1),) * a.ndim],
    "read-only": read_only,
    "unaligned": unaligned,
}
TORCH_VIEWS: dict[str, Callable[[Arrays], Any]] = {
    "transposed": lambda a: tensor(np.moveaxis(a, 0, -1)).movedim(-1, 0),
    "every second": lambda a: tensor(np.kron(a, np.ones((2,) * a.ndim, a.dtype)))[(slice(None, None, 2),) * a.ndim],
    "offset": lambda a: tensor(np.pad(a, 1))[(slice(1, -1),) * a.ndim],
}
VIEWS = {
    f"{kind} {name}": (system, view)
    for kind, system in SYSTEMS.items()
    for name, view in (TORCH_VIEWS if system.put is tensor else NUMPY_VIEWS).items()
}


@pytest.mark.parametrize(("system", "view"), VIEWS.values(), ids=VIEWS)
def test_views(system: System, view: Callable[[Arrays], Any]) -> None:
    """Layout changes nothing, and no input is written to."""
    target, draft, tokens, seed, offset = make_round()
    arrays = {
        "mask": np.random.default_rng(0).random(target.shape) < 0.9,
        "prev_tokens": tokens,
        "temperature": np.linspace(0, 2, 24).astype(np.float32),
        "top_k": np.arange(24) % 5,
        "top_p": np.linspace(0.5, 1, 24),
        "min_p": np.linspace(0, 0.1, 24),
        "repetition_penalty": np.linspace(1, 2, 24),
        "num_draft_tokens": np.arange(24) % 4,
        "eos": tokens[:, :1],
        "seed": seed,
        "offset": offset,
    }
    per_row = {name: a for name, a in arrays.items() if name not in ("mask", "num_draft_tokens", "eos")}
    plain = System(lambda a: a, system.backend)

    def viewed(value: Arrays) -> Any:
        made = view(value)
        np.testing.assert_array_equal(np.asarray(made), value)
        originals.append((made, np.array(np.asarray(made))))
        return made

    originals: list[tuple[Any, Arrays]] = []
    for rule in RULES:
        expected = system("verify", target, draft, tokens, rule=rule, **arrays)
        rows = map(viewed, (target, draft, tokens))
        same(plain("verify", *rows, rule=rule, **{n: viewed(a) for n, a in arrays.items()}), expected)
        expected = system("verify_probs", np.exp(target), np.exp(draft), tokens, rule=rule, seed=seed)
        same(
            plain("verify_probs", *map(viewed, (np.exp(target), np.exp(draft), tokens)), rule=rule, seed=viewed(seed)),
            expected,
        )
    same(plain("verify_greedy", viewed(target), viewed(tokens)), system("verify_greedy", target, tokens))
    one = {**per_row, "mask": arrays["mask"][:, 0]}
    filtered = {n: a for n, a in one.items() if n not in ("seed", "offset")}
    for operation, given in (("sample_with_logprobs", one), ("sample", one), ("filter_logits", filtered)):
        result = plain(operation, viewed(target[:, 0]), **{n: viewed(a) for n, a in given.items()})
        same(result, system(operation, target[:, 0], **given))
    same(
        plain("sample_probs", viewed(np.exp(target[:, 0])), seed=seed),
        system("sample_probs", np.exp(target[:, 0]), seed=seed),
    )
    for made, original in originals:
        np.testing.assert_array_equal(np.asarray(made), original)


@EVERY
def test_one_row_expanded_over_the_batch(system: System) -> None:
    """A stride of 0 along the batch is one row in memory, and means the same as copies of it."""
    target, draft, tokens, seed, offset = make_round(50)
    for given in ({}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0}, {"repetition_penalty": 1.5}):
        row = target[0, 0]
        expanded = np.broadcast_to(row, (50, 6)) if system.put is not tensor else tensor(row).expand(50, 6)
        plain = System(lambda a: a, system.backend)
        copies = np.tile(row, (50, 1))
        seeds = {"seed": system.put(seed), "offset": system.put(offset)}
        same(
            plain("sample_with_logprobs", expanded, **seeds, **given),
            system("sample_with_logprobs", copies, seed=seed, offset=offset, **given),
        )
        for rule in RULES:
            rows = target[0], draft[0]
            if system.put is tensor:
                wide = [tensor(a).expand(50, *a.shape) for a in rows]
            else:
                wide = [np.broadcast_to(a, (50, *a.shape)) for a in rows]
            same(
                plain("verify", *wide, system.put(tokens), rule=rule, **seeds, **given),
                system(
                    "verify",
                    *(np.tile(a, (50, 1, 1)) for a in rows),
                    tokens,
                    rule=rule,
                    seed=seed,
                    offset=offset,
                    **given,
                ),
            )


@EVERY_FAST
def test_rows_far_apart(system: System, tmp_path: Path) -> None:
    """Rows more than 2^31 elements apart: a sparse file that is never read in between."""
    far = 2**31 + 7
    file = tmp_path / "logits"
    with file.open("wb") as stream:
        stream.truncate((far + 64) * 4)
    stored = np.memmap(file, np.float32, "r+")
    rows = ROWS[:2]
    stored[:40], stored[far : far + 40] = rows
    wide = np.lib.stride_tricks.as_strided(np.asarray(stored), (2, 40), (far * 4, 4))
    wide = torch.from_numpy(wide) if system.put is tensor else wide
    plain = System(lambda a: a, system.backend)
    for given in ({}, {"top_k": 5, "top_p": 0.9}):
        seed = system.put(SEEDS[:2])
        same(plain("sample", wide, seed=seed, **given), system("sample", rows, seed=SEEDS[:2], **given))
        tokens = system.put(np.zeros((2, 0), np.int64))
        result = plain("verify", wide[:, None], None, tokens, seed=seed, **given)
        same(result, system("verify", rows[:, None], None, np.zeros((2, 0), np.int64), seed=SEEDS[:2], **given))


# --- the same token everywhere ---------------------------------------------------------------------------------------

BATCH = 64
GIVEN: dict[str, Any] = {
    "temperature": np.array([0, 0.5, 1, 2])[np.arange(BATCH) % 4],
    "top_k": np.array([0, 1, 5, 50, 1000])[np.arange(BATCH) % 5],
    "top_p": np.array([1, 0.9, 0.5])[np.arange(BATCH) % 3],
    "min_p": np.array([0, 0.05])[np.arange(BATCH) % 2],
    "repetition_penalty": np.array([1, 1.3, 0.7])[np.arange(BATCH) // 2 % 3],
}


def everywhere(vocab: int = 130) -> tuple[Round, dict[str, Any]]:
    """A batch with all parameters different, on the grid of bfloat16 so that ties abound."""
    made = make_round(BATCH, 3, vocab)
    coarse = [np.asarray(tensor(a).bfloat16().float()) for a in (made.target, made.draft)]
    history = np.random.default_rng(3).integers(-1, vocab, (BATCH, 7))
    return made._replace(target=coarse[0], draft=coarse[1]), {**GIVEN, "prev_tokens": history, **made.streams}


def all_results(system: System, made: Round, given: dict[str, Any]) -> list[Any]:
    streams = {name: given[name] for name in ("seed", "offset")}
    filters = {name: value for name, value in given.items() if name not in streams}
    probs = np.exp(made.target), np.exp(made.draft)
    return [
        system("sample_with_logprobs", made.target[:, 0], **given),
        system("sample", made.target[:, 0], draft_index=2, **given),
        system("filter_logits", made.target[:, 0], **filters),
        system("sample_probs", probs[0][:, 0], **streams),
        *(system("verify", made.target, made.draft, made.tokens, rule=rule, **given) for rule in RULES),
        *(system("verify", made.target, None, made.tokens, rule=rule, **given) for rule in RULES[:2]),
        *(system("verify_probs", *probs, made.tokens, rule=rule, **streams) for rule in RULES[:3]),
    ]


def rows_of(made: Round, given: dict[str, Any], rows: Any) -> tuple[Round, dict[str, Any]]:
    return Round(*(a[rows] for a in made)), {name: value[rows] for name, value in given.items()}


@functools.cache
def expected_everywhere() -> list[Any]:
    return all_results(EAGER, *everywhere())


@EVERY_FAST
def test_every_backend_and_library(system: System) -> None:
    for a, b in zip(expected_everywhere(), all_results(system, *everywhere()), strict=True):
        same(a, b)


@EVERY_FAST
def test_alone_and_permuted(system: System) -> None:
    """A row alone, or anywhere in any batch, gives the bits it gives among 64 others."""
    for rows in (np.random.default_rng(0).permutation(BATCH), [0], [29], [63]):
        for a, b in zip(expected_everywhere(), all_results(system, *rows_of(*everywhere(), rows)), strict=True):
            same(pick(a, rows), b)


@EVERY_FAST
def test_padded_vocabulary(system: System) -> None:
    """Ids that cannot be drawn at the end of the vocabulary change nothing."""
    made, given = everywhere()
    wide = [np.pad(a, ((0, 0), (0, 0), (0, 71)), constant_values=-INF) for a in (made.target, made.draft)]
    padded = all_results(system, made._replace(target=wide[0], draft=wide[1]), given)
    padded[2] = padded[2][:, :130]
    for a, b in zip(expected_everywhere(), padded, strict=True):
        same(a, b)


@EVERY_FAST
def test_batches_are_worked_on_in_pieces(system: System) -> None:
    """A batch of more than 2^18 logits, cut at other places than the implementation cuts it."""
    made = make_round(1200, 2, 300)
    filters = {"top_k": np.arange(1200) % 7, "top_p": np.linspace(0.5, 1, 1200)}
    given = {**filters, **made.streams}

    def run(rows: slice) -> list[Any]:
        part, own = Round(*(a[rows] for a in made)), {name: value[rows] for name, value in given.items()}
        return [
            system("sample_with_logprobs", part.target[:, 0], **own),
            *(system("verify", part.target, part.draft, part.tokens, rule=rule, **own) for rule in RULES),
        ]

    whole = run(slice(None))
    assert whole[1].tokens.max() > 0
    for rows in (slice(0, 1), slice(333, 1100)):
        for a, b in zip(whole, run(rows), strict=True):
            same(pick(a, rows), b)


@EVERY_FAST
def test_double_precision_is_rounded_first(system: System) -> None:
    made, given = everywhere()
    wide = [a.astype(np.float64) * (1 + 2**-40) for a in (made.target, made.draft)]
    result = system("verify", *wide, made.tokens, rule="token", **given)
    same(result, system("verify", made.target, made.draft, made.tokens, rule="token", **given))


HALVES = [(s, d) for s in FAST.values() for d in (("float16", "bfloat16") if s.put is tensor else ("float16",))]


@pytest.mark.parametrize(("system", "dtype"), HALVES)
def test_half_precision(system: System, dtype: str) -> None:
    """Half-precision rows give what their float32 values give."""
    made, given = everywhere()
    narrow = System(lambda a: system.put(a).to(getattr(torch, dtype)), system.backend)
    if system.put is not tensor:
        narrow = System(lambda a: a.astype(np.float16), system.backend)
    halves = [narrow.put(a) for a in (made.target, made.draft)]
    floats = [np.asarray(h.float() if system.put is tensor else h.astype(np.float32)) for h in halves]
    plain = System(lambda a: a, system.backend)
    named = {name: system.put(value) for name, value in given.items()}
    for rule in RULES[1:3]:
        result = plain("verify", *halves, system.put(made.tokens), rule=rule, **named)
        same(result, system("verify", *floats, made.tokens, rule=rule, **given))
    rows = halves[0][:, 0]
    same(plain("sample_with_logprobs", rows, **named), system("sample_with_logprobs", floats[0][:, 0], **given))
    filters = {name: value for name, value in given.items() if name not in ("seed", "offset")}
    named = {name: system.put(value) for name, value in filters.items()}
    same(plain("filter_logits", rows, **named), system("filter_logits", floats[0][:, 0], **filters))


@EVERY_FAST
def test_subnormals_flushed_by_the_caller(system: System) -> None:
    """The caller's flag is lifted while an operation runs, and stands afterwards."""
    tiny = np.tile(np.float32([[2e-38, 2.1e-38, -3e-38, 5e-38, 1e-42]]), (50, 1))
    made, given = everywhere()

    def results() -> list[Any]:
        return [
            *all_results(system, made, given),
            system("filter_logits", tiny, temperature=100, top_k=2),
            system("sample", tiny, temperature=1.3e-38, seed=np.arange(50)),
            system("sample_probs", abs(tiny), seed=np.arange(50)),
        ]

    expected = results()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = results()
        assert not (np.ones(1, np.int32).view(np.float32) * np.float32(1)).any()
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(expected, flushed, strict=True):
        same(a, b)


@hypothesis.given(rows=hard_logits(3, 9), seed=st.integers(-(2**63), 2**63 - 1), data=st.data())
@hypothesis.settings(max_examples=40)
def test_hard_rows(rows: Arrays, seed: int, data: st.DataObject) -> None:
    """Ties, signed zeros, subnormals and huge values: NumPy and torch agree, and a kept token comes out."""
    given = {
        "temperature": data.draw(st.sampled_from([0, 1e-40, 0.3, 1, 1e30])),
        "top_k": data.draw(st.sampled_from([None, 1, 3])),
        "top_p": data.draw(st.sampled_from([None, 0, 0.5, 0.999])),
        "min_p": data.draw(st.sampled_from([None, 1e-30, 0.5, 1])),
        "repetition_penalty": data.draw(st.sampled_from([None, 1e-5, 1.5])),
        "prev_tokens": np.array([[0, 1], [2, -1], [8, 9]]),
    }
    results = [system("sample_with_logprobs", rows, seed=seed, **given) for system in FAST.values()]
    filtered = [system("filter_logits", rows, **given) for system in FAST.values()]
    for result, kept in zip(results, filtered, strict=True):
        same(result, results[0])
        same(kept, filtered[0])
        assert (kept[np.arange(3), result.tokens] > -INF).all()
        assert result.kept.tolist() == (kept > -INF).sum(1).tolist()
