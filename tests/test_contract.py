"""What every operation promises besides its result: one signature, no trace of the batch, inputs left alone.

Also what torch asks of an operator: a fake, a vmap rule, and a compiled graph without breaks that has the same bits.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import draftproof
from draftproof import _dispatch, _torch_ops
from draftproof._dispatch import BACKENDS, FILTERS, OPERATIONS, REFERENCE

B, K, V = 6, 3, 70
RULES = ("token", "block", "match", "greedy")
PUBLIC = [name for name in draftproof.__all__ if inspect.isfunction(getattr(draftproof, name))]
TENSORS = torch.from_numpy


class Side(NamedTuple):
    """Where a call is made: with arrays of a library, on a backend."""

    convert: Callable[[Any], Any] = np.asarray
    backend: str = "auto"


class Call(NamedTuple):
    """A call whose arrays all have a row per request; ``options`` are the same for all."""

    function: str
    arrays: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012

    def __call__(self, side: Side = Side(), **changed: Any) -> dict[str, Any]:  # noqa: B008
        return results(self.raw({**self.converted(side), **changed}, side))

    def converted(self, side: Side) -> dict[str, Any]:
        return {name: None if a is None else side.convert(a) for name, a in self.arrays.items()}

    def raw(self, arrays: dict[str, Any], side: Side) -> Any:
        return getattr(draftproof, self.function)(**arrays, **{"backend": side.backend, **self.options})

    def rows(self, index: Any) -> Call:
        return self._replace(arrays={n: None if a is None else a[index] for n, a in self.arrays.items()})


def results(result: Any) -> dict[str, Any]:
    fields = result._asdict() if isinstance(result, tuple) else {"result": result}
    return {name: np.asarray(array) for name, array in fields.items()}


def rows_of(found: dict[str, Any], index: Any) -> dict[str, Any]:
    return {name: array[index] for name, array in found.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), (name, found[name], array)


def parameters(draw: np.random.Generator, batch: int, prefix: str = "") -> dict[str, Any]:
    values = {
        "temperature": draw.choice([0.0, 0.6, 1.0, 1.5], batch),
        "top_k": draw.choice([0, 3, 12, 40], batch),
        "top_p": draw.choice([0.5, 0.9, 1.0], batch),
        "min_p": draw.choice([0.0, 0.02, 0.2], batch),
        "repetition_penalty": draw.choice([1.0, 1.3, 0.8], batch),
    }
    return {prefix + name: array for name, array in values.items()}


def probabilities(logits: Any) -> Any:
    weights = np.exp(logits)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def calls(batch: int = B, salt: int = 0) -> dict[str, Call]:
    """Return one call per operation and rule, with every argument given."""
    draw = np.random.default_rng(salt)

    def logits(*shape: int) -> Any:
        # A grid, so that ties occur.
        return np.round(draw.standard_normal(shape) * 24).astype(np.float32) / 8

    def mask(*shape: int) -> Any:
        return draw.random(shape) < 0.9

    stream = {"seed": draw.integers(-(2**63), 2**63, batch), "offset": draw.integers(0, 2**40, batch)}
    past = {"prev_tokens": draw.integers(-1, V, (batch, 4))}
    filters = {**parameters(draw, batch), **past}
    # Rows of one request resemble each other, so that what was drafted before matters.
    target = logits(batch, 1, V) + logits(batch, K + 1, V) / 4
    draft = target[:, :K] + logits(batch, K, V) / 4
    tokens = {
        "draft_tokens": np.where(draw.random((batch, K)) < 0.8, draft.argmax(-1), draw.integers(0, V, (batch, K)))
    }
    ends = {"num_draft_tokens": draw.integers(K - 1, K + 1, batch), "eos": draw.integers(-1, V, (batch, 2))}
    one = {"logits": logits(batch, V), **filters, "mask": mask(batch, V)}
    named = {
        "sample": Call("sample", {**one, **stream}),
        "sample, private": Call("sample", {**one, **stream, "draft_index": draw.integers(0, 2**24, batch)}),
        "sample_with_logprobs": Call("sample_with_logprobs", {**one, **stream}),
        "filter_logits": Call("filter_logits", one),
        "sample_probs": Call("sample_probs", {"probs": probabilities(logits(batch, V)), **stream}),
        "verify_greedy": Call("verify_greedy", {"target": target, **tokens, **ends}),
    }
    uniforms = {"uniform_accept": draw.random((batch, K)), "uniform_sample": draw.random((batch, K + 1))}
    for rule in RULES:
        masks = {"mask": mask(batch, K + 1, V), "draft_mask": mask(batch, K, V)}
        rows = {"target_logits": target, "draft_logits": draft, **tokens, **ends}
        own = parameters(draw, batch, "draft_")
        named[f"verify {rule}"] = Call("verify", {**rows, **filters, **own, **masks, **stream}, {"rule": rule})
        point = {**rows, "draft_logits": None, **filters, "mask": masks["mask"], **stream}
        named[f"verify {rule}, point mass"] = Call("verify", point, {"rule": rule})
        rows = {"target_probs": probabilities(target), "draft_probs": probabilities(draft), **tokens, **ends}
        named[f"verify_probs {rule}"] = Call("verify_probs", {**rows, **stream}, {"rule": rule})
        named[f"verify_probs {rule}, uniforms"] = Call("verify_probs", {**rows, **uniforms}, {"rule": rule})
    return named


CALLS = calls()
each_call = pytest.mark.parametrize("name", CALLS)
AVAILABLE = [name for name in BACKENDS["cpu"] if draftproof.backends()["sample"][name] == "available"]
SIDES = {
    f"{backend}-{library}": Side(convert, backend)
    for backend in (*AVAILABLE, "auto")
    for library, convert in (("numpy", np.asarray), ("torch", TENSORS))
}
each_side = pytest.mark.parametrize("side", SIDES.values(), ids=SIDES)


# --- signatures and documentation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_implementation_has_the_arguments_of_the_table(operation: str) -> None:
    spec = OPERATIONS[operation]
    expected = []
    for name in spec.arguments:
        field, prefix = name.removeprefix("draft_"), "draft_" * name.startswith("draft_")
        if field not in FILTERS:
            expected.append(name)
        elif field == FILTERS[0]:
            expected.append(f"{prefix}filters")
    for backend in {REFERENCE, *(name for row in BACKENDS.values() for name in row)}:
        if draftproof.backends()[operation][backend] != "available":
            continue
        module = importlib.import_module(f"draftproof.{spec.package}.{backend}")
        found = inspect.signature(getattr(module, operation)).parameters.values()
        assert [p.name for p in found] == expected, backend
        assert all(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in found), backend


@pytest.mark.parametrize("operation", [name for name in PUBLIC if name in OPERATIONS])
def test_a_public_function_takes_what_its_operation_takes(operation: str) -> None:
    found = inspect.signature(getattr(draftproof, operation)).parameters
    assert set(found) == {*OPERATIONS[operation].arguments, "check", "backend"}
    rows = [n for n, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert rows == [
        n for n in found if n in ("logits", "probs", "target", "draft_tokens") or "_logits" in n or "_probs" in n
    ]
    assert all(found[n].kind is inspect.Parameter.KEYWORD_ONLY for n in found if n not in rows)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_complete(name: str) -> None:
    function = getattr(draftproof, name)
    signature, text = inspect.signature(function), inspect.getdoc(function)
    sections = dict(re.findall(r"^(\w+)\n-+\n(.*?)(?=\n\n\w+\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL))
    expected = ["Parameters", "Returns", "Raises"] if signature.parameters else []
    if signature.return_annotation == "None":
        expected.remove("Returns")
    if name in OPERATIONS:
        expected.append("Notes")
        assert "**Exactness.**" in sections["Notes"]
    assert list(sections) == [*expected, "Examples"]
    assert ">>> draftproof." in sections["Examples"] or "= draftproof." in sections["Examples"]
    if sections.get("Parameters", "") != "Those of ``sample``.":
        headings = re.findall(r"^\w.*", sections.get("Parameters", ""), re.MULTILINE)
        assert {n for heading in headings for n in heading.partition(" :")[0].split(", ")} == set(signature.parameters)


# --- the batch leaves no trace ----------------------------------------------------------------------------------------


@each_side
@each_call
def test_a_row_is_the_same_alone_permuted_and_split(name: str, side: Side) -> None:
    call = CALLS[name]
    whole = call(side)
    for b in range(B):
        assert_same(call.rows(slice(b, b + 1))(side), rows_of(whole, slice(b, b + 1)))
    order = np.array([4, 0, 5, 2, 1, 3])
    assert_same(call.rows(order)(side), rows_of(whole, order))
    halves = [call.rows(part)(side) for part in (slice(0, 2), slice(2, None))]
    assert_same({n: np.concatenate([half[n] for half in halves]) for n in whole}, whole)


@each_side
@each_call
def test_a_row_is_the_same_among_64_others(name: str, side: Side) -> None:
    call, others = CALLS[name], calls(64, salt=1)[name]

    def joined(mine: Any, theirs: Any) -> Any:
        return None if mine is None else np.insert(theirs.astype(mine.dtype), np.arange(7, 7 + 9 * B, 9), mine, axis=0)

    arrays = {n: joined(a, others.arrays[n]) for n, a in call.arrays.items()}
    found = call._replace(arrays=arrays)(side)
    assert_same(rows_of(found, np.arange(7, 7 + 10 * B, 10)), call(side))


@each_side
@each_call
def test_a_dead_neighbour_changes_nothing(name: str, side: Side) -> None:
    call = CALLS[name]
    arrays = dict(call.arrays)
    first = next(iter(arrays))
    arrays[first] = arrays[first].copy()
    arrays[first][2] = np.nan
    options = {**call.options, "check": False}
    found = call._replace(arrays=arrays, options=options)(side)
    others = [0, 1, 3, 4, 5]
    assert_same(rows_of(found, others), rows_of(call(side), others))


@each_side
@each_call
def test_a_padded_vocabulary_changes_nothing(name: str, side: Side) -> None:
    call = CALLS[name]
    padding = {"logits": -np.inf, "target": -np.inf, "target_logits": -np.inf, "draft_logits": -np.inf}
    padding |= {"probs": 0, "target_probs": 0, "draft_probs": 0, "mask": False, "draft_mask": False}

    def padded(name: str, array: Any) -> Any:
        if name not in padding or array is None:
            return array
        return np.concatenate([array, np.full((*array.shape[:-1], 58), padding[name], array.dtype)], axis=-1)

    found = call._replace(arrays={n: padded(n, a) for n, a in call.arrays.items()})(side)
    if name == "filter_logits":
        assert (found["result"][:, V:] == -np.inf).all()
        found = {"result": np.ascontiguousarray(found["result"][:, :V])}
    assert_same(found, call(side))


@each_side
@each_call
def test_half_precision_is_its_float32(name: str, side: Side) -> None:
    call = CALLS[name]
    rows = [n for n, a in call.arrays.items() if a is not None and a.dtype == np.float32]
    narrow: list[Callable[[Any], Any]] = [lambda a: side.convert(a.astype(np.float16))]
    if side.convert is TENSORS:
        narrow.append(lambda a: TENSORS(a).to(torch.bfloat16))
    for cast in narrow:
        halves = {n: cast(call.arrays[n]) for n in rows}
        widened = {n: a.float() if side.convert is TENSORS else a.astype(np.float32) for n, a in halves.items()}
        assert_same(call(side, **halves), call(side, **widened))


def test_the_number_of_threads_changes_nothing() -> None:
    draw = np.random.default_rng(3)
    logits = torch.from_numpy(draw.standard_normal((5, 50257)).astype(np.float32))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append(results(draftproof.sample_with_logprobs(logits, top_p=0.9, seed=1)))
            found.append(results(draftproof.sample_with_logprobs(logits, top_k=40, seed=1)))
    finally:
        torch.set_num_threads(before)
    assert_same(found[2], found[0])
    assert_same(found[3], found[1])


# --- the caller's side ------------------------------------------------------------------------------------------------


@each_side
@each_call
def test_inputs_are_not_modified(name: str, side: Side) -> None:
    call = CALLS[name]
    arrays = {n: None if a is None else side.convert(a.copy()) for n, a in call.arrays.items()}
    for array in arrays.values():
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    call.raw(arrays, side)
    for n, array in arrays.items():
        assert array is None or np.asarray(array).tobytes() == call.arrays[n].tobytes(), n


@each_side
@each_call
def test_results_are_the_callers_own(name: str, side: Side) -> None:
    call = CALLS[name]
    expected = call(side)
    result = call.raw(call.converted(side), side)
    for array in result if isinstance(result, tuple) else (result,):
        assert type(array) is type(side.convert(np.zeros(1)))
        array[...] = 0
    assert_same(call(side), expected)


@pytest.fixture
def flushed_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor has no such mode")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@each_side
@each_call
def test_flushing_subnormals_changes_nothing(name: str, side: Side, request: pytest.FixtureRequest) -> None:
    def tiny(name: str, array: Any) -> Any:
        scaled = array is not None and (array.dtype == np.float32 or "temperature" in name)
        return np.ldexp(array, -127).astype(np.float32) if scaled else array

    call = CALLS[name]._replace(arrays={n: tiny(n, a) for n, a in CALLS[name].arrays.items()})
    expected = call(side)
    request.getfixturevalue("flushed_subnormals")
    assert float(np.float32(2.0**-126) * np.float32(0.5)) == 0.0
    assert_same(call(side), expected)


# --- torch's side -----------------------------------------------------------------------------------------------------


MINIMAL = {
    "sample, scalars": Call(
        "sample", {"logits": CALLS["sample"].arrays["logits"]}, {"seed": 3, "temperature": 0.7, "backend": "eager"}
    ),
    "verify, scalars": Call(
        "verify",
        {n: CALLS["verify match"].arrays[n] for n in ("target_logits", "draft_logits", "draft_tokens")},
        {"seed": 3, "rule": "match", "top_k": 5, "eos": 7},
    ),
}
CHECKED = (*(n for n in CALLS if n.partition(" ")[0] not in ("verify", "verify_probs")), *MINIMAL)
CHECKED += ("verify block", "verify token, point mass", "verify_probs token", "verify_probs match, uniforms")


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    call_op = _torch_ops.call_op

    def recording(operation: str, arguments: tuple[Any, ...], check: bool | None, backend: str) -> Any:
        made.append((operation, (*arguments, check, backend)))
        return call_op(operation, arguments, check, backend)

    monkeypatch.setattr(_torch_ops, "call_op", recording)
    monkeypatch.setattr(_dispatch, "core", None)  # no call goes round the op
    {**CALLS, **MINIMAL}[name](Side(TENSORS))
    ((operation, arguments),) = made
    torch.library.opcheck(getattr(torch.ops.draftproof, operation).default, arguments)


def everything(logits: Any, target: Any, draft: Any, tokens: Any, seed: Any, offset: Any) -> tuple[Any, ...]:
    """One of each operation, as a model's step would call them."""
    own = {"seed": seed, "offset": offset}
    filters = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
    verified = draftproof.verify(target, draft, tokens, eos=[3], **filters, **own)
    return (
        draftproof.sample(logits, **filters, **own),
        draftproof.sample(logits, draft_index=2, **own),
        *draftproof.sample_with_logprobs(logits, repetition_penalty=1.2, prev_tokens=tokens, **own),
        draftproof.filter_logits(logits, top_p=0.5),
        draftproof.sample_probs(logits.softmax(-1), **own),
        *verified,
        verified.packed(),
        *draftproof.verify(target, None, tokens, rule="match", **own),
        *draftproof.verify_probs(target.softmax(-1), draft.softmax(-1), tokens, rule="block", **own),
        *draftproof.verify_greedy(target, tokens),
    )


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_a_compiled_graph_has_no_break_and_the_same_bits(kind: str) -> None:
    draw = torch.Generator().manual_seed(5)
    inputs = [torch.randn(shape, generator=draw) for shape in ((B, V), (B, K + 1, V), (B, K, V))]
    inputs.append(torch.randint(0, V, (B, K), generator=draw))
    compilations = []

    def backend(graph: Any, example_inputs: Any) -> Any:  # noqa: ARG001
        compilations.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    for number in range(20):
        seed, offset = 7919 * number - 11, number * number
        if kind == "tensors":
            seed, offset = torch.arange(B) * seed, torch.arange(B) + offset
        for found, expected in zip(compiled(*inputs, seed, offset), everything(*inputs, seed, offset), strict=True):
            assert found.numpy().tobytes() == expected.numpy().tobytes()
    # One for the first numbers, one more once torch sees that they change.
    assert 1 <= len(compilations) <= 2


@each_call
def test_vmap_is_a_loop(name: str) -> None:
    call = CALLS[name]
    arrays = {n: TENSORS(a) for n, a in call.arrays.items() if a is not None}
    fixed = {n: None for n, a in call.arrays.items() if a is None}
    function = getattr(draftproof, call.function)

    def run(mapped: dict[str, Any], shared: dict[str, Any]) -> tuple[Any, ...]:
        result = function(**mapped, **shared, **fixed, **call.options)
        return tuple(result) if isinstance(result, tuple) else (result,)

    # Three copies of the batch in another order each, stacked along the last axis; the last argument is not mapped.
    *names, last = arrays
    orders = [torch.arange(B), torch.arange(B).flip(0), torch.arange(B).roll(2)]
    mapped = {n: torch.stack([arrays[n][order] for order in orders], dim=-1) for n in names}
    shared = {last: arrays[last]}
    found = torch.vmap(lambda m: run(m, shared), in_dims=-1)(mapped)
    for number in range(len(orders)):
        expected = run({n: a[..., number] for n, a in mapped.items()}, shared)
        for a, b in zip(found, expected, strict=True):
            assert a[number].numpy().tobytes() == b.numpy().tobytes()


def test_vmap_of_scalar_seeds_and_of_vmap() -> None:
    logits = TENSORS(np.random.default_rng(4).standard_normal((2, 5, B, V)).astype(np.float32))
    seeds = torch.arange(5)
    scalar = torch.vmap(lambda row, seed: draftproof.sample(row, seed=seed))
    assert torch.equal(
        scalar(logits[0], seeds),
        torch.stack([draftproof.sample(row, seed=seed) for row, seed in zip(logits[0], seeds, strict=True)]),
    )
    twice = torch.vmap(torch.vmap(lambda row: draftproof.sample(row, seed=9, top_k=4)))(logits)
    once = [[draftproof.sample(row, seed=9, top_k=4) for row in rows] for rows in logits]
    assert torch.equal(twice, torch.stack([torch.stack(rows) for rows in once]))
