"""Every backend against eager on NumPy, which defines the bits: operation x dtype x nasty rows x parameters.

All outputs are compared byte by byte, dtype and shape included. ``tests/golden/tokens.json`` freezes the results of
some of the calls, so that a change of the definition itself shows: ``python tests/test_bits.py`` writes it anew, and
the changelog then has to say so. Inputs are made by integer arithmetic, hence the same on every machine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import draftproof
from draftproof import Status
from draftproof._dispatch import BACKENDS, interpreted

GOLDEN = Path(__file__).parent / "golden" / "tokens.json"
VOCABS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": torch.bfloat16, "float64": np.float64}
RULES = ("token", "block", "match", "greedy")


def as_it_is(array: Any) -> Any:
    return array


class Subject(NamedTuple):
    """What is tested: a backend, on arrays of a library that lie in memory in some way."""

    backend: str
    library: str
    layout: Callable[[Any], Any] = as_it_is

    def array(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if self.library != "numpy":
            # A copy, since torch warns of arrays that are read-only.
            value = torch.from_numpy(value.copy()).to(self.library.removeprefix("torch-"))
        return self.layout(value)

    def rows(self, value: Any, dtype: str) -> Any:
        """NumPy has no bfloat16: there the values arrive as float32, which holds them exactly."""
        value = self.array(value)
        return value.to(torch.bfloat16) if dtype == "bfloat16" and self.library != "numpy" else value


DEFINITION = Subject("eager", "numpy")


def subjects() -> list[Any]:
    """Return a row per backend of the dispatch table and library; a new backend joins by being in that table."""
    rows = []
    for device, libraries in (("cpu", ("numpy", "torch-cpu")), ("cuda", ("torch-cuda",)), ("xpu", ("torch-xpu",))):
        there = getattr(torch, device).is_available()
        for backend in BACKENDS[device]:
            reason = draftproof.backends()["sample"][backend] if there else f"torch sees no {device} device"
            marks = [pytest.mark.skipif(reason != "available", reason=reason)]
            marks += [pytest.mark.gpu] * (device != "cpu")
            rows += [row(Subject(backend, library), *marks) for library in libraries]
    interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled, for a device")
    rows.append(row(Subject("triton", "torch-cpu"), interpreter, pytest.mark.slow))
    return [r for r in rows if r.values[0] != DEFINITION]


def row(subject: Subject, *marks: Any) -> Any:
    return pytest.param(subject, id=f"{subject.backend}-{subject.library}", marks=marks)


# What `auto` takes may go another way than the backend's name does.
AUTO = [row(Subject("auto", "numpy")), row(Subject("auto", "torch-cpu"))]
each_subject = pytest.mark.parametrize("subject", subjects())
every_subject = pytest.mark.parametrize("subject", [row(DEFINITION), *subjects(), *AUTO])


class Call(NamedTuple):
    """One call of a public function: rows are the leading arrays, which have the dtype under test."""

    function: str
    rows: tuple[Any, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def run(self, subject: Subject, dtype: str = "float32") -> dict[str, Any]:
        """Return all outputs as NumPy arrays."""
        rows = [None if r is None else subject.rows(r, dtype) for r in self.rows]
        arguments = [subject.array(a) for a in self.arguments]
        keywords = {name: subject.array(value) for name, value in self.keywords.items()}
        function = getattr(draftproof, self.function)
        result = function(*rows, *arguments, **keywords, check=False, backend=subject.backend)
        fields = result._asdict() if isinstance(result, tuple) else {"result": result}
        return {name: np.asarray(value.cpu() if hasattr(value, "cpu") else value) for name, value in fields.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any], *label: Any) -> None:
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), (name, *label)
        if found[name].tobytes() != array.tobytes():
            wrong = found[name].view(f"u{array.itemsize}") != array.view(f"u{array.itemsize}")
            where = np.argwhere(wrong)[0].tolist()
            raise AssertionError(
                f"{label}: {name} differs in {wrong.sum()} places, first at {where}: "
                f"{found[name][tuple(where)]!r}, expected {array[tuple(where)]!r}"
            )


# --- inputs, by integer arithmetic ------------------------------------------------------------------------------------


def integers(salt: int, *shape: int) -> Any:
    """Return int64 in [0, 2**32): splitmix64 of the position, upper half."""
    z = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(salt << 40)
    z = z * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.int64).reshape(shape)


def below(limit: int, salt: int, *shape: int) -> Any:
    return integers(salt, *shape) * limit >> 32


def float32(numbers: Any, power: int) -> Any:
    """Return ``numbers * 2**power``, exact in float64, rounded to float32."""
    return np.ldexp(numbers.astype(np.float64), power).astype(np.float32)


def spread(h: Any) -> Any:
    return float32(h - (1 << 31), -28)


def with_some(row: Any, h: Any, value: float, every: int) -> Any:
    """Return the row with one entry in ``every`` replaced, at least one and never all."""
    chosen = (h % every == 0) | (np.arange(h.size) == h[0] % h.size)
    chosen[h[-1] % h.size] = h.size == 1 and np.isnan(value)
    return np.where(chosen, np.float32(value), row)


# All but the last two have a law. Hash values in, one row of logits out.
KINDS: dict[str, Callable[[Any], Any]] = {
    "spread": spread,
    "ties": lambda h: float32((h >> 24) - 128, -4),
    "zeros": lambda h: np.where(h & 1, np.float32(0.0), np.float32(-0.0)),
    "steep": lambda h: float32(-(h >> 8), -18),
    "holes": lambda h: with_some(spread(h), h, -np.inf, 3),
    "infinite": lambda h: with_some(spread(h), h, np.inf, 50),
    "huge": lambda h: float32(h - (1 << 31), 96),
    "subnormal": lambda h: float32((h >> 16) - (1 << 15), -149),
    "close": lambda h: (np.float32(5.0) + float32(h >> 28, -21)).astype(np.float32),
    "nan": lambda h: with_some(spread(h), h, np.nan, 1000),
    "dead": lambda h: np.full(h.size, -np.inf, np.float32),
}
LIVE = len(KINDS) - 2


def logits(batch: int, vocab: int, salt: int, kinds: int = len(KINDS)) -> Any:
    """Return rows of all kinds in turn."""
    makers = list(KINDS.values())[:kinds]
    rows = [makers[b % kinds](h) for b, h in enumerate(integers(salt, batch, vocab))]
    return np.stack(rows) if rows else np.zeros((0, vocab), np.float32)


def cast(rows: Any, dtype: str) -> Any:
    """Return float32 rows as NumPy can hold that dtype; float64 gets bits that rounding must remove."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            return torch.from_numpy(rows).to(torch.bfloat16).float().numpy()
        return rows.astype(np.float64) * (1 + 2.0**-27) if dtype == "float64" else rows.astype(DTYPES[dtype])


def packed(mask: Any) -> Any:
    """Return a bool mask as int32 words; bits at or above V are set and must not matter."""
    padding = np.ones((*mask.shape[:-1], -mask.shape[-1] % 32), np.bool_)
    bits = np.concatenate([mask, padding], axis=-1)
    return np.ascontiguousarray(np.packbits(bits, axis=-1, bitorder="little")).view(np.int32)


def turns(batch: int, *values: Any, dtype: Any = np.float32) -> Any:
    return np.resize(np.array(values, dtype=dtype), batch)


@functools.lru_cache(maxsize=64)
def filters(batch: int, vocab: int, lead: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Return keywords by the name of a setting; ``lead`` is the leading shape of a mask."""
    past, mask = history(batch, vocab), allowed(vocab, lead)
    return {
        "plain": {},
        "greedy": {"temperature": 0},
        "cold": {"temperature": 0.3},
        "coldest": {"temperature": 2.0**-126, "top_k": 3},
        "hot": {"temperature": 3e4, "top_p": 0.6},
        "top_k=1": {"top_k": 1},
        "top_k": {"top_k": 7, "temperature": 1.7},
        "top_p": {"top_p": 0.9},
        "top_p=0": {"top_p": 0.0},
        "top_p, small": {"top_p": 0.25},
        "min_p": {"min_p": 0.03},
        "min_p=1": {"min_p": 1},
        "penalty": {"repetition_penalty": 1.3, "prev_tokens": past},
        "reward": {"repetition_penalty": 0.4, "prev_tokens": past, "top_k": 5},
        "mask": {"mask": mask},
        "packed mask": {"mask": packed(mask), "top_p": 0.7},
        "all": {
            "temperature": 0.8,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "prev_tokens": past,
            "mask": mask,
        },
        "per row": {
            "temperature": turns(batch, 1.0, 0.0, 0.5, 2.0, 0.9, 30.0, 1e-3),
            "top_k": turns(batch, 5, -1, 0, 1, 2, 10**6, 40, 3, dtype=np.int64),
            "top_p": turns(batch, 0.9, 1.0, 0.0, 0.5, 0.97),
            "min_p": turns(batch, 0.0, 0.1, 1e-30, 0.0, 1e-3, 1.0),
            "repetition_penalty": turns(batch, 1.0, 1.5, 0.5, 1.1),
            "prev_tokens": past,
        },
        "per row in float64": {
            "temperature": turns(batch, 0.7, 1.1, 0.0, dtype=np.float64),
            "top_k": turns(batch, 3, 0, 4, dtype=np.float32),
            "top_p": turns(batch, 0.85, 0.3, dtype=np.float64),
        },
    }


def history(batch: int, vocab: int) -> Any:
    """Return token ids with padding, repeats and ids outside the vocabulary."""
    return below(vocab + 3, 5, batch, 9) - 2


def allowed(vocab: int, lead: tuple[int, ...]) -> Any:
    mask = integers(6, *lead, vocab) % 4 > 0
    mask[..., 0] |= ~mask.any(axis=-1)
    return mask


def stream(batch: int, salt: int = 0) -> dict[str, Any]:
    """Return a seed and an offset per row, negative seeds and large offsets among them."""
    offset = turns(batch, 0, 5, (1 << 32) + 3, (1 << 63) - 10, 77, dtype=np.int64)
    return {"seed": integers(7 + salt, batch) - (1 << 31) << 20, "offset": offset}


def sampling(name: str, vocab: int, batch: int, kinds: int = len(KINDS)) -> list[Call]:
    rows = (logits(batch, vocab, vocab, kinds),)
    chosen = filters(batch, vocab, (batch,))[name]
    index = {"draft_index": turns(batch, 0, 3, (1 << 24) - 1, dtype=np.int64)} if vocab % 2 else {}
    draws = {**chosen, **stream(batch), **index}
    return [
        Call("sample", rows, (), draws),
        Call("sample_with_logprobs", rows, (), draws),
        Call("filter_logits", rows, (), chosen),
    ]


def probabilities(batch: int, vocab: int, salt: int, bad: bool = True) -> Any:
    """Return rows of any scale, with zeros, one-hot, subnormal, and (the last four kinds) bad ones."""
    h = integers(salt, batch, vocab)
    rows = float32(h >> 8, -24)
    for b in range(batch):
        kind = b % (11 if bad else 7)
        at = int(h[b, 0]) % vocab
        if kind == 1:
            rows[b] = np.where(h[b] % 3 == 0, rows[b], np.float32(0))
            rows[b, at] = 1
        elif kind == 2:
            rows[b], rows[b, at] = 0, 0.125
        elif kind in (3, 4):
            rows[b] = float32(h[b] + 1, 90 if kind == 3 else -158)
        elif kind == 5:
            rows[b] = float32((h[b] >> 8) | 1, -24) * np.ldexp(np.float32(1), -(h[b] & 63))
        elif kind == 6:
            rows[b] = 1
        elif kind == 10:
            rows[b] = 0
        elif kind > 6:
            rows[b, at] = {7: np.nan, 8: -(2.0**-149), 9: np.inf}[kind]
    return rows


FILTERS = list(filters(1, 2, (1,)))


# --- verification -----------------------------------------------------------------------------------------------------


def near(target: Any, vocab: int, salt: int) -> Any:
    """Return draft rows over ``vocab`` ids that resemble the target's: some equal, some noisy, some foreign."""
    batch, drafted, ids = target.shape
    draft = logits(batch * drafted, vocab, salt).reshape(batch, drafted, vocab)
    shared = min(ids, vocab)
    noise = spread(integers(salt, batch, drafted, shared)) * np.float32(0.125)
    with np.errstate(invalid="ignore"):
        alike = np.where((np.arange(batch) % 3 == 0)[:, None, None], target[..., :shared], target[..., :shared] + noise)
    some = np.arange(batch) % 5 != 4
    draft[some, :, :shared] = alike[some]
    return draft


def drafts(draft: Any, vocab: int, salt: int) -> Any:
    """Return drafted ids: mostly the most likely, some at random; a few padded, a few invalid."""
    batch, drafted, width = draft.shape
    likely = np.argmax(np.nan_to_num(draft, nan=-1e30), axis=-1) if draft.size else np.zeros((batch, drafted), np.int64)
    h = integers(salt, batch, drafted)
    tokens = np.where(h % 7 < 6, likely, below(max(vocab, width), salt + 1, batch, drafted))
    tokens = np.where(h % 41 == 0, -1, tokens)
    return np.where(h % 43 == 0, np.where(h & 64, -7, max(vocab, width)), tokens)


def verification(
    name: str, vocab: int, rule: str, difference: int | None, batch: int = 22, drafted: int = 4, kinds: int = len(KINDS)
) -> Call:
    """Build a call of ``verify``; ``difference`` is Vd - V, None for a point mass."""
    # Neighbouring requests share rows, so that every kind stands at every position.
    position = np.arange(batch)[:, None] + np.arange(drafted + 1)
    target = logits(batch + drafted + 1, vocab, 50 + vocab, kinds)[position]
    draft_vocab = max(1, vocab + (difference or 0))
    draft = near(target[:, :drafted], draft_vocab, 90 + vocab)
    keywords = dict(filters(batch, vocab, (batch, drafted + 1))[name])
    if difference == 0 and name == "top_k":
        keywords |= {
            "draft_temperature": 0.6,
            "draft_top_k": turns(batch, 2, 50, 0, dtype=np.int64),
            "draft_top_p": 0.8,
        }
    if difference is not None and name in ("mask", "min_p"):
        keywords["draft_mask"] = allowed(draft_vocab, (batch, drafted))
    if difference and name == "packed mask":
        keywords["draft_mask"] = packed(allowed(draft_vocab, (batch, drafted)))
    keywords |= {"rule": rule, **stream(batch, vocab)}
    keywords["offset"] = np.minimum(keywords["offset"], (1 << 63) - 1 - drafted)
    if name != "plain":
        keywords |= {
            "eos": below(vocab, 12, batch, 2),
            "num_draft_tokens": np.maximum(drafted - (below(9, 13, batch) == 0), 0),
        }
    tokens = drafts(draft, vocab, 14 + vocab)
    return Call("verify", (target, None if difference is None else draft), (tokens,), keywords)


def verification_of_probabilities(vocab: int, rule: str, difference: int | None, given: bool) -> Call:
    batch, drafted = 22, 3
    target = probabilities(batch * (drafted + 1), vocab, 60 + vocab).reshape(batch, drafted + 1, vocab)
    draft_vocab = max(1, vocab + (difference or 0))
    draft = probabilities(batch * drafted, draft_vocab, 70 + vocab, bad=False).reshape(batch, drafted, draft_vocab)
    shared = min(vocab, draft_vocab)
    alike = np.arange(batch) % 2 == 0
    draft[alike, :, :shared] = target[alike, :drafted, :shared]
    tokens = drafts(draft, vocab, 15 + vocab)
    keywords: dict[str, Any] = {"rule": rule, "num_draft_tokens": drafted - (below(5, 16, batch) == 0)}
    if given:
        keywords["uniform_accept"] = np.minimum(float32(integers(17, batch, drafted), -32), np.float32(1))
        keywords["uniform_sample"] = integers(18, batch, drafted + 1) / 2.0**32
        keywords["uniform_sample"][0], keywords["uniform_accept"][1] = 1.0, 1.0
    else:
        keywords |= {**stream(batch, 1), "eos": [1, 0]}
        keywords["offset"] = np.minimum(keywords["offset"], (1 << 63) - 1 - drafted)
    return Call("verify_probs", (target, None if difference is None else draft), (tokens,), keywords)


def sampling_of_probabilities(vocab: int, batch: int) -> Call:
    return Call("sample_probs", (probabilities(batch, vocab, vocab),), (), stream(batch))


def greedy_verification(vocab: int, batch: int = 22, drafted: int = 4) -> Call:
    call = verification("plain", vocab, "greedy", None, batch, drafted)
    eos = below(vocab + 1, 19, batch, 2) - 1
    return Call("verify_greedy", call.rows[:1], call.arguments, {"eos": eos})


# --- the matrix -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def defined(dtype: str, build: Callable[..., Any], *arguments: Any) -> list[tuple[Call, dict[str, Any]]]:
    """Return the calls that ``build`` makes, their rows in the dtype, each with the results that define it."""
    built = build(*arguments)
    pairs = []
    for call in built if isinstance(built, list) else [built]:
        cast_call = call._replace(rows=tuple(None if r is None else cast(r, dtype) for r in call.rows))
        pairs.append((cast_call, cast_call.run(DEFINITION)))
    return pairs


def compare(subject: Subject, dtype: str, build: Callable[..., Any], *arguments: Any) -> None:
    for call, expected in defined(dtype, build, *arguments):
        assert_same(call.run(subject, dtype), expected, call.function, dtype, *arguments)


@each_subject
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILTERS)
def test_sampling(subject: Subject, dtype: str, name: str) -> None:
    for vocab in VOCABS if dtype == "float32" else (33, 64, 1000):
        compare(subject, dtype, sampling, name, vocab, 22)


@each_subject
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FILTERS)
def test_verification(subject: Subject, name: str, rule: str) -> None:
    for vocab, difference in ((33, None), (33, 0), (33, -4), (31, 5), (64, None), (65, 0), (128, 1)):
        if difference is None or rule in ("token", "block"):
            compare(subject, "float32", verification, name, vocab, rule, difference)


@each_subject
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_verification_of_all_vocabularies_and_dtypes(subject: Subject, vocab: int, rule: str) -> None:
    for dtype in DTYPES:
        for difference in (None, 0):
            name = "top_k" if dtype == "float64" else "plain"
            compare(subject, dtype, verification, name, vocab, rule, difference)


@each_subject
@pytest.mark.parametrize("given", [False, True], ids=["seed", "uniforms"])
@pytest.mark.parametrize("rule", RULES)
def test_verification_of_probabilities(subject: Subject, rule: str, given: bool) -> None:
    for vocab in VOCABS[:-1]:
        for difference in (None, 0, -1, 3):
            compare(subject, "float32", verification_of_probabilities, vocab, rule, difference, given)
    for dtype in DTYPES:
        compare(subject, dtype, verification_of_probabilities, 65, rule, 0, given)


@each_subject
@pytest.mark.parametrize("dtype", DTYPES)
def test_probabilities_and_greedy(subject: Subject, dtype: str) -> None:
    for vocab in VOCABS:
        compare(subject, dtype, sampling_of_probabilities, vocab, 33)
        compare(subject, dtype, greedy_verification, vocab)


@each_subject
@pytest.mark.parametrize("batch", [0, 1, 3, 64])
def test_batch_sizes(subject: Subject, batch: int) -> None:
    # Without dead rows, which take branches of their own.
    for vocab in (1, 65):
        for name in ("plain", "all", "per row"):
            compare(subject, "float32", sampling, name, vocab, batch, LIVE)
            for drafted in (0, 1, 5):
                for rule in RULES:
                    difference = 0 if drafted else None
                    compare(subject, "float32", verification, name, vocab, rule, difference, batch, drafted, LIVE)
        compare(subject, "float32", sampling_of_probabilities, vocab, batch)
        compare(subject, "float32", greedy_verification, vocab, batch, 2)


@each_subject
@pytest.mark.parametrize(("vocab", "batch", "dtype"), [(50257, 9, "float32"), (151936, 4, "bfloat16")])
def test_large_vocabularies(subject: Subject, vocab: int, batch: int, dtype: str) -> None:
    for name in ("plain", "top_p", "per row"):
        compare(subject, dtype, sampling, name, vocab, batch, LIVE)
    for rule, difference in (("token", 0), ("block", -7), ("match", None)):
        compare(subject, dtype, verification, "all", vocab, rule, difference, 2, 2, 2)
    compare(subject, dtype, sampling_of_probabilities, vocab, batch)


def test_the_matrix_reaches_every_outcome() -> None:
    accepted, status, eos_hit = set(), 0, set()
    for rule in RULES:
        for name in ("plain", "greedy", "mask", "all"):
            for difference in (None, 0):
                found = verification(name, 33, rule, difference).run(DEFINITION)
                accepted |= {(rule, int(n)) for n in found["num_accepted"]}
                eos_hit |= {(rule, bool(hit)) for hit in found["eos_hit"]}
                status |= int(np.bitwise_or.reduce(found["status"]))
        found = verification_of_probabilities(33, rule, 0, given=True).run(DEFINITION)
        status |= int(np.bitwise_or.reduce(found["status"]))
    assert accepted == {(rule, n) for rule in RULES for n in range(5)}
    assert eos_hit == {(rule, hit) for rule in RULES for hit in (False, True)}
    # Every flag but the one for parameters that are device arrays.
    assert status == sum(Status) - Status.BAD_PARAMETER


# --- how the same values lie in memory --------------------------------------------------------------------------------


def transposed(a: Any) -> Any:
    return copied(a.swapaxes(0, -1)).swapaxes(0, -1)


def strided(a: Any) -> Any:
    return (torch if isinstance(a, torch.Tensor) else np).stack([a, a], -1)[..., 0]


def offset(a: Any) -> Any:
    """Inside a larger array: a start that no vector register likes, rows with a gap between."""
    full = torch.full if isinstance(a, torch.Tensor) else np.full
    inside = full(tuple(n + 3 for n in a.shape), 1, dtype=a.dtype)[tuple(slice(1, n + 1) for n in a.shape)]
    inside[...] = a
    return inside


def reversed_rows(a: Any) -> Any:
    """Negative strides, which only NumPy has."""
    return a if isinstance(a, torch.Tensor) else copied(a[::-1])[::-1]


def copied(a: Any) -> Any:
    return a.contiguous() if isinstance(a, torch.Tensor) else np.ascontiguousarray(a)


def calls_of_all_functions(vocab: int) -> Iterator[Call]:
    for name in ("all", "per row", "packed mask"):
        yield from sampling(name, vocab, 22)
    for name in ("plain", "greedy", "top_k", "top_p", "min_p", "reward"):
        scalars = {**filters(22, vocab, (22,))[name], "seed": (1 << 64) - 5, "offset": 1 << 40}
        yield Call("sample", (logits(22, vocab, 4),), (), scalars)
        yield Call("sample", (logits(1, vocab, 3, LIVE),), (), {**scalars, **filters(1, vocab, (1,))[name]})
    yield sampling_of_probabilities(vocab, 33)
    for rule in RULES:
        yield verification("per row", vocab, rule, 0)
        yield verification("packed mask", vocab, rule, None)
        yield verification_of_probabilities(vocab, rule, 3, given=True)
        yield verification_of_probabilities(vocab, rule, None, given=False)
    yield greedy_verification(vocab)


@every_subject
@pytest.mark.parametrize("layout", [transposed, strided, offset, reversed_rows])
def test_memory_layout_does_not_matter(subject: Subject, layout: Callable[[Any], Any]) -> None:
    for call in calls_of_all_functions(65):
        assert_same(call.run(subject._replace(layout=layout)), call.run(DEFINITION), call.function)


@every_subject
def test_one_row_expanded_over_the_batch(subject: Subject) -> None:
    def expanded(a: Any) -> Any:
        return a[:1].expand(a.shape) if isinstance(a, torch.Tensor) else np.broadcast_to(a[:1], a.shape)

    def repeated(a: Any) -> Any:
        return copied(expanded(a))

    calls = [call for name in ("plain", "greedy", "top_k", "top_p", "packed mask") for call in sampling(name, 65, 22)]
    calls += [verification(n, 65, r, d) for n in ("plain", "top_k", "mask") for r in RULES for d in (None, 0)]
    calls += [verification_of_probabilities(65, r, d, given=True) for r in RULES for d in (None, 0)]
    for call in calls:
        draws = {k: call.keywords[k] for k in ("seed", "offset", "draft_index") if k in call.keywords}

        def run(subject: Subject, call: Call = call, draws: dict[str, Any] = draws) -> dict[str, Any]:
            # The draws stay those of each row.
            keywords = {k: v if k in draws else subject.array(v) for k, v in call.keywords.items()}
            plain = subject._replace(layout=as_it_is)
            rows = tuple(None if r is None else subject.array(r) for r in call.rows)
            return call._replace(rows=rows, keywords=keywords).run(plain)

        assert_same(run(subject._replace(layout=expanded)), run(DEFINITION._replace(layout=repeated)), call.function)


@every_subject
def test_kinds_of_integers(subject: Subject) -> None:
    call = verification("per row", 65, "token", 0)
    (tokens,) = call.arguments
    call = call._replace(arguments=(np.maximum(tokens, 0),))
    expected = call.run(DEFINITION)
    for dtype in (np.int32, np.int64, np.uint32):
        keywords = {**call.keywords, "eos": call.keywords["eos"].astype(dtype)}
        if dtype is np.int32:
            keywords |= {"prev_tokens": keywords["prev_tokens"].astype(dtype), "seed": keywords["seed"].view(np.uint64)}
            keywords["num_draft_tokens"] = keywords["num_draft_tokens"].astype(dtype)
        changed = call._replace(arguments=(call.arguments[0].astype(dtype),), keywords=keywords)
        assert_same(changed.run(subject), expected, dtype.__name__)


@pytest.mark.parametrize("chunk", [1, 100, 700])
def test_the_chunks_of_eager_do_not_matter(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list(calls_of_all_functions(33))
    expected = [call.run(DEFINITION) for call in calls]
    for module in ("sampling.rows", "sampling.eager", "verification.chain.eager"):
        monkeypatch.setattr(importlib.import_module(f"draftproof.{module}"), "CHUNK", chunk)
    for call, wanted in zip(calls, expected, strict=True):
        assert_same(call.run(DEFINITION), wanted, call.function, chunk)


# --- the frozen results -----------------------------------------------------------------------------------------------


def cases() -> dict[str, Call]:
    """Return the calls whose results are frozen."""
    named = {
        f"{name}, {call.function}": call
        for name in FILTERS
        for call in sampling(name, 101 if name == "plain" else 100, 11)[1:]
    }
    for rule in RULES:
        for name, difference in (("plain", None), ("plain", 0), ("all", 0), ("per row", -3), ("packed mask", 4)):
            named[f"{name}, verify {rule} Vd-V={difference}"] = verification(name, 100, rule, difference, batch=13)
        for given, difference in ((True, 0), (False, None)):
            call = verification_of_probabilities(50, rule, difference, given)
            named[f"verify_probs {rule} Vd-V={difference} uniforms={given}"] = call
    named["sample, scalar seed"] = Call("sample", (logits(22, 100, 2),), (), {"seed": -3, "offset": 1 << 40})
    named["sample_probs"] = sampling_of_probabilities(100, 22)
    named["verify_greedy"] = greedy_verification(100)
    return named


def readable(array: Any) -> str:
    """Return numbers in clear, floats by their bits, and large arrays by their hash."""
    if array.size > 150:
        return f"sha256 {hashlib.sha256(array.tobytes()).hexdigest()[:32]}"
    if array.dtype.kind == "f":
        return " ".join(f"{bits:08x}" for bits in array.view(np.uint32).reshape(-1).tolist())
    return " ".join(str(int(value)) for value in array.reshape(-1).tolist())


def results(subject: Subject, call: Call) -> dict[str, str]:
    return {name: readable(array) for name, array in call.run(subject).items()}


@every_subject
def test_results_are_the_frozen_ones(subject: Subject) -> None:
    frozen = json.loads(GOLDEN.read_text())
    assert list(frozen) == list(cases())
    for name, call in cases().items():
        assert results(subject, call) == frozen[name], name


if __name__ == "__main__":
    table = {name: results(DEFINITION, call) for name, call in cases().items()}
    GOLDEN.write_text(json.dumps(table, indent=1) + "\n")
