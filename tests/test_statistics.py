"""The law of ``verify`` is the law of ``sample``: seeded G-tests of emitted tokens and of pairs of them.

The law itself is computed in float64 from ``filter_logits``, whose kept sets ``test_transformers`` checks. Every test
states, and holds to, the total variation that it would reject with a power of 0.99. What the slow tests measured is in
``results/``.
"""

from __future__ import annotations

import datetime
import itertools
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftproof
from draftproof.testing import g_test

DRAWS = 200_000
ALPHA = 1e-6 / 200
"""For each of the at most 200 G-tests here, so that together they reject what is right with probability 1e-6."""

BACKEND = "eager"
"""It prepares a row that a whole batch shares once; other backends give the same tokens, as ``test_bits`` shows."""

VOCAB = 64
FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 24, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}
COMBINATIONS = [names for n in range(len(FILTERS) + 1) for names in itertools.combinations(FILTERS, n)]
HISTORY = np.array([3, 60, 3, -1, 17])


def law_of(row: Any, mask: Any = None, history: Any = HISTORY, **filters: Any) -> Any:
    """The filtered law of one row of logits, float64."""
    mask = None if mask is None else mask[None]
    filtered = draftproof.filter_logits(row[None], mask=mask, prev_tokens=history[None], **filters)[0]
    weights = np.exp(filtered.astype(np.float64) - filtered.max())
    return weights / weights.sum()


def expand(value: Any, batch: int) -> Any:
    """One value for a whole batch, in the memory of one: prepared once, however many draws."""
    return np.broadcast_to(value, (batch, *value.shape))


def tally(pairs: Any, first: Any, second: Any) -> Any:
    """Count pairs ``[B, 2]`` of the given ids; others must not occur."""
    columns = []
    for tokens, ids in zip(pairs.T, (first, second), strict=True):
        assert np.isin(tokens, ids).all(), "a token was drawn that the filters remove"
        columns.append(np.searchsorted(ids, tokens))
    counts = np.bincount(columns[0] * len(second) + columns[1], minlength=len(first) * len(second))
    return counts.reshape(len(first), -1)


@dataclass
class Speculation:
    """Target rows 0 to 2, draft rows 0 and 1, and how they are filtered; the drafts' law is always another one."""

    target: Any  # float32 [3, V]
    draft: Any  # float32 [2, V]
    filters: dict[str, Any] = field(default_factory=dict)
    draft_filters: dict[str, Any] = field(default_factory=dict)
    mask: Any = None  # bool [3, V]

    @property
    def penalised(self) -> bool:
        """Whether a row depends on the tokens before it."""
        return "repetition_penalty" in self.filters

    def law(self, position: int, *before: int) -> Any:
        return self._law(self.target, position, before, self.filters)

    def draft_law(self, position: int, *before: int) -> Any:
        return self._law(self.draft, position, before, {**self.filters, **self.draft_filters})

    def _law(self, rows: Any, position: int, before: tuple[int, ...], filters: dict[str, Any]) -> Any:
        mask = None if self.mask is None else self.mask[position]
        return law_of(rows[position], mask, np.array([*HISTORY, *before]), **filters)

    def support(self, position: int) -> Any:
        """The ids that may follow whatever stands before a position, and perhaps some more."""
        return np.arange(self.target.shape[1]) if self.penalised else np.flatnonzero(self.law(position))

    def law_of_pairs(self) -> Any:
        """The law of two tokens in a row, over the supports of positions 0 and 1."""
        first, second = self.support(0), self.support(1)
        after = np.stack([self.law(1, x)[second] for x in first[: None if self.penalised else 1]])
        return self.law(0)[first, None] * after

    def drafts(self, draws: int) -> Any:
        """Two drafts for each of ``draws`` rounds, int64 ``[draws, 2]``."""
        rng = np.random.default_rng(draws)
        first = rng.multinomial(draws, self.draft_law(0))
        pairs = []
        for x in np.flatnonzero(first):
            second = rng.multinomial(first[x], self.draft_law(1, x))
            pairs += [(x, y, second[y]) for y in np.flatnonzero(second)]
        x, y, count = np.array(pairs).T
        return np.repeat(np.column_stack([x, y]), count, axis=0)

    def verify(self, tokens: Any, seed: Any, rule: str, before: Any = None, with_q: bool = True) -> Any:
        """Return what rounds emit, int64 ``[B, K+1]``, after ``before`` ``[B]`` if it is given.

        Rounds whose rows depend on their tokens run together where they have the same ones.
        """
        known = tokens if before is None else np.column_stack([before, tokens])
        emitted = np.empty((len(seed), tokens.shape[1] + 1), np.int64)
        ids, group = np.unique(known, axis=0, return_inverse=True) if self.penalised else (known, np.zeros(len(seed)))
        for number in range(int(group.max()) + 1):
            rows = np.flatnonzero(group == number)
            same = expand(ids[number], len(rows)) if self.penalised else known
            emitted[rows] = self._verify(same, 0 if before is None else 1, seed[rows], rule, with_q)
        return emitted

    def _verify(self, known: Any, position: int, seed: Any, rule: str, with_q: bool) -> Any:
        batch, last = known.shape
        rows = slice(position, last + 1)
        return draftproof.verify(
            expand(self.target[rows], batch),
            expand(self.draft[position:last], batch) if with_q else None,
            known[:, position:],
            rule=rule,
            **self.filters,
            **{f"draft_{name}": value for name, value in self.draft_filters.items()},
            mask=None if self.mask is None else expand(self.mask[rows], batch),
            prev_tokens=expand(np.append(HISTORY, known[0, :position]), batch),
            seed=seed,
            offset=position,
            backend=BACKEND,
        ).tokens

    def count_pairs(self, tokens: Any, rule: str, with_q: bool = True) -> Any:
        """Verify drafts ``[B, 2]`` and count the pairs emitted, over the supports.

        A round that emits one token is followed by a round without drafts.
        """
        seed = np.arange(len(tokens))
        pairs = self.verify(tokens, seed, rule, with_q=with_q)[:, :2]
        single = pairs[:, 1] < 0
        none = np.empty((int(single.sum()), 0), np.int64)
        pairs[single, 1] = self.verify(none, seed[single], rule, pairs[single, 0])[:, 0]
        return tally(pairs, self.support(0), self.support(1))


def mismatched(seed: int, vocab: int, scale: float = 1.5) -> tuple[Any, Any]:
    """Target rows ``[3, V]`` and draft rows ``[2, V]`` that differ from them by as much again."""
    rng = np.random.default_rng(seed)
    target = rng.normal(scale=scale, size=(3, vocab))
    return target.astype(np.float32), (target[:2] + rng.normal(size=(2, vocab))).astype(np.float32)


def check_pairs(counts: Any, law: Any, first: float, pairs: float) -> None:
    """Test the first tokens and the pairs; ``first`` and ``pairs`` are the deviations that this must be able to see."""
    assert counts[law == 0].sum() == 0
    for result, detectable in (
        (g_test(counts.sum(axis=1), law.sum(axis=1), alpha=ALPHA), first),
        (g_test(counts, law, alpha=ALPHA), pairs),
    ):
        assert result.detectable <= detectable
        assert result.p_value >= ALPHA, result


@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_every_combination_of_filters(rule: str, names: tuple[str, ...]) -> None:
    """Pairs of tokens from rounds of two drafts, drawn from flatter rows cut to four tokens.

    Every combination is verified with a mask under one of the rules and without under the other.
    Detected: 0.014 of total variation in the first token, 0.030 in the pairs.
    """
    target, draft = mismatched(11, VOCAB)
    masked = (len(names) + (rule == "block")) % 2 == 1
    mask = np.random.default_rng(12).random((3, VOCAB)) < 0.75 if masked else None
    filters = {name: FILTERS[name] for name in names}
    speculation = Speculation(target, draft, filters, {"temperature": 1.2, "top_k": 4}, mask)
    check_pairs(speculation.count_pairs(speculation.drafts(DRAWS), rule), speculation.law_of_pairs(), 0.014, 0.030)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "top_p": 0.95}], ids=["top_k", "temperature top_k top_p"])
def test_large_vocabulary(rule: str, more: dict[str, Any]) -> None:
    """V = 50257 with top-k 50 on both sides. Detected: 0.013 in the first token, 0.029 in the pairs."""
    target, draft = mismatched(13, 50_257, scale=3)
    speculation = Speculation(target, draft, {"top_k": 50, **more}, {"top_k": 50})
    assert (speculation.law_of_pairs() > 0).sum() > 400
    check_pairs(speculation.count_pairs(speculation.drafts(DRAWS), rule), speculation.law_of_pairs(), 0.013, 0.029)


SMALL = 16
TARGET, DRAFT = mismatched(14, SMALL)
SYSTEM = Speculation(TARGET, DRAFT, {"top_p": 0.98}, {"temperature": 1.5})
"""Both sides filtered alike but for the temperature."""


def draw(row: Any, seed: Any, **more: Any) -> Any:
    """One draw per seed from one row by ``sample``."""
    return draftproof.sample(expand(row, len(seed)), top_p=0.98, seed=seed, backend=BACKEND, **more)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_private_drafts(rule: str) -> None:
    """Drafts of ``sample`` with ``draft_index``, from the seed and offset of the round that verifies them.

    Detected: 0.012 in the first token, 0.020 in the pairs.
    """
    seed = np.arange(DRAWS)
    drafts = [draw(DRAFT[i], seed, temperature=1.5, draft_index=i) for i in range(2)]
    check_pairs(SYSTEM.count_pairs(np.column_stack(drafts), rule), SYSTEM.law_of_pairs(), 0.012, 0.020)


@pytest.mark.parametrize("shared", [True, False], ids=["shared noise", "own seeds"])
def test_match(shared: bool) -> None:
    """Rule match with drafts from the target's own noise, and with independent ones. Detected: 0.012 and 0.020."""
    seed = np.arange(DRAWS)
    drafts = [draw(DRAFT[i], seed if shared else seed + DRAWS, temperature=1.5, offset=i) for i in range(2)]
    check_pairs(SYSTEM.count_pairs(np.column_stack(drafts), "match"), SYSTEM.law_of_pairs(), 0.012, 0.020)


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_point_mass(rule: str) -> None:
    """Deterministic drafts, the most likely tokens: no draft rows. Detected: 0.012 and 0.020."""
    drafts = expand(TARGET[:2].argmax(axis=1), DRAWS)
    check_pairs(SYSTEM.count_pairs(drafts, rule, with_q=False), SYSTEM.law_of_pairs(), 0.012, 0.020)


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_probabilities(rule: str) -> None:
    """``verify_probs`` with uniforms from a seed, on rows of probabilities. Detected: 0.012 and 0.020."""
    p = np.stack([SYSTEM.law(i) for i in range(3)]).astype(np.float32)
    q = np.stack([SYSTEM.draft_law(i) for i in range(2)]).astype(np.float32)
    seed = np.arange(DRAWS)
    rows = expand(p, DRAWS), expand(q, DRAWS), SYSTEM.drafts(DRAWS)
    pairs = draftproof.verify_probs(*rows, rule=rule, seed=seed, backend=BACKEND).tokens[:, :2]
    single = pairs[:, 1] < 0
    pairs[single, 1] = draftproof.sample_probs(expand(p[1], single.sum()), seed=seed[single], offset=1, backend=BACKEND)
    check_pairs(tally(pairs, SYSTEM.support(0), SYSTEM.support(1)), SYSTEM.law_of_pairs(), 0.012, 0.020)


NEIGHBOURS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "offsets": (
        {"seed": np.full(DRAWS, 5), "offset": 2 * np.arange(DRAWS)},
        {"seed": np.full(DRAWS, 5), "offset": 2 * np.arange(DRAWS) + 1},
    ),
    "seeds": ({"seed": 2 * np.arange(DRAWS)}, {"seed": 2 * np.arange(DRAWS) + 1}),
    "high bits of seeds": ({"seed": np.arange(DRAWS)}, {"seed": np.arange(DRAWS) + (1 << 32)}),
    "draft indices": ({"seed": np.arange(DRAWS), "draft_index": 0}, {"seed": np.arange(DRAWS), "draft_index": 1}),
    "draft and target": ({"seed": np.arange(DRAWS), "draft_index": 0}, {"seed": np.arange(DRAWS)}),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbouring_draws_are_independent(name: str) -> None:
    """Pairs of draws of ``sample`` whose keys differ by one. Detected: 0.012 in a draw, 0.020 in the pairs."""
    pairs = np.column_stack([draw(TARGET[i], **keys) for i, keys in enumerate(NEIGHBOURS[name])])
    check_pairs(tally(pairs, SYSTEM.support(0), SYSTEM.support(1)), SYSTEM.law_of_pairs(), 0.012, 0.020)


def test_rows_of_one_scalar_seed_are_independent() -> None:
    """Rows 2b and 2b + 1 of a batch. Detected: 0.012 in a row, 0.020 in the pairs."""
    rows = expand(TARGET[0], 2 * DRAWS)
    pairs = draftproof.sample(rows, top_p=0.98, seed=6, backend=BACKEND).reshape(-1, 2)
    support = SYSTEM.support(0)
    check_pairs(tally(pairs, support, support), np.multiply.outer(*[SYSTEM.law(0)[support]] * 2), 0.012, 0.020)


K = 4


def row_at(overlap: float) -> tuple[Any, Any]:
    """A target and a draft row, float32 ``[VOCAB]``, with this ``sum min(p, q)``."""
    target, noise = np.random.default_rng(15).normal(size=(2, VOCAB))
    low, high = 0.0, 10.0
    for _ in range(60):
        scale = (low + high) / 2
        draft = (target + scale * noise).astype(np.float32)
        low, high = (scale, high) if overlap_of(law_of(target), law_of(draft)) > overlap else (low, scale)
    return target.astype(np.float32), draft


def overlap_of(p: Any, q: Any) -> float:
    return float(np.minimum(p, q).sum())


def law_of_length(rule: str, p: Any, q: Any) -> Any:
    """The law of the accepted length of ``K`` drafts, all from ``q`` and verified against ``p``, float64 ``[K+1]``.

    Under block the first i drafts are accepted with probability ``P_i = min(1, P_{i-1} p(x_i) / q(x_i))`` (Sun et al.,
    2025), here summed over all of their values.
    """
    if rule == "token":
        reach = overlap_of(p, q) ** np.arange(K + 1)
        return reach - np.append(reach[1:], 0)
    p, q = p[q > 0], q[q > 0]
    joint, weight, reach = np.ones(1), np.ones(1), [1.0]
    for i in range(K):
        reach.append(sum(w @ np.minimum(q, j[:, None] * p).sum(axis=1) for j, w in in_parts(joint, weight)))
        if i < K - 1:
            joint, weight = np.minimum(1, joint[:, None] * p / q).ravel(), (weight[:, None] * q).ravel()
    return np.array(reach) - np.append(reach[1:], 0)


def in_parts(*arrays: Any, size: int = 1 << 14) -> Iterator[tuple[Any, ...]]:
    for start in range(0, len(arrays[0]), size):
        yield tuple(a[start : start + size] for a in arrays)


def accepted_lengths(rule: str, rows: tuple[Any, Any], q: Any, rng: Any, batch: int, **more: Any) -> Any:
    """Accepted lengths of ``K`` independent drafts, int64 ``[batch]``; the rows are the same at every position."""
    cdf = np.cumsum(q)
    drafts = np.searchsorted(cdf, rng.random((batch, K)) * cdf[-1], side="right")
    target, draft = (expand(np.stack([row] * n), batch) for row, n in zip(rows, (K + 1, K), strict=True))
    return draftproof.verify(target, draft, drafts, rule=rule, backend=BACKEND, **more).num_accepted


@pytest.mark.parametrize("rule", ["token", "block"])
def test_600_rounds(rule: str) -> None:
    """The mean accepted length of 600 rounds at ``sum min(p, q) = 0.678`` is its law's within 4 standard errors.

    A standard error is 0.07: a mean that is off by 0.45, 1.66 being the law's under token, is seen with power 0.99.
    """
    rows = row_at(0.678)
    p, q = map(law_of, rows)
    assert overlap_of(p, q) == pytest.approx(0.678, abs=1e-6)
    lengths = accepted_lengths(rule, rows, q, np.random.default_rng(600), 600, seed=600)
    law = law_of_length(rule, p, q)
    mean = law @ np.arange(K + 1)
    error = np.sqrt((law @ np.arange(K + 1) ** 2 - mean**2) / 600)
    assert error < 0.07
    assert mean == pytest.approx(1.661, abs=1e-3) if rule == "token" else mean > 1.661
    assert abs(lengths.mean() - mean) < 4 * error


# --- slow: millions of draws, with the seeds fixed before the first run ----------------------------------------------

SEED = 20261129
BATCH = 100_000
RESULTS = Path(__file__).parent / "results"
TV_BOUND, FIRST_TOKEN_BOUND = {"worst_tv": 1.9e-3, "draws_on_masked_tokens": 0}, {"worst_tv": 3.4e-3}
LENGTH_BOUND = {"rate_error": 4e-4, "law_error": 3e-4, "standard_errors": 4}


def record(test: str, draws: int, start: float, figure: dict[str, Any], bound: dict[str, float]) -> None:
    """Write what was measured, then hold it to its bound."""
    result = {
        "command": "python -m pytest -m slow tests/test_statistics.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "draftproof": draftproof.__version__,
        },
        "seeds": f"{SEED} for rows, masks, NumPy drafts and the library; offset = number of the batch of {BATCH} rows",
        "draws": draws,
        "seconds": round(time.perf_counter() - start),
        "figure": figure,
        "bound": bound,
    }
    (RESULTS / f"statistics_{test}.json").write_text(json.dumps(result, indent=2) + "\n")
    assert_within(figure, bound)


def assert_within(figure: dict[str, Any], bound: dict[str, float]) -> None:
    assert {name: figure[name] for name in bound if not figure[name] <= bound[name]} == {}


def slow_rows() -> tuple[Any, Any, Any]:
    """A target row, a draft row that differs from it by as much again, and a mask that allows three tokens in four."""
    rng = np.random.default_rng(SEED)
    target = rng.normal(scale=1.5, size=VOCAB)
    draft = target + rng.normal(size=VOCAB)
    return target.astype(np.float32), draft.astype(np.float32), rng.random(VOCAB) < 0.75


def packed(mask: Any) -> Any:
    return np.packbits(mask, bitorder="little").view(np.int32)


SAMPLER_SETTINGS: dict[str, dict[str, Any]] = {
    "mask": {},
    **{f"mask, {name}": {name: value} for name, value in FILTERS.items()},
    "mask, all": FILTERS,
}


@pytest.mark.slow
def test_sampler_tv() -> None:
    """Total variation of ``sample`` at 4.2e6 draws of each filter with a mask, and no draw of a masked token."""
    start, draws = time.perf_counter(), 4_200_000
    row, _, mask = slow_rows()
    distances, removed = {}, 0
    for name, filters in SAMPLER_SETTINGS.items():
        law = law_of(row, mask, **filters)
        counts = np.zeros(VOCAB, np.int64)
        allowed = packed(mask) if "top_k" in filters else mask
        inputs = {"mask": expand(allowed, BATCH), "prev_tokens": expand(HISTORY, BATCH), "backend": BACKEND}
        for number in range(draws // BATCH):
            tokens = draftproof.sample(expand(row, BATCH), **filters, **inputs, seed=SEED, offset=number)
            counts += np.bincount(tokens, minlength=VOCAB)
        distances[name] = float(np.abs(counts / draws - law).sum() / 2)
        removed += int(counts[(law == 0) | ~mask].sum())
    figure = {"worst_tv": max(distances.values()), "draws_on_masked_tokens": removed, "tv": distances}
    record("sampler_tv", draws, start, figure, TV_BOUND)


@pytest.mark.slow
def test_first_token_tv() -> None:
    """Total variation of the first token at 2.1e6 rounds of two mismatched, private drafts of ``sample``."""
    start, draws = time.perf_counter(), 2_100_000
    target, draft, mask = slow_rows()
    filters = {name: FILTERS[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    distances = {}
    for rule, name in itertools.product(("token", "block", "match"), ("plain", "mask, all")):
        chosen, allowed = (filters, mask) if name == "mask, all" else ({}, np.ones(VOCAB, bool))
        law, counts = law_of(target, allowed, **chosen), np.zeros(VOCAB, np.int64)
        for number in range(draws // BATCH):
            keys = {"seed": SEED, "offset": number, "backend": BACKEND}
            row, row_mask = expand(draft, BATCH), expand(allowed, BATCH)
            drafts = [draftproof.sample(row, **chosen, mask=row_mask, **keys, draft_index=i) for i in range(2)]
            rows = expand(np.stack([target] * 3), BATCH), expand(np.stack([draft] * 2), BATCH)
            masks = expand(np.stack([allowed] * 3), BATCH)
            result = draftproof.verify(*rows, np.column_stack(drafts), rule=rule, **chosen, mask=masks, **keys)
            counts += np.bincount(result.tokens[:, 0], minlength=VOCAB)
        distances[f"{rule}, {name}"] = float(np.abs(counts / draws - law).sum() / 2)
    figure = {"worst_tv": max(distances.values()), "tv": distances}
    record("first_token_tv", draws, start, figure, FIRST_TOKEN_BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
def test_accepted_length(rule: str) -> None:
    """Acceptance of the first draft and the law of the accepted length at 5e7 rounds; token with filters and a mask."""
    start, draws = time.perf_counter(), 50_000_000
    target, draft, mask = slow_rows()
    filters = {"temperature": 0.8, "top_k": 24, "top_p": 0.9} if rule == "token" else {}
    more = {"mask": expand(np.stack([mask] * (K + 1)), BATCH), **filters} if rule == "token" else {}
    p, q = (law_of(row, mask if rule == "token" else None, **filters) for row in (target, draft))
    rng, counts = np.random.default_rng(SEED), np.zeros(K + 1, np.int64)
    for number in range(draws // BATCH):
        lengths = accepted_lengths(rule, (target, draft), q, rng, BATCH, seed=SEED, offset=number, **more)
        counts += np.bincount(lengths, minlength=K + 1)
    law = np.append(law_of_length(rule, p, q), overlap_of(p, q))
    errors = np.abs(np.append(counts, counts[1:].sum()) / draws - law)
    figure = {
        "overlap": law[-1],
        "rate_error": float(errors[-1]),
        "law_error": float(errors[:-1].max()),
        "standard_errors": float((errors / np.sqrt(law * (1 - law) / draws)).max()),
        "counts": counts.tolist(),
        "law": law[:-1].tolist(),
    }
    record(f"accepted_length_{rule}", draws, start, figure, LENGTH_BOUND)


@pytest.mark.parametrize(
    ("test", "draws", "bound"),
    [
        ("sampler_tv", 4_200_000, TV_BOUND),
        ("first_token_tv", 2_100_000, FIRST_TOKEN_BOUND),
        ("accepted_length_token", 50_000_000, LENGTH_BOUND),
        ("accepted_length_block", 50_000_000, LENGTH_BOUND),
    ],
)
def test_committed_results(test: str, draws: int, bound: dict[str, float]) -> None:
    """What the slow tests measured keeps the bounds."""
    result = json.loads((RESULTS / f"statistics_{test}.json").read_text())
    assert result["draws"] >= draws
    assert result["bound"] == bound
    assert_within(result["figure"], bound)
