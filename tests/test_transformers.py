"""The filters against transformers' own processors, called as ``generate`` calls them: on float32, in its order.

Kept sets are equal, or differ by the tokens whose exact margin to a top-p or min-p boundary is below 2^-20 of the mass;
kept entries are equal in every bit. Over some 50,000 tied tokens the processors' float32 sums can be off by more: such
a row is counted apart, and must be what the same processors keep in float64.
Each test prints what it counted: ``pytest -rP tests/test_transformers.py``.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import draftproof

REMOVED = -np.inf
MARGIN = 2.0**-20
LARGE = 128_256

PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
"""In the order in which ``generate`` applies them."""

VALUES: dict[str, tuple[float, ...]] = {
    "repetition_penalty": (1.3, 0.7, 2.0),
    "temperature": (0.7, 1.5, 0.25),
    "top_k": (50, 1, 7, 20_000),
    "top_p": (0.9, 0.5, 0.99, 0.0, 0.8),
    "min_p": (0.05, 0.5, 0.001, 1.0),
}
"""Row i of a case takes its own value: the lengths differ, so that the values meet in many ways."""

OFF = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

COMBINATIONS = [names for n in range(len(PROCESSORS) + 1) for names in itertools.combinations(PROCESSORS, n)]


def bfloat16_valued(rows: Any) -> Any:
    return torch.from_numpy(rows).bfloat16().float().numpy()


def like_a_model(rng: Any, shape: tuple[int, int]) -> Any:
    """A bulk and, above it, a few dozen likely tokens, as the last layer of a language model has them."""
    rows = rng.normal(scale=1.7, size=shape) - 4
    rows[:, : min(40, shape[1])] += rng.gumbel(8, 3, size=(shape[0], min(40, shape[1])))
    return rng.permuted(rows, axis=1)


def with_removed(rng: Any, shape: tuple[int, int]) -> Any:
    rows = rng.normal(scale=2, size=shape)
    rows[:, 1:][rng.random((shape[0], shape[1] - 1)) < 0.4] = REMOVED
    return rows


def decimal(rng: Any, shape: tuple[int, int]) -> Any:
    """Logarithms of probabilities of two decimals: top-p and min-p boundaries fall on tokens exactly."""
    rows = rng.multinomial(20, np.full(shape[1], 1 / shape[1]), size=shape[0])
    with np.errstate(divide="ignore"):
        return np.log(rows / 20)


def integers(rng: Any, shape: tuple[int, int]) -> Any:
    """Ties everywhere, among them those of 0.0 with -0.0."""
    return np.round(rng.normal(scale=1.5, size=shape))


def adjacent(rng: Any, shape: tuple[int, int]) -> Any:
    """Neighbouring float32 values, some of which are one value after the division by the temperature."""
    return 1.5 + rng.integers(0, 300, size=shape) * 2.0**-23


KINDS: dict[str, tuple[int, Callable[[Any, tuple[int, int]], Any]]] = {
    "one token": (1, lambda rng, shape: rng.normal(size=shape)),
    "decimal": (10, decimal),
    "constant": (64, lambda rng, shape: np.full(shape, rng.normal(size=(shape[0], 1)))),
    "integers": (300, integers),
    "adjacent": (300, adjacent),
    "with removed": (500, with_removed),
    "normal": (1000, lambda rng, shape: rng.normal(scale=2, size=shape)),
    "peaked": (2000, lambda rng, shape: rng.normal(scale=15, size=shape)),
    "flat": (4096, lambda rng, shape: rng.normal(scale=1e-3, size=shape)),
    "bfloat16": (4096, lambda rng, shape: bfloat16_valued(like_a_model(rng, shape))),
    "large": (LARGE, like_a_model),
    "large bfloat16": (LARGE, lambda rng, shape: bfloat16_valued(like_a_model(rng, shape))),
    "large flat": (LARGE, lambda rng, shape: rng.normal(scale=0.3, size=shape)),
    "large integers": (LARGE, integers),
}
SMALL_KINDS = [kind for kind, (vocab, _) in KINDS.items() if vocab < LARGE]


def rows_per_combination(kind: str) -> int:
    return 4 if KINDS[kind][0] == LARGE else 6


@dataclass(frozen=True)
class Case:
    """Rows under one combination of filters, each row with its own values and its own history."""

    names: tuple[str, ...]
    logits: Any  # float32 [B, V]
    history: Any  # int64 [B, 12], padded with -1 at any place
    values: list[dict[str, float]]

    def ours(
        self, function: Callable[..., Any] = draftproof.filter_logits, rows: slice = slice(None), **more: Any
    ) -> Any:
        columns = {name: np.array([value[name] for value in self.values])[rows] for name in self.names}
        return function(self.logits[rows], **columns, prev_tokens=self.history[rows], **more)

    def theirs(self, row: int, names: tuple[str, ...] | None = None) -> Any:
        """One row after the processors, as float32 ``[V]``."""
        values = self.values[row]
        chain = LogitsProcessorList(
            PROCESSORS[name](values[name]) for name in self.names if names is None or name in names
        )
        history = self.history[row][self.history[row] >= 0]
        return chain(torch.from_numpy(history)[None], torch.from_numpy(self.logits[row])[None])[0].numpy()

    def survivors(self, row: int) -> Any:
        """The row as top-p finds it."""
        return self.theirs(row, ("repetition_penalty", "temperature", "top_k"))

    def ranked(self, row: int) -> Any:
        """The ids by logit before the temperature, descending, ties by id."""
        return np.argsort(-self.theirs(row, ("repetition_penalty",)), kind="stable")

    def theirs_in_float64(self, row: int) -> Any:
        """The same, with the sums of top-p and min-p in float64."""
        values = self.values[row]
        chain = LogitsProcessorList(PROCESSORS[name](values[name]) for name in self.names if name in ("top_p", "min_p"))
        return chain(None, torch.from_numpy(self.survivors(row)).double()[None])[0].float().numpy()


@functools.lru_cache(maxsize=2)
def cases(kind: str) -> list[Case]:
    """All combinations of filters on rows of one kind."""
    vocab, make = KINDS[kind]
    count = rows_per_combination(kind)
    rng = np.random.default_rng(list(KINDS).index(kind))
    result = []
    for number, names in enumerate(COMBINATIONS):
        logits = make(rng, (count, vocab)).astype(np.float32)
        # Few distinct ids, so that they repeat; some beyond the vocabulary, as embeddings may be larger than the head.
        history = rng.choice(rng.integers(0, vocab + 2, size=5), size=(count, 12))
        history[rng.random(history.shape) < 0.3] = -1
        history[0] = -1
        values = [{name: VALUES[name][(number + row) % len(VALUES[name])] for name in names} for row in range(count)]
        result.append(Case(names, logits, history, values))
    return result


@dataclass
class Report:
    """What a comparison found."""

    rows: int = 0
    tied: int = 0
    crossing_rows: int = 0
    crossing_tokens: int = 0
    misadded: int = 0
    faults: dict[tuple[str, int], str] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.rows} rows: {self.tied} keep other members of a tie at the top-p boundary, {self.crossing_rows} "
            f"differ by tokens within 2^-20 of a boundary ({self.crossing_tokens} in all), {self.misadded} are "
            f"misplaced by float32 sums, {len(self.faults)} faults"
        )

    def add(self, case: Case, ours: Any) -> None:
        """Compare the rows of a case."""
        for row, ours_row in enumerate(ours):
            self.rows += 1
            theirs = case.theirs(row)
            if ours_row.tobytes() == theirs.tobytes():
                continue
            survivors, values = case.survivors(row), case.values[row]
            tokens, fault = difference(ours_row, theirs, survivors, values)
            if fault and difference(ours_row, case.theirs_in_float64(row), survivors, values) == (0, ""):
                self.misadded += 1
            elif not fault and not (ours_row[case.ranked(row)[: (ours_row > REMOVED).sum()]] > REMOVED).all():
                self.faults[" ".join(case.names), row] = "other members of a tie than its lowest ids"
            elif fault:
                self.faults[" ".join(case.names), row] = fault
            elif tokens:
                self.crossing_rows += 1
                self.crossing_tokens += tokens
            else:
                self.tied += 1


def difference(ours: Any, theirs: Any, survivors: Any, values: dict[str, float]) -> tuple[int, str]:
    """Return by how many crossing tokens two rows differ (0: members of one tie), and what is wrong, if anything."""
    kept = [ours > REMOVED, theirs > REMOVED]
    both = kept[0] & kept[1]
    if not np.array_equal(ours[both].view(np.int32), theirs[both].view(np.int32)):
        return 0, "kept entries differ in their bits"
    candidates = survivors > REMOVED
    for side in kept:
        removed = survivors[candidates & ~side]
        if (side & ~candidates).any() or (removed.size and survivors[side].min(initial=np.inf) < removed.max()):
            return 0, "the kept set is not a prefix of the order"
    sizes = sorted(int(side.sum()) for side in kept)
    if sizes[0] == 0:
        return 0, "nothing is kept"
    if sizes[0] == sizes[1]:
        return 0, "" if "top_p" in values else "other members of a tie"
    margins = boundary_margins(survivors[candidates], values)[sizes[0] : sizes[1]]
    return sizes[1] - sizes[0], "" if (margins < MARGIN).all() else f"sizes {sizes}, margins up to {margins.max():.3g}"


def boundary_margins(survivors: Any, values: dict[str, float]) -> Any:
    """Return each rank's float64 distance to a boundary: in mass for top-p, in units of the largest for min-p."""
    ordered = np.sort(survivors.astype(np.float64))[::-1]
    weights = np.exp(ordered - ordered[0])
    law = weights / weights.sum()
    margins = np.full(len(law), np.inf)
    if "top_p" in values:
        margins = np.abs(np.cumsum(law) - law - values["top_p"])
    if "min_p" in values:
        margins = np.minimum(margins, np.abs(weights - values["min_p"]))
    return margins


@pytest.mark.parametrize("kind", KINDS)
def test_kept_sets_and_bits(kind: str) -> None:
    """Every combination of filters on every kind of row."""
    report = Report()
    for case in cases(kind):
        report.add(case, case.ours())
    sys.stdout.write(f"{kind}: {report}\n")
    assert not report.faults
    assert report.crossing_rows <= report.rows // 25
    assert report.misadded <= (report.rows // 25 if KINDS[kind][0] == LARGE else 0)
    assert report.rows == len(COMBINATIONS) * rows_per_combination(kind)


def test_enough_rows() -> None:
    rows = {kind: len(COMBINATIONS) * rows_per_combination(kind) for kind in KINDS}
    assert len(COMBINATIONS) == 32
    assert sum(rows.values()) >= 2000
    assert sum(count for kind, count in rows.items() if KINDS[kind][0] >= 100_000) >= 500


def corrupted(rows: Any) -> Iterator[tuple[int, Any]]:
    """Four faults, each in a row of its own: a bit, a token too few, a token too many, two tokens swapped."""
    kept, removed = rows > REMOVED, rows == REMOVED
    by_value = np.argsort(-rows, axis=1, kind="stable")
    for row, fault in enumerate(("bit", "lost", "extra", "swapped")):
        result = rows[row].copy()
        top, last = by_value[row, 0], by_value[row, kept[row].sum() - 1]
        outside = np.flatnonzero(removed[row])[0]
        if fault == "bit":
            result[last] = np.nextafter(result[last], np.float32(np.inf))
        elif fault == "lost":
            result[top] = REMOVED
        elif fault == "extra":
            result[outside] = result[last]
        else:
            result[outside], result[last] = result[last], REMOVED
        yield row, result


@pytest.mark.parametrize("kind", ["normal", "bfloat16", "large"])
def test_planted_faults_are_found(kind: str) -> None:
    case = next(case for case in cases(kind) if case.names == ("temperature", "top_k", "top_p"))
    assert rows_per_combination(kind) >= 4
    ours = case.ours()
    for row, fault in corrupted(ours):
        ours[row] = fault
    report = Report()
    report.add(case, ours)
    assert {row for _, row in report.faults} == {0, 1, 2, 3}


def test_a_boundary_further_away_than_the_margin_is_a_fault() -> None:
    """A kept set cut at another top-p, one token early, fails although it is a prefix."""
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    theirs = np.where([True, True, False], logits, REMOVED).astype(np.float32)
    ours = np.where([True, False, False], logits, REMOVED).astype(np.float32)
    assert difference(ours, theirs, logits, {"top_p": 0.8})[1]
    assert difference(ours, theirs, logits, {"top_p": 0.5}) == (1, "")


@pytest.mark.parametrize("kind", KINDS)
def test_kept_is_the_count(kind: str) -> None:
    """``sample_with_logprobs`` counts what ``filter_logits`` keeps, and draws from it."""
    rows = slice(0, 1 if KINDS[kind][0] == LARGE else None)
    for case in cases(kind):
        filtered = case.ours(rows=rows)
        result = case.ours(draftproof.sample_with_logprobs, rows=rows, seed=1)
        np.testing.assert_array_equal(result.kept, (filtered > REMOVED).sum(axis=1))
        assert (np.take_along_axis(filtered, result.tokens[:, None], axis=1) > REMOVED).all()


@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_off_values_in_a_mixed_batch(kind: str) -> None:
    """All combinations in one batch, filters switched off by their off values: each row as before, bit for bit."""
    everything = cases(kind)
    values = [{**OFF, **value} for case in everything for value in case.values]
    logits, history = (np.concatenate([getattr(case, name) for case in everything]) for name in ("logits", "history"))
    mixed = Case(tuple(PROCESSORS), logits, history, values)
    np.testing.assert_array_equal(mixed.ours(), np.concatenate([case.ours() for case in everything]))


def test_generate() -> None:
    """``filter_logits`` gives the scores of ``generate`` from its logits, left padding and new tokens included."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=None, **shape)
    model = transformers.LlamaForCausalLM(config).eval()
    model.lm_head.weight.data *= 40
    prompt = torch.randint(1, 300, (4, 6))
    attention = torch.tensor([[0] * pad + [1] * (6 - pad) for pad in range(4)])
    history = torch.where(attention == 1, prompt, -1)
    for number, names in enumerate(COMBINATIONS):
        values = {name: VALUES[name][number % len(VALUES[name])] for name in names}
        out = model.generate(
            prompt,
            attention_mask=attention,
            do_sample=True,
            max_new_tokens=2,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            **{"top_k": 0, **values},
        )
        for step, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
            seen = torch.cat([history, out.sequences[:, 6 : 6 + step]], dim=1)
            survivors = {name: value for name, value in values.items() if name not in ("top_p", "min_p")}
            ours = draftproof.filter_logits(logits, **values, prev_tokens=seen)
            before = draftproof.filter_logits(logits, **survivors, prev_tokens=seen)
            for row in range(4):
                if not torch.equal(ours[row], scores[row]):
                    assert not difference(*(a[row].numpy() for a in (ours, scores, before)), values)[1], names
