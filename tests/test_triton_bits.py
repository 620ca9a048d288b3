"""The Triton kernels against eager on NumPy, which defines the bits: in the interpreter, and on a device (``gpu``).

The whole matrix of ``test_bits`` has a subject of its own for triton, slow in the interpreter. Here are the rows of it
that the default suite has time for, and what is triton's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import draftproof
import matrix
from draftproof import BackendError, _dispatch, testing
from draftproof._dispatch import OPERATIONS, interpreted
from draftproof.testing import grid
from matrix import DEFINITION, FILTERS, KINDS, RULES, Call, Subject, assert_same

BATCH = len(KINDS)
DEVICES = [name for name in ("cuda", "xpu") if getattr(torch, name).is_available()]
HERE = "cpu" if interpreted() else next(iter(DEVICES), "cpu")
TRITON = Subject("triton", f"torch-{HERE}")
TINY = (grid.Shape(2, 1, tuple(testing.midpoints(4)), 1), grid.Shape(3, 1, grid.EDGES[1:4:2], 1))
COMPILED = pytest.mark.skipif(interpreted() or not DEVICES, reason="needs a device, and kernels that are compiled")

if not interpreted():
    pytestmark = [pytest.mark.gpu, COMPILED]


def compare(call: Call, dtype: str = "float32", subject: Subject = TRITON) -> None:
    """Compare one call in every output; the layout is the subject's."""
    rows = tuple(None if r is None else matrix.cast(r, dtype) for r in call.rows)
    cast = call._replace(rows=rows)
    assert_same(cast.run(subject, dtype), cast.run(DEFINITION), call.function, dtype)


def compare_all(calls: list[Call], dtype: str = "float32", subject: Subject = TRITON) -> None:
    for call in calls:
        compare(call, dtype, subject)


def put(array: Any) -> Any:
    return torch.from_numpy(np.array(array)).to(HERE)


# --- the matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERS)
def test_sampling(name: str) -> None:
    sample, *others = matrix.sampling(name, 65, BATCH)
    compare(sample)
    # Half of the settings each.
    compare(others[FILTERS.index(name) % 2])


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_sampling_of_all_dtypes(dtype: str, name: str) -> None:
    for call in matrix.sampling(name, 33, BATCH)[::2]:
        compare(call, dtype)


@pytest.mark.parametrize("name", ["plain", "per row", "reward"])
def test_sampling_where_rows_are_shared_between_programs(name: str) -> None:
    for batch, vocab in ((1, 1000), (2, 1), (2, 1999)):
        compare(matrix.sampling(name, vocab, batch, matrix.LIVE)[0])


@pytest.mark.parametrize("name", FILTERS)
def test_verification_under_filters(name: str) -> None:
    number = FILTERS.index(name)
    rule, difference = RULES[number % 4], (None, 0, -4, 3)[number % 3 + number % 2]
    difference = difference if rule in ("token", "block") else None
    compare(matrix.verification(name, 65, rule, difference, 6, 2))


@pytest.mark.parametrize("rule", RULES)
def test_verification(rule: str) -> None:
    compare(matrix.verification("plain", 33, rule, None, BATCH, 3))
    compare(matrix.verification("per row", 65, rule, 0, 6, 2))
    for vocab, dtype in ((1, "float16"), (64, "float64"), (700, "bfloat16")):
        compare(matrix.verification("plain", vocab, rule, 0, 6, 2), dtype)


def few(call: Call, batch: int) -> Call:
    """Return the call with the first rows of its batch."""
    whole = call.rows[0].shape[0]

    def cut(value: Any) -> Any:
        return value[:batch] if isinstance(value, np.ndarray) and value.shape[0] == whole else value

    keywords = {name: cut(value) for name, value in call.keywords.items()}
    return call._replace(rows=tuple(map(cut, call.rows)), arguments=tuple(map(cut, call.arguments)), keywords=keywords)


@pytest.mark.parametrize("given", [False, True], ids=["seed", "uniforms"])
@pytest.mark.parametrize("rule", RULES)
def test_verification_of_probabilities(rule: str, given: bool) -> None:
    for vocab, difference, dtype in ((65, -1, "float32"), (200, None, "bfloat16")):
        compare(few(matrix.verification_of_probabilities(vocab, rule, difference, given), 8), dtype)


@pytest.mark.parametrize("vocab", [1, 64, 700])
def test_probabilities_and_greedy(vocab: int) -> None:
    compare(matrix.sampling_of_probabilities(vocab, BATCH), "float16")
    compare(matrix.greedy_verification(vocab, BATCH, 3), "bfloat16")


@pytest.mark.parametrize("batch", [0, 1])
def test_batch_sizes(batch: int) -> None:
    compare_all(matrix.sampling("all", 65, batch, matrix.LIVE))
    for rule, drafted in (("token", 0), ("block", 1), ("match", 1), ("greedy", 0)):
        compare(matrix.verification("plain", 65, rule, 0 if drafted else None, batch, drafted, matrix.LIVE))
    compare(matrix.sampling_of_probabilities(65, batch))
    compare(matrix.greedy_verification(65, batch, 2))


@pytest.mark.parametrize("layout", [matrix.transposed, matrix.strided, matrix.offset])
def test_memory_layout_does_not_matter(layout: Callable[[Any], Any]) -> None:
    subject = TRITON._replace(layout=layout)
    compare(matrix.sampling("per row", 65, 3)[1], subject=subject)
    compare(matrix.sampling("packed mask", 65, 3)[0], subject=subject)
    for rule in ("block", "match"):
        compare(matrix.verification("packed mask", 65, rule, None, 3, 2), subject=subject)
    compare(few(matrix.verification_of_probabilities(65, "token", 3, given=True), 4), subject=subject)
    compare(matrix.sampling_of_probabilities(65, 5), subject=subject)
    compare(matrix.greedy_verification(65, 5, 2), subject=subject)


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p"])
def test_a_large_vocabulary(name: str) -> None:
    compare(matrix.sampling(name, 151936, 2, 2)[0], "bfloat16")
    if name == "plain":
        compare(matrix.verification(name, 151936, "token", 0, 1, 1, 1), "bfloat16")


# --- how it is called -------------------------------------------------------------------------------------------------


def test_seeds_and_offsets_may_be_tensors_and_numbers() -> None:
    rows = matrix.logits(7, 33, 3, matrix.LIVE)
    for seed in (-5, (1 << 64) - 5):
        expected = draftproof.sample(rows, seed=seed, offset=1 << 40, backend="eager")
        for given in (seed, torch.tensor((seed + (1 << 63)) % (1 << 64) - (1 << 63), device=HERE)):
            for offset in (1 << 40, torch.tensor(1 << 40, device=HERE), torch.full((7,), 1 << 40, device=HERE)):
                found = draftproof.sample(put(rows), seed=given, offset=offset, backend="triton")
                assert found.tolist() == expected.tolist()


def every_operation(rows: Any, target: Any, tokens: Any, seed: Any, offset: Any, backend: str) -> tuple[Any, ...]:
    plain: dict[str, Any] = {"backend": backend, "check": False}
    own = {"seed": seed, "offset": offset, **plain}
    return (
        draftproof.sample(rows, top_k=5, temperature=0.8, **own),
        *draftproof.sample_with_logprobs(rows, **own),
        draftproof.filter_logits(rows, min_p=0.1, **plain),
        draftproof.sample_probs(rows.softmax(-1), **own),
        *draftproof.verify(target, target[:, :-1], tokens, rule="block", eos=3, **own),
        *draftproof.verify(target, None, tokens, rule="match", **own),
        *draftproof.verify_probs(target.softmax(-1), None, tokens, **own),
        *draftproof.verify_greedy(target, tokens, **plain),
    )


def inputs() -> tuple[Any, ...]:
    rows = put(matrix.logits(3, 65, 8, matrix.LIVE))
    target = put(matrix.spread(matrix.integers(9, 3, 2, 65)))
    return rows, target, target[:, :-1].argmax(-1)


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_a_compiled_graph_has_no_break_and_the_same_bits(kind: str) -> None:
    torch.compiler.reset()
    # On the CPU without code generation, which would wait for a C++ compiler.
    compiled = torch.compile(every_operation, fullgraph=True, backend="aot_eager" if HERE == "cpu" else "inductor")
    draws = (3, 4) if kind == "numbers" else (put(np.arange(3)), put(np.arange(3) * 5))
    expected = every_operation(*inputs(), *draws, "eager")
    for a, b in zip(compiled(*inputs(), *draws, "triton"), expected, strict=True):
        assert a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes()


@pytest.mark.gpu
@COMPILED
@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_a_captured_graph_has_the_same_bits(kind: str) -> None:
    given, offset = inputs(), put(np.arange(3))
    draws = (11, 12) if kind == "numbers" else (put(np.arange(3) + 11), offset)
    every_operation(*given, *draws, "triton")  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = every_operation(*given, *draws, "triton")
    for step in range(3):
        offset.fill_(step)
        given[0].add_(0.125)
        graph.replay()
        for found, expected in zip(captured, every_operation(*given, *draws, "triton"), strict=True):
            assert found.cpu().numpy().tobytes() == expected.cpu().numpy().tobytes()


@pytest.mark.gpu
@COMPILED
def test_bad_parameters_of_a_device_mark_their_rows() -> None:
    rows = put(matrix.logits(4, 129, 8, matrix.LIVE))
    heat = torch.tensor([1.0, -1.0, float("nan"), 1.0], device=HERE)
    found = draftproof.sample_with_logprobs(rows, temperature=heat, seed=put(np.arange(4)), backend="triton")
    expected = draftproof.sample_with_logprobs(rows, seed=put(np.arange(4)), backend="triton")
    assert (found.status.tolist(), found.tokens[1:3].tolist()) == ([0, 64, 64, 0], [-1, -1])
    assert found.tokens[[0, 3]].tolist() == expected.tokens[[0, 3]].tolist()


# --- the law, and what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_grid(rule: str) -> None:
    def verify_probs(*rows: Any, **options: Any) -> Any:
        rows = tuple(put(r) if isinstance(r, np.ndarray) else r for r in rows)
        options = {name: put(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}
        result = draftproof.verify_probs(*rows, **options, backend="triton")
        return type(result)(*(array.cpu().numpy() for array in result))

    (report,) = testing.check_grid(verify_probs, rules=[rule], shapes=TINY if HERE == "cpu" else grid.FULL).values()
    assert report.exact >= report.cases / 3


@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_is_offered(operation: str) -> None:
    assert draftproof.backends()[operation]["triton"] == "available"
    assert _dispatch.resolve(operation, "cuda", "auto") is _dispatch.resolve(operation, "xpu", "triton")


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((1, 5), np.float32)
    with pytest.raises(BackendError, match=r"takes torch tensors, got NumPy arrays: pass torch.from_numpy\(array\)"):
        draftproof.sample(rows, seed=1, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendError, match="under TRITON_INTERPRET=1; the tensors are on cpu: move them there"):
        draftproof.sample(torch.from_numpy(rows), seed=1, backend="triton")
    if not DEVICES:
        assert draftproof.backends()["sample"]["triton"].endswith("torch sees no such device")
    monkeypatch.setitem(_dispatch.MISSING, "triton", "not here")
    with pytest.raises(BackendError, match=r"backend='triton' is not available: not here. Here: "):
        draftproof.sample(torch.from_numpy(rows), seed=1, backend="triton")
    assert _dispatch.resolve("sample", "cuda", "auto").__module__.endswith("eager")
    assert draftproof.backends()["sample"]["triton"] == "not here"
