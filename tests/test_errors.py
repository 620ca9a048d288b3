"""What the errors say: argument, what was expected, what came, how to mend it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import draftproof as dp
from arguments import BOTH, CPU, DRAFT, KINDS, LOGITS, NAN, OURS, TARGET, TOKENS, Put, sample, torch
from draftproof import BackendError, DtypeError, ShapeError, ValueRangeError, _checks, _dispatch
from draftproof.sampling import api as sampling_api
from draftproof.verification.chain import api as chain_api


def other(put: Put) -> Put:
    """The library that the rows are not from."""
    return KINDS["numpy" if put is KINDS["torch"] else "torch"]


def sample_probs(put: Put, probs: Any, **given: Any) -> Any:
    return dp.sample_probs(put(probs), **{"seed": 1, **given})


def verify(put: Put, target: Any = TARGET, draft: Any = DRAFT, tokens: Any = TOKENS, **given: Any) -> Any:
    draft = None if draft is None else put(draft)
    return dp.verify(put(target), draft, put(tokens), **{"seed": 1, **given})


def verify_probs(put: Put, **given: Any) -> Any:
    return dp.verify_probs(put(abs(TARGET)), put(abs(DRAFT)), put(TOKENS), **given)


class Case(NamedTuple):
    """A wrong call and its error in full; ``{this}`` is the kind of the rows, ``{that}`` the other library's."""

    error: type[Exception]
    message: str
    call: Callable[[Put], Any]


SEED_REMEDY = "pass an int or an int64/uint64 array [B]; draftproof.random_seeds(B) gives fresh ones"


FLOAT_TYPES = "one of float16, bfloat16, float32, float64"


CASES = {
    # kinds and dtypes
    "rows kind": Case(
        DtypeError,
        "logits must be a NumPy array or a torch tensor [B, V], got list: convert it first",
        lambda _: dp.sample(LOGITS.tolist(), seed=1),
    ),
    "rows dtype": Case(
        DtypeError, f"logits must be {FLOAT_TYPES}, got int64: cast it first", lambda put: sample(put, TOKENS)
    ),
    "array kind": Case(
        DtypeError, "mask must be an array, got str: convert it first", lambda put: sample(put, mask="all")
    ),
    "list": Case(
        DtypeError,
        "prev_tokens must be numbers in rows of equal length, got a list of object",
        lambda put: sample(put, prev_tokens=[[1], [2, 3]]),
    ),
    "library": Case(
        DtypeError,
        "temperature must be {this} as the rows are, got {that}: convert one of them",
        lambda put: sample(put, temperature=other(put)(np.ones(2))),
    ),
    "device": Case(
        DtypeError,
        "top_p must be on cpu as the rows are, got meta: move it there",
        lambda _: sample(KINDS["torch"], top_p=torch.ones(2, device="meta")),
    ),
    "ids dtype": Case(
        DtypeError,
        "draft_tokens must be int32, int64 or uint32 token ids, got float32",
        lambda put: verify(put, tokens=np.ones((2, 2), np.float32)),
    ),
    "mask dtype": Case(
        DtypeError,
        "mask must be bool [B, V], or int32 with 32 ids packed in a word, got uint8",
        lambda put: sample(put, mask=put(np.ones((2, 5), np.uint8))),
    ),
    "filter bool": Case(
        DtypeError, "top_k must be a number or an array [B], got bool", lambda put: sample(put, top_k=True)
    ),
    "filter dtype": Case(
        DtypeError,
        "min_p must be a number or an array [B] of numbers, got complex64",
        lambda put: sample(put, min_p=put(np.ones(2, np.complex64))),
    ),
    "integer dtype": Case(
        DtypeError,
        "offset must be an int or an integer array [B], got float64",
        lambda put: sample(put, offset=put(np.ones(2))),
    ),
    "seed dtype": Case(
        DtypeError,
        f"seed must be int64 or uint64, got float64: {SEED_REMEDY}",
        lambda put: sample(put, seed=put(np.ones(2))),
    ),
    "eos dtype": Case(
        DtypeError,
        "eos must be an int or int32/int64/uint32 ids, got float64",
        lambda put: verify(put, eos=[1.0]),
    ),
    "uniform dtype": Case(
        DtypeError,
        "uniform_accept must be floats in [0, 1], got int64",
        lambda put: verify_probs(put, uniform_accept=put(TOKENS), seed=1),
    ),
    "check": Case(DtypeError, "check must be None, True or False, got int", lambda put: sample(put, check=1)),
    "word": Case(DtypeError, "backend must be a str, got NoneType", lambda put: sample(put, backend=None)),
    # shapes
    "batch axis": Case(
        ShapeError,
        "logits must be [B, V], got [5]: add the batch axis, array[None]",
        lambda put: sample(put, LOGITS[0]),
    ),
    "rank": Case(
        ShapeError,
        "logits must be [B, V], got [2, 3, 5]: it needs 2 axes, not 3",
        lambda put: sample(put, TARGET),
    ),
    "no vocabulary": Case(
        ShapeError,
        "logits must be [B, V] with at least one token in V, got [2, 0]",
        lambda put: sample(put, LOGITS[:, :0]),
    ),
    "vocabulary": Case(
        ShapeError,
        "logits must have a vocabulary of at most 2**22 = 4194304, got 4194305",
        lambda put: sample(put, np.broadcast_to(np.float32(0), (1, 2**22 + 1))),
    ),
    "exact shape": Case(
        ShapeError,
        "mask must be [B, V] = [2, 5], got [2, 4]",
        lambda put: sample(put, mask=put(np.ones((2, 4), bool))),
    ),
    "packed shape": Case(
        ShapeError,
        "draft_mask must be [B, K, ceil(V/32)] = [2, 2, 1], got [2, 2, 6]",
        lambda put: verify(put, draft_mask=put(np.ones((2, 2, 6), np.int32))),
    ),
    "ids shape": Case(
        ShapeError, "prev_tokens must be [B, L] with B = 2, got [3, 1]", lambda put: sample(put, prev_tokens=[[1]] * 3)
    ),
    "column": Case(
        ShapeError,
        "repetition_penalty must be a number or an array [B] = [2], got [2, 1]",
        lambda put: sample(put, repetition_penalty=[[2.0], [2.0]]),
    ),
    "seed shape": Case(
        ShapeError,
        f"seed must be a scalar or [B] = [2], got [3]: {SEED_REMEDY}",
        lambda put: sample(put, seed=[1, 2, 3]),
    ),
    "eos shape": Case(
        ShapeError,
        "eos must be an int, [E] or [B, E] with B = 2, got [3, 1]",
        lambda put: verify(put, eos=[[1], [2], [3]]),
    ),
    "draft batch": Case(
        ShapeError, "draft_tokens must be [B, K] with B = 2, got [1, 2]", lambda put: verify(put, tokens=TOKENS[:1])
    ),
    "bonus row": Case(
        ShapeError,
        "target_logits must be [B, K+1, V] = [2, 3, 5], got [2, 2, 5]: "
        "append the target's row after the last drafted token",
        lambda put: verify(put, TARGET[:, :2]),
    ),
    "too many target rows": Case(
        ShapeError,
        "target_logits must be [B, K+1, V] = [2, 3, 5], got [2, 4, 5]: "
        "draft_tokens has K = 2, and the target needs one row a draft and one more",
        lambda put: verify(put, np.concatenate([TARGET, TARGET[:, :1]], 1)),
    ),
    "draft rows": Case(
        ShapeError,
        "draft_logits must be [B, K, Vd] = [2, 2, 6], got [2, 1, 6]",
        lambda put: verify(put, draft=DRAFT[:, :1]),
    ),
    "random_seeds": Case(ShapeError, "batch must be an int of at least 0, got -1", lambda _: dp.random_seeds(-1)),
    # values
    "seed missing": Case(
        ValueRangeError, f"seed must be given, got None: {SEED_REMEDY}", lambda put: sample(put, seed=None)
    ),
    "seed range": Case(
        ValueRangeError,
        "seed must be in [-2**63, 2**64), got 18446744073709551616",
        lambda put: sample(put, seed=2**64),
    ),
    "eos range": Case(
        ValueRangeError, "eos must be in [-1, 2**63), got 9223372036854775808", lambda put: verify(put, eos=2**63)
    ),
    "filter range": Case(
        ValueRangeError,
        "temperature must be finite and at least 0 (0 is greedy), got nan",
        lambda put: sample(put, temperature=NAN),
    ),
    "integer range": Case(
        ValueRangeError, "draft_index must be in [0, 2**24), got 16777216", lambda put: sample(put, draft_index=1 << 24)
    ),
    "row": Case(
        ValueRangeError,
        "top_k must be an integer of at least -1 (None, 0 and -1 are off), got -2 in row 1",
        lambda put: sample(put, top_k=[3, -2]),
    ),
    "row and position": Case(
        ValueRangeError,
        "uniform_sample must be in [0, 1], got 1.5 in row 1, position 2",
        lambda put: verify_probs(put, uniform_sample=put([[0.0, 0.5, 1.0], [0.0, 0.5, 1.5]]), seed=1),
    ),
    "word range": Case(
        ValueRangeError,
        "rule must be one of token, block, match, greedy, got 'typical'",
        lambda put: verify(put, rule="typical"),
    ),
    "no uniform_sample": Case(
        ValueRangeError,
        "uniform_sample or seed must be given for rule 'match', got None for both",
        lambda put: verify_probs(put, rule="match"),
    ),
    "no uniform_accept": Case(
        ValueRangeError,
        "uniform_accept or seed must be given for rule 'token', got None for both",
        lambda put: verify_probs(put, uniform_sample=put(np.ones((2, 3)))),
    ),
    # rows that have no law
    "NaN": Case(
        ValueRangeError,
        "sample: row 1 holds NaN where the mask allows a token: mend the model's output; "
        "check=False returns status 1 instead of raising",
        lambda put: sample(put, [[0.0, 1.0], [NAN, 1.0]]),
    ),
    "nothing left": Case(
        ValueRangeError,
        "sample: row 0 has no token left, all are -inf, masked or of probability 0: allow at least one; "
        "check=False returns status 2 instead of raising",
        lambda put: sample(put, mask=put(np.zeros((2, 5), bool))),
    ),
    "probability": Case(
        ValueRangeError,
        "sample_probs: row 0 holds a negative, NaN or infinite probability: pass finite values of at least 0; "
        "check=False returns status 32 instead of raising",
        lambda put: sample_probs(put, [[0.5, -0.5]]),
    ),
    # backends
    "backend": Case(
        BackendError,
        f"backend must be one of auto, {', '.join(CPU)} for sample on cpu, got 'cuda'",
        lambda put: sample(put, backend="cuda"),
    ),
    "reference elsewhere": Case(
        BackendError,
        "backend='reference' runs on the CPU only, the tensors are on xpu: move them there",
        lambda _: _dispatch.resolve("sample", "xpu", "reference"),
    ),
}


def raised(case: Case, put: Put) -> Exception:
    with pytest.raises(OURS) as info:
        case.call(put)
    return info.value


@pytest.mark.parametrize("name", CASES)
@BOTH
def test_message(name: str, put: Put) -> None:
    case = CASES[name]
    error = raised(case, put)
    kinds = {"numpy": "a NumPy array", "torch": "a torch tensor"}
    this = next(kind for kind, made in KINDS.items() if made is put)
    that = "torch" if this == "numpy" else "numpy"
    assert type(error) is case.error
    assert str(error) == case.message.replace("{this}", kinds[this]).replace("{that}", kinds[that])


def test_messages_say_argument_expected_and_got() -> None:
    rows = [name for name, case in CASES.items() if re.match(r"\w+: row \d+ .*: .*; check=False", case.message)]
    assert rows == ["NaN", "nothing left", "probability"]
    for name in CASES.keys() - {*rows, "reference elsewhere"}:
        assert re.match(r"\w+( or seed)? must (be|have) .+, got .+", CASES[name].message), name


def test_every_error_has_a_case() -> None:
    """The `raise` lines of the modules that check arguments are all reached by the cases."""
    reached = set()
    for case in CASES.values():
        trace = raised(case, KINDS["numpy"]).__traceback__
        while trace:
            frame = (Path(trace.tb_frame.f_code.co_filename).resolve(), trace.tb_lineno)
            trace = trace.tb_next
        reached.add(frame)
    for module in (_checks, sampling_api, chain_api):
        path = Path(inspect.getfile(module)).resolve()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                lines = {(path, line) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
                assert lines & reached, f"{path.name}:{node.lineno} has no case"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(ShapeError, ValueError), (DtypeError, TypeError), (ValueRangeError, ValueError), (BackendError, RuntimeError)],
)
def test_errors_are_built_ins_too(error: type, builtin: type) -> None:
    assert issubclass(error, builtin)


# --- ranges ----------------------------------------------------------------------------------------------------------


BAD_RANGES = {
    "temperature": [-1.0, -1e-30, float("inf"), NAN, 1e39, 10**400, -(10**400)],
    "top_k": [-2, 1.5, NAN, float("inf"), -(10**400)],
    "top_p": [-0.1, 1.1, NAN, float("inf"), 2],
    "min_p": [-0.1, 1.1, NAN, float("-inf"), -1],
    "repetition_penalty": [0, 0.0, -1.0, float("inf"), NAN, 1e39],
}


@pytest.mark.parametrize("name", BAD_RANGES)
@BOTH
def test_filter_out_of_range(name: str, put: Put) -> None:
    """The error names the parameter, and the row where the parameter is an array."""
    good = {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 2.0}[name]
    for value in BAD_RANGES[name]:
        with pytest.raises(ValueRangeError, match=rf"^{name} must be .*, got "):
            sample(put, **{name: value})
        with pytest.raises(ValueRangeError, match=rf"^draft_{name} must be .*, got "):
            verify(put, **{f"draft_{name}": value})
        if abs(value) < 1e40 or isinstance(value, float):
            for call, key in ((sample, name), (verify, name), (verify, f"draft_{name}")):
                with pytest.raises(ValueRangeError, match=rf"^{key} must be .*, got .* in row 1$"):
                    call(put, **{key: put(np.array([good, value], np.float64))})


@BOTH
def test_integer_out_of_range(put: Put) -> None:
    for value in (-1, 2**63, 10**400):
        with pytest.raises(ValueRangeError, match=r"^offset must be in \[0, 2\*\*63\), got "):
            sample(put, offset=value)
    for value in (-1, 2**63 - 2):
        for given in (value, put(np.array([0, value]))):
            with pytest.raises(ValueRangeError, match=r"^offset must be in \[0, 2\*\*63 - 2\), got "):
                verify(put, offset=given)
    for value in (-1, 3):
        for given in (value, put(np.array([2, value]))):
            with pytest.raises(ValueRangeError, match=r"^num_draft_tokens must be in \[0, K\] = \[0, 2\], got "):
                verify(put, num_draft_tokens=given)
    for given in (-1, 1 << 24, put(np.array([0, 1 << 24]))):
        with pytest.raises(ValueRangeError, match=r"^draft_index must be in \[0, 2\*\*24\), got "):
            sample(put, draft_index=given)
    for value in (-(2**63) - 1, 2**64, 10**400):
        with pytest.raises(ValueRangeError, match=r"^seed must be in \[-2\*\*63, 2\*\*64\), got "):
            sample(put, seed=value)


@BOTH
def test_uniforms_out_of_range(put: Put) -> None:
    for value in (-0.1, 1.1, NAN, float("inf")):
        for name, width in (("uniform_accept", 2), ("uniform_sample", 3)):
            with pytest.raises(ValueRangeError, match=rf"^{name} must be in \[0, 1\], got .* in row 0, position 1$"):
                verify_probs(put, seed=1, **{name: put(np.insert(np.zeros((2, width - 1)), 1, [value, 0.5], axis=1))})
