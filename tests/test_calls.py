"""The plain call: what goes straight to the core says what the full path says, and what may not go there does not."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftproof
from draftproof import _checks, _native

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(_native.core is None, reason="this installation has no C++ core: " + _native.missing)

B, K, V = 3, 2, 70
draw = np.random.default_rng(0)
LOGITS = draw.standard_normal((B, V)).astype(np.float32)
TARGET = draw.standard_normal((B, K + 1, V)).astype(np.float32)
DRAFT = TARGET[:, :K] + draw.standard_normal((B, K, V)).astype(np.float32)
WIDE = np.concatenate([DRAFT, DRAFT[..., :5]], axis=-1)
TOKENS = np.array([[1, 2], [-1, 4], [70, 5]])
IDS = draw.integers(-1, V, (B, 6))
PENALTY = {"repetition_penalty": 1.3, "prev_tokens": IDS}


def softmax(rows: Any) -> Any:
    weights = np.exp(rows.astype(np.float64))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def packed(mask: Any) -> Any:
    bits = np.concatenate([mask, np.ones((*mask.shape[:-1], -mask.shape[-1] % 32), bool)], axis=-1)
    return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)


def masks(*shape: int) -> Any:
    return draw.random(shape) < 0.7


def each(name: str, values: dict[str, Any], **also: Any) -> dict[str, dict[str, Any]]:
    return {f"{name} {form}": {name: value, **also} for form, value in values.items()}


NUMBERS = {
    **each("temperature", {"0": 0, "float": 0.7, "[B]": np.float32([0, 0.5, 2]), "float64 [B]": np.array([0, 0.5, 2])}),
    **each("top_k", {"int": 5, "off": -1, "large": 2**40, "[B]": np.array([-1, 5, 2**40])}),
    **each("top_p", {"float": 0.6, "0": 0, "1": 1, "[B]": np.float32([0, 0.5, 1]), "float64": np.array([0, 0.9, 1])}),
    **each("min_p", {"float": 0.2, "1": 1.0, "[B]": np.float32([0, 0.1, 1])}),
    **each("repetition_penalty", {"float": 1.3, "[B]": np.float32([0.5, 1, 3])}, prev_tokens=IDS),
    **each("prev_tokens", {"strided": np.repeat(IDS, 2, 1)[:, ::2], "empty": IDS[:, :0]}, repetition_penalty=2.0),
    "all numbers": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, **PENALTY},
}
SEEDS = each("seed", {"-7": -7, "2**64 - 1": 2**64 - 1, "[B]": draw.integers(-(2**63), 2**63, B)})
SEEDS |= each("seed", {"uint64 [B]": draw.integers(0, 2**64, B, np.uint64)})
STREAM = SEEDS | each("offset", {"int": 2**62, "[B]": np.array([0, 7, 2**40])})
CHOSEN = masks(B, V)
CHOSEN_DRAFTS = masks(B, K, V + 5)
ENDS = {
    **each("eos", {"int": 4, "list": [4, 1], "tuple": (4,), "[]": [], "[E]": np.array([4, 1]), "[B, E]": IDS[:, :2]}),
    **each("num_draft_tokens", {"int": 1, "[B]": np.array([0, 1, 2])}),
}
ONE_ROW = {
    "alone": {},
    **NUMBERS,
    **each("mask", {"bool": CHOSEN, "packed": packed(CHOSEN), "strided": np.asfortranarray(CHOSEN)}),
}
DRAWN = {**ONE_ROW, **STREAM, **each("draft_index", {"int": 3, "[B]": np.array([0, 1, 2**24 - 1])})}
VERIFIED = {
    "alone": {},
    **NUMBERS,
    **STREAM,
    **ENDS,
    **each("rule", {rule: rule for rule in ("token", "block", "match", "greedy")}, eos=[4]),
    **each("mask", {"bool": (mask := masks(B, K + 1, V)), "packed": packed(mask)}),
    **each("draft_logits", {"None": None, "of another vocabulary": WIDE, "float64": DRAFT.astype(np.float64)}),
    **each("draft_mask", {"bool": CHOSEN_DRAFTS, "packed": packed(CHOSEN_DRAFTS)}, draft_logits=WIDE, mask=mask),
    "masks of two sizes": {"draft_logits": WIDE, "mask": mask},
    "a draft of its own": {"draft_temperature": 0.5, "draft_top_k": 9, "draft_top_p": 0.8, "draft_min_p": 0.1},
    "a draft without filters": {"top_k": 5, "draft_top_k": 0, "draft_repetition_penalty": 1, **PENALTY},
}
UNIFORMS = {"uniform_accept": draw.random((B, K)), "uniform_sample": np.linspace(0, 1, B * (K + 1)).reshape(B, K + 1)}
CHECKED = {
    **STREAM,
    **ENDS,
    **each("rule", {rule: rule for rule in ("token", "block", "match", "greedy")}),
    "uniforms": {"seed": None, **UNIFORMS},
    "float32 uniforms": {"seed": None, **{n: u.astype(np.float32) for n, u in UNIFORMS.items()}},
    "one uniform": {"uniform_sample": UNIFORMS["uniform_sample"]},
    "match by uniforms": {"seed": None, "rule": "match", "uniform_sample": UNIFORMS["uniform_sample"]},
    "greedy without seed": {"seed": None, "rule": "greedy"},
    "point mass": {"draft_probs": None},
}
ROWS: dict[str, dict[str, Any]] = {
    "sample": {"logits": LOGITS, "seed": 5},
    "sample_with_logprobs": {"logits": LOGITS, "seed": 5},
    "filter_logits": {"logits": LOGITS},
    "sample_probs": {"probs": softmax(LOGITS), "seed": 5},
    "verify": {"target_logits": TARGET, "draft_logits": DRAFT, "draft_tokens": TOKENS, "seed": 5},
    "verify_probs": {"target_probs": softmax(TARGET), "draft_probs": softmax(DRAFT), "draft_tokens": TOKENS, "seed": 5},
    "verify_greedy": {"target": TARGET, "draft_tokens": TOKENS},
}
USUAL = {
    "sample": DRAWN,
    "sample_with_logprobs": DRAWN,
    "filter_logits": ONE_ROW,
    "sample_probs": STREAM,
    "verify": VERIFIED,
    "verify_probs": CHECKED,
    "verify_greedy": {"alone": {}, **ENDS},
}
FIRST = {name: next(iter(rows)) for name, rows in ROWS.items()}


def of(library: str, given: dict[str, Any]) -> dict[str, Any]:
    if library == "numpy":
        return given
    return {n: torch.from_numpy(np.array(a)) if isinstance(a, np.ndarray) else a for n, a in given.items()}


def call(function: str, given: dict[str, Any]) -> tuple[Any, ...]:
    result = getattr(draftproof, function)(**given)
    return result if isinstance(result, tuple) else (result,)


def bits(result: tuple[Any, ...]) -> list[Any]:
    return [(type(a), a.dtype, tuple(a.shape), np.asarray(a).tobytes()) for a in result]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per call that took the full path."""
    taken: list[Any] = []
    flag = _checks.flag
    monkeypatch.setattr(_checks, "flag", lambda value: taken.append(value) or flag(value))
    return taken


both = pytest.mark.parametrize("library", ["numpy", "torch"])
each_function = pytest.mark.parametrize("function", ROWS)


@both
@pytest.mark.parametrize(("function", "form"), [(name, form) for name, forms in USUAL.items() for form in forms])
def test_usual_calls_are_plain_and_say_what_the_full_path_says(
    function: str, form: str, library: str, full: list[Any]
) -> None:
    given = of(library, {**ROWS[function], **USUAL[function][form]})
    plain = bits(call(function, given))
    assert full == []
    for backend in ("cpu", "eager"):
        assert bits(call(function, {**given, "backend": backend})) == plain
    assert len(full) == 2


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "float16": lambda a: a.astype(np.float16),
    "float64": lambda a: a.astype(np.float64),
    "transposed": lambda a: np.ascontiguousarray(a.swapaxes(0, -1)).swapaxes(0, -1),
    "every second": lambda a: np.repeat(a, 2, -1)[..., ::2],
    "backwards": lambda a: a[::-1, ..., ::-1],
    "one row for all": lambda a: np.broadcast_to(a[:1], a.shape),
    "no rows": lambda a: a[:0],
    "torch bfloat16": lambda a: torch.from_numpy(a).bfloat16(),
    "torch float16": lambda a: torch.from_numpy(a).half(),
    "torch transposed": lambda a: torch.from_numpy(a).movedim(0, -1).contiguous().movedim(-1, 0),
    "torch expanded": lambda a: torch.from_numpy(a[:1]).expand(a.shape),
    "torch offset": lambda a: torch.nn.functional.pad(torch.from_numpy(a), (3, 2))[..., 3:-2],
    "torch inference": lambda a: torch.inference_mode()(lambda: torch.from_numpy(a).clone())(),
    "torch with gradient": lambda a: torch.from_numpy(a.copy()).requires_grad_(),
}


@each_function
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_layout_are_plain(function: str, layout: str, full: list[Any]) -> None:
    library = "torch" if layout.startswith("torch") else "numpy"
    rows = {n: a for n, a in ROWS[function].items() if isinstance(a, np.ndarray) and a.dtype == np.float32}
    laid = {n: LAYOUTS[layout](a) for n, a in rows.items()}
    batch = laid[FIRST[function]].shape[0]
    given = {n: a[:batch] if isinstance(a, np.ndarray) else a for n, a in ROWS[function].items()}
    given = {**of(library, given), **laid}
    plain = call(function, given)
    assert full == []
    assert not any(getattr(a, "requires_grad", False) for a in plain)
    assert bits(call(function, {**given, "backend": "eager"})) == bits(plain)


@both
@each_function
def test_dead_rows_are_for_the_full_path_to_raise_for(function: str, library: str, full: list[Any]) -> None:
    spoiled = ROWS[function][FIRST[function]].copy()
    spoiled[1] = np.nan
    given = of(library, {**ROWS[function], FIRST[function]: spoiled})
    for check in (None, True):
        with pytest.raises(draftproof.ValueRangeError, match=rf"^{function}: row 1 holds"):
            call(function, {**given, "check": check})
    assert len(full) == 2
    plain = bits(call(function, {**given, "check": False}))
    assert len(full) == 2
    assert bits(call(function, {**given, "check": False, "backend": "eager"})) == plain


def off_its_alignment(array: Any) -> Any:
    return np.frombuffer(b"\0" + array.tobytes(), np.uint8, offset=1).view(array.dtype).reshape(array.shape)


def field(array: Any) -> Any:
    """The array as a field whose strides are no multiple of its items."""
    table = np.zeros(array.shape, [("value", array.dtype), ("flag", "i1")])
    table["value"] = array
    return table["value"]


class Named(torch.Tensor):
    """A subclass that adds nothing."""


CROOKED = torch.frombuffer(bytearray(b"\0" + LOGITS.tobytes()), dtype=torch.float32, offset=1).view(B, V)
UNUSUAL: dict[str, dict[str, Any]] = {
    "NumPy scalars": {"logits": LOGITS, "temperature": np.float32(0.5), "seed": np.int64(3), "offset": np.uint8(4)},
    "0-D arrays": {"logits": LOGITS, "seed": np.array(3), "top_p": np.array(0.5)},
    "lists": {"logits": LOGITS, "seed": 3, "temperature": [0.5, 1, 2], "prev_tokens": [[1], [2], [-1]]},
    "int32 history": {"logits": LOGITS, "seed": 3, "prev_tokens": IDS.astype(np.int32), "repetition_penalty": 2},
    "float top_k": {"logits": LOGITS, "seed": 3, "top_k": 5.0},
    "subnormal temperature": {"logits": LOGITS, "seed": 3, "temperature": 1e-40},
    "rows off their alignment": {"logits": off_its_alignment(LOGITS), "seed": 3},
    "history off its alignment": {"logits": LOGITS, "seed": 3, **PENALTY, "prev_tokens": off_its_alignment(IDS)},
    "odd strides": {"logits": field(LOGITS), "seed": 3},
    "memory map": {"logits": LOGITS.view(np.memmap), "seed": 3},
    "torch negated": {"logits": torch._neg_view(torch.from_numpy(-LOGITS)), "seed": 3},
    "torch off its alignment": {"logits": CROOKED, "seed": 3},
    "torch parameter": {"logits": torch.nn.Parameter(torch.from_numpy(LOGITS)), "seed": 3},
    "torch subclass": {"logits": torch.from_numpy(LOGITS).as_subclass(Named), "seed": 3},
    "torch 0-D": {"logits": torch.from_numpy(LOGITS), "seed": torch.tensor(3)},
}


@pytest.mark.parametrize("form", UNUSUAL)
def test_unusual_calls_take_the_full_path(form: str, full: list[Any]) -> None:
    given = UNUSUAL[form]
    found = bits(call("sample", given))
    assert len(full) == 1
    for backend in ("cpu", "eager"):
        assert bits(call("sample", {**given, "backend": backend})) == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e39},
        {"top_k": -2},
        {"top_k": np.array([1, -2, 3])},
        {"top_p": 1.5},
        {"top_p": np.array([0.5, 0.5, np.nan])},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": np.float32([1, 0, 1])},
        {"offset": -1},
        {"offset": 2**63},
        {"offset": np.array([0, -1, 0])},
        {"draft_index": 2**24},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"seed": np.zeros(B + 1, np.int64)},
        {"prev_tokens": IDS[:-1]},
        {"mask": CHOSEN[:, 1:]},
        {"mask": packed(CHOSEN)[:, 1:]},
        {"check": 1},
    ],
    ids=str,
)
@both
def test_errors_are_for_the_full_path(wrong: dict[str, Any], library: str) -> None:
    with pytest.raises((draftproof.ValueRangeError, draftproof.ShapeError, draftproof.DtypeError)) as error:
        call("sample", of(library, {**ROWS["sample"], **wrong}))
    assert str(error.value).startswith(next(iter(wrong)))


# --- where torch has to see the op ------------------------------------------------------------------------------------


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the library's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "draftproof":
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@each_function
def test_a_dispatch_mode_sees_the_op(function: str) -> None:
    given = of("torch", ROWS[function])
    expected = bits(call(function, given))
    with Seen() as seen:
        assert bits(call(function, given)) == expected
    assert seen.ops == [function]


@each_function
def test_tracers_see_the_op(function: str) -> None:
    given = of("torch", ROWS[function])
    tensors = [n for n, a in given.items() if torch.is_tensor(a)]

    def run(*arrays: Any) -> Any:
        return call(function, {**given, **dict(zip(tensors, arrays, strict=True))})

    arrays = [given[n] for n in tensors]
    graph = torch.fx.experimental.proxy_tensor.make_fx(run)(*arrays)
    assert f"draftproof.{function}" in graph.code


def test_the_older_tracer_sees_the_op() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is on its way out, torch says
        traced = torch.jit.trace(lambda rows: draftproof.sample(rows, seed=1), torch.from_numpy(LOGITS))
    assert "draftproof::sample" in str(traced.graph)


def test_transforms_and_modes_see_the_op(full: list[Any]) -> None:
    rows = torch.from_numpy(LOGITS)
    expected = draftproof.sample(rows, seed=1).tolist()
    assert full == []
    # The first call is of a tensor that the transform has nothing to do with.
    torch.func.grad(lambda r: (draftproof.sample(rows, seed=1) * draftproof.sample(r, seed=1) * r.sum()).sum())(rows)
    assert len(full) == 2
    with torch.device("cpu"):
        assert draftproof.sample(rows, seed=1).tolist() == expected
    assert len(full) == 3
    with torch._subclasses.FakeTensorMode() as mode:
        assert draftproof.sample(mode.from_tensor(rows), seed=1).shape == (B,)
    assert len(full) == 4


def test_numpy_calls_do_not_mind_torch_modes(full: list[Any]) -> None:
    with torch.device("cpu"), Seen() as seen:
        draftproof.sample(LOGITS, seed=1)
    assert (full, seen.ops) == ([], [])


@each_function
def test_a_torch_without_the_exchange_table(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core then gets NumPy views, and float32 copies of bfloat16 rows."""
    given = of("torch", ROWS[function])
    given[FIRST[function]] = given[FIRST[function]].bfloat16()
    expected = bits(call(function, {**given, "backend": "cpu"}))
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert isinstance(_native.view(given[FIRST[function]]), np.ndarray)
    assert bits(call(function, {**given, "backend": "cpu"})) == expected


# --- threads and memory -----------------------------------------------------------------------------------------------


@both
def test_calls_of_several_threads_at_once(library: str) -> None:
    def work(number: int) -> list[Any]:
        rng = np.random.default_rng(number)
        vocab = int(rng.choice([16, 5001, 70001]))
        target = rng.standard_normal((2, 3, vocab)).astype(np.float32)
        rows = of(library, {"target_logits": target, "draft_logits": target[:, :2] * 0.9, "draft_tokens": TOKENS[:2]})
        filters = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": number}
        logits = of(library, {"logits": target[:, 0]})["logits"]
        said = [draftproof.sample_with_logprobs(logits, **filters), draftproof.verify(**rows, **filters)]
        said.append((draftproof.sample(logits, top_p=0.5, seed=number), draftproof.filter_logits(logits, top_k=9)))
        return [bits(each) for each in said]

    alone = [work(number) for number in range(24)]
    before = _native.core.num_threads()
    try:
        draftproof.set_num_threads(3)
        with ThreadPoolExecutor(8) as pool:
            for _ in range(3):
                assert list(pool.map(work, range(24))) == alone
    finally:
        draftproof.set_num_threads(before)


def test_other_threads_run_during_a_call() -> None:
    logits = np.broadcast_to(np.zeros((1, 64000), np.float32), (100, 64000))
    calling = threading.Thread(target=functools.partial(draftproof.sample_with_logprobs, logits, top_p=0.5, seed=1))
    ticks = 0
    calling.start()
    while calling.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5


ABSURD = 2**56


@both
@each_function
def test_an_absurd_batch_is_a_want_of_memory(function: str, library: str) -> None:
    def wide(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        if library == "numpy":
            return np.broadcast_to(array[:1, ..., :4], (ABSURD, *array.shape[1:-1], min(4, array.shape[-1])))
        return torch.from_numpy(array[:1, ..., :4].copy()).expand(ABSURD, *[-1] * (array.ndim - 1))

    given = {name: wide(array) for name, array in ROWS[function].items()}
    with pytest.raises(MemoryError):
        call(function, given)


HUNGRY = """
import numpy as np, draftproof
logits = np.random.default_rng(0).standard_normal((4, 3, 1 << 18)).astype(np.float32)
drafts = np.zeros((4, 2), np.int64)
many = {"top_k": 1 << 17, "top_p": 0.999}
calls = (
    lambda **given: draftproof.sample(logits[:, 0], seed=1, **many, **given),
    lambda **given: draftproof.filter_logits(logits[:, 0], **many, **given)[:, ::999],
    lambda **given: draftproof.verify(logits, logits[:, 1:], drafts, seed=1, **many, **given).tokens,
)
"""
STARVED = """
import resource
draftproof.set_num_threads(3)
# A thread that finds no memory for its thread-local data ends the process, so each has to work once before.
for _ in range(20):
    draftproof.sample(np.zeros((256, 20000), np.float32), seed=1)
failed, said = 0, set()
for shift in (16, 20, 28):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << shift), resource.RLIM_INFINITY))
    for number, call in enumerate(calls):
        try:
            said.add((number, call().tobytes().hex()))
        except MemoryError:
            failed += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(failed, *(text for _, text in sorted(said)))
"""


def test_memory_that_runs_out_inside_the_core() -> None:
    """On whatever thread an allocation fails, the call raises MemoryError, and later ones are right."""
    pytest.importorskip("resource")
    if not Path("/proc/self/statm").exists():
        pytest.skip("the address space in use is not known here")
    # The allocator of glibc then keeps no room of its own that would hide the want.
    own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", HUNGRY + STARVED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    assert done.returncode == 0, done.stderr
    failed, *said = done.stdout.split()
    assert int(failed) > 0
    names: dict[str, Any] = {}
    exec(HUNGRY, names)
    assert said == [call(backend="eager").tobytes().hex() for call in names["calls"]]


@pytest.mark.parametrize("backend", ["auto", "cpu", "eager"])
def test_a_rule_may_be_any_string(backend):
    class Name(str):
        pass

    given = {"draft_logits": None, "draft_tokens": np.zeros((1, 1), np.int64), "seed": 1, "backend": backend}
    result = draftproof.verify(np.zeros((1, 2, 4), np.float32), rule=Name("token"), **given)
    assert (
        result.num_accepted.tolist()
        == draftproof.verify(np.zeros((1, 2, 4), np.float32), rule="token", **given).num_accepted.tolist()
    )
