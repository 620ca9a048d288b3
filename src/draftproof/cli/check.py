"""``draftproof check``: does this installation keep its promises on this machine?"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import typer
from rich.text import Text

from .. import _dispatch, testing
from ..rng.philox import philox
from ..sampling.api import filter_logits, sample_probs, sample_with_logprobs
from ..testing.grid import SMALL
from ..types import Array
from ..verification.chain.api import verify, verify_greedy, verify_probs
from ..verification.chain.reference import RULES
from .console import out, wait_passively

# Counter, key and output of Philox4x32-10 as Random123 publishes them.
KNOWN_ANSWERS = (
    ((0x00000000,) * 4, (0x00000000,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"point_mass": True},
    {"ragged": True},
    {"eos": frozenset([1])},
    {"vocab": 4, "top_k": 2},
    {"vocab": 4, "top_p": Fraction(1, 2)},
)
MODELS = 16


class Place(NamedTuple):
    """A backend on an array library or device, and how to bring a NumPy array there."""

    name: str
    backend: str
    put: Callable[[Array], Array]


def check() -> None:
    """Check random numbers, laws and backends on this machine; exit with 1 if anything is wrong."""
    failures = 0
    wait_passively()
    for name, run in checks():
        start = time.perf_counter()
        try:
            mark, detail = "ok    ", run()
        # Whatever stops a check is a finding, and the others still run.
        except Exception as error:
            failures += 1
            mark, detail = "FAILED", str(error) if isinstance(error, AssertionError) else repr(error)
        style = "green" if mark.startswith("ok") else "red"
        out.print(Text.assemble((mark, style), f" {name}: {detail} ({time.perf_counter() - start:.1f} s)"))
    if failures:
        raise typer.Exit(1)


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each check's name and a function that returns what was shown or raises."""
    yield "Philox4x32-10", known_answers
    for rule in RULES:
        yield f"law of rule {rule}", functools.partial(law, rule)
    yield "wrong rules", mutants
    everywhere = places()
    for place in everywhere:
        yield f"verification on {place.name}", functools.partial(grid, place)
    for place in everywhere[1:]:
        yield f"bits on {place.name}", functools.partial(bits, everywhere[0], place)


def known_answers() -> str:
    """Check the generator, on Python ints and on arrays."""
    for counter, key, expected in KNOWN_ANSWERS:
        a, b, c, d, e, f = (np.array([word], dtype=np.int64) for word in (*counter, *key))
        on_arrays = philox((a, b, c, d), (e, f))
        for got in (philox(counter, key), tuple(int(word[0]) for word in on_arrays)):
            if got != expected:
                raise AssertionError(f"expected {expected}, got {got}")
    return f"{len(KNOWN_ANSWERS)} published vectors"


def law(rule: str) -> str:
    """Prove by enumeration that speculation emits the target's law, or for greedy its argmax."""
    for features in FEATURES:
        testing.check_law(testing.System(rule=RULES[rule]), testing.models(MODELS, **features))
    testing.check_law(testing.System(rule=RULES[rule]), testing.models(MODELS, vocab=2), to_end=True)
    return f"equal to the target's in exact arithmetic, {MODELS * (len(FEATURES) + 1)} pairs of models"


def mutants() -> str:
    """Check that the proofs can fail."""
    for name, mutant in testing.MUTANTS.items():
        try:
            mutant.check(mutant.system)
        except AssertionError:
            continue
        raise AssertionError(f"{name!r} passed as lossless")
    return f"{len(testing.MUTANTS)} of {len(testing.MUTANTS)} found"


def places() -> list[Place]:
    """Return the backends present, eager on NumPy first: it defines the bits."""
    listing = _dispatch.backends().values()

    def present(device: str) -> list[str]:
        named = [b for b in _dispatch.BACKENDS[device] if all(row[b] == "available" for row in listing)]
        return sorted(named, key=lambda backend: backend != "eager")

    found = [Place(f"{backend} (NumPy)", backend, np.asarray) for backend in present("cpu")]
    if find_spec("torch"):
        import torch

        for device in _dispatch.BACKENDS:
            if getattr(torch, device).is_available():
                put = functools.partial(torch.asarray, device=device)
                found += [Place(f"{backend} (torch {device})", backend, put) for backend in present(device)]
    return found


def grid(place: Place) -> str:
    """Check verification with given uniforms against the rules in exact arithmetic."""

    def run(target: Array, draft: Array | None, tokens: Array, **options: Any) -> Any:
        options = {name: place.put(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}
        draft = None if draft is None else place.put(draft)
        result = verify_probs(place.put(target), draft, place.put(tokens), **options, backend=place.backend)
        return type(result)(*map(to_numpy, result))

    reports = testing.check_grid(run, shapes=SMALL)
    return f"{sum(report.evaluations for report in reports.values())} rounds as by the exact rules"


def bits(defining: Place, place: Place) -> str:
    """Check that every output of every operation has the bits that ``defining`` gives."""
    compared = 0
    for (name, expected), (_, got) in zip(outputs(defining), outputs(place), strict=True):
        if expected.dtype != got.dtype or expected.tobytes() != got.tobytes():
            raise AssertionError(f"{name} differs from {defining.name}")
        compared += expected.size
    return f"{compared} values equal to those of {defining.name}"


def outputs(place: Place) -> Iterator[tuple[str, Array]]:
    """Run every operation on fixed inputs and yield its outputs by name."""
    batch, drafted, vocab = 16, 4, 3001
    rng = np.random.default_rng(20)
    target = place.put(rng.normal(0, 4, (batch, drafted + 1, vocab)).astype(np.float32))
    draft = place.put(rng.normal(0, 4, (batch, drafted, vocab)).astype(np.float32))
    tokens = place.put(rng.integers(-1, vocab, (batch, drafted)))
    stream = {
        "seed": place.put(rng.integers(-(2**63), 2**63 - 1, batch)),
        "offset": place.put(rng.integers(0, 2**40, batch)),
    }
    filters = {
        "temperature": place.put(rng.choice([0, 0.5, 1, 1.5], batch).astype(np.float32)),
        "top_k": place.put(rng.integers(1, 200, batch)),
        "top_p": place.put(rng.uniform(0.3, 1, batch).astype(np.float32)),
        "min_p": place.put(rng.uniform(0, 0.2, batch).astype(np.float32)),
        "repetition_penalty": place.put(rng.uniform(0.8, 1.5, batch).astype(np.float32)),
        "prev_tokens": place.put(rng.integers(-1, vocab, (batch, 20))),
    }
    probs = place.put(rng.dirichlet(np.ones(vocab), batch).astype(np.float32))
    for options in ({}, filters):
        logits, common = target[:, 0], {**options, "backend": place.backend}
        yield "filter_logits", to_numpy(filter_logits(logits, **common))
        for field, array in sample_with_logprobs(logits, **common, **stream)._asdict().items():
            yield f"sample_with_logprobs {field}", to_numpy(array)
        for rule in RULES:
            for field, array in verify(target, draft, tokens, rule=rule, **common, **stream)._asdict().items():
                yield f"verify {rule} {field}", to_numpy(array)
    yield "sample_probs", to_numpy(sample_probs(probs, **stream, backend=place.backend))
    for field, array in verify_greedy(target, tokens, backend=place.backend)._asdict().items():
        yield f"verify_greedy {field}", to_numpy(array)


def to_numpy(array: Array) -> Array:
    """Return an array of any library as NumPy."""
    return array.cpu().numpy() if hasattr(array, "cpu") else array
