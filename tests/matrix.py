"""The matrix of calls on which backends are compared: subjects, and inputs made by integer arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import draftproof
from draftproof._dispatch import BACKENDS, interpreted

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
