"""Every backend against eager on NumPy, which defines the bits: operation x dtype x nasty rows x parameters.

All outputs are compared byte by byte, dtype and shape included. ``tests/golden/tokens.json`` freezes the results of
some of the calls, so that a change of the definition itself shows: ``python tests/test_bits.py`` writes it anew, and
the changelog then has to say so. Inputs are made by integer arithmetic, hence the same on every machine."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftproof import Status
from matrix import (
    DEFINITION,
    DTYPES,
    FILTERS,
    LIVE,
    RULES,
    VOCABS,
    Call,
    Subject,
    as_it_is,
    assert_same,
    cast,
    copied,
    each_subject,
    every_subject,
    filters,
    greedy_verification,
    logits,
    offset,
    reversed_rows,
    sampling,
    sampling_of_probabilities,
    strided,
    transposed,
    verification,
    verification_of_probabilities,
)

GOLDEN = Path(__file__).parent / "golden" / "tokens.json"


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
