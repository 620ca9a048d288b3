"""Any object as any argument is taken or refused with one of our errors."""

from __future__ import annotations

import decimal
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftproof as dp
from arguments import BOTH, CPU, DRAFT, KINDS, LOGITS, NAN, OURS, TARGET, TOKENS, Put, sample, torch
from draftproof import ValueRangeError, _checks

# --- anything at all -------------------------------------------------------------------------------------------------


ANYTHING: dict[str, Any] = {
    "None": None,
    "str": "abc",
    "bytes": b"ab",
    "object": object(),
    "type": int,
    "dict": {},
    "set": {1, 2},
    "range": range(2),
    "complex": 1j,
    "decimal": decimal.Decimal("0.5"),
    "bool": True,
    "0": 0,
    "1": 1,
    "0.5": 0.5,
    "-2": -2,
    "nan": NAN,
    "inf": float("inf"),
    "1e39": 1e39,
    "2**63": 2**63,
    "2**64": 2**64,
    "10**400": 10**400,
    "float32 1": np.float32(1),
    "int64 1": np.int64(1),
    "uint64 2**63": np.uint64(2**63),
    "bool_": np.bool_(True),
    "str_": np.str_("a"),
    "datetime64": np.datetime64("2020-01-01"),
    "longdouble": np.longdouble(0.5),
    "[]": [],
    "[1, 1]": [1, 1],
    "ragged list": [[1], [2, 3]],
    "list of lists": [[1, 2], [3, 4]],
    "deep list": [[[1]]],
    "list with None": [None, 1],
    "list with str": ["a", 1],
    "list with 2**70": [2**70, 1],
    "tensors in a list": [torch.tensor(1), torch.tensor(1)],
    "0-D": 1,
    "empty": np.array([]),
    "float64": np.array([1.0, 1.0]),
    "int8": np.array([1, 1], np.int8),
    "uint64": np.array([2**63 + 1, 1], np.uint64),
    "bools": np.array([True, False]),
    "complex64": np.array([1j, 2], np.complex64),
    "big-endian ints": np.array([1, 1], ">i8"),
    "big-endian floats": np.array([1, 1], ">f4"),
    "longdoubles": np.array([0.5, 0.5], np.longdouble),
    "strings": np.array(["a", "b"]),
    "dates": np.array(["2020-01-01", "2020-01-02"], "datetime64[D]"),
    "objects": np.array([1, "a"], object),
    "object matrix": np.array([[1, None], [2, 3]], object),
    "records": np.zeros(2, [("a", "f4")]),
    "matrix": np.array([[1, 2], [3, 4]]).view(np.matrix),
    "float matrix": np.array([[1.0, 2], [3, 4]]).view(np.matrix),
    "masked": np.ma.masked_array([1, 1], mask=[0, 1]),
    "masked matrix": np.ma.masked_array([[1.0, 2], [3, 4]], mask=[[0, 1], [0, 0]]),
    "3-D": np.zeros((2, 2, 2)),
    "torch uint16": torch.tensor([1, 1], dtype=torch.uint16),
    "torch uint64": torch.tensor([1, 1], dtype=torch.uint64),
    "torch float8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    "torch complex": torch.zeros(2, dtype=torch.complex64),
    "torch bools": torch.tensor([True, False]),
    "torch grad": torch.ones(2, requires_grad=True),
    "torch sparse": torch.eye(2).to_sparse(),
    "torch nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "torch 0-D": torch.tensor(1),
    "torch meta": torch.empty(2, device="meta"),
    "torch meta ids": torch.empty(2, 2, device="meta", dtype=torch.int64),
    "torch ids": torch.tensor([1, 1]),
}


ANYTHING["0-D"] = np.array(1)


# What is a number, an integer and so on, by name; everything else must be refused.
LARGE = {"2**63", "2**64", "uint64 2**63", "uint64"}


NUMBERS = {"0", "1", "float32 1", "int64 1", "[1, 1]", "tensors in a list", "0-D", "float64", "int8"}


TORCH_NUMBERS = {"torch uint16", "torch uint64", "torch grad", "torch 0-D", "torch ids"}


WHOLE = {"0", "1", "int64 1", "[1, 1]", "tensors in a list", "0-D", "int8"}


TORCH_WHOLE = TORCH_NUMBERS - {"torch grad"}


ACCEPTED = {
    "temperature": {"None", "0.5"} | LARGE | NUMBERS | TORCH_NUMBERS,
    "top_k": {"None", "2**63", "2**64", "10**400", "uint64 2**63", "1e39"} | NUMBERS | TORCH_NUMBERS,
    "top_p": {"None", "0.5"} | NUMBERS | TORCH_NUMBERS,
    "min_p": {"None", "0.5"} | NUMBERS | TORCH_NUMBERS,
    "repetition_penalty": {"None", "0.5"} | LARGE | (NUMBERS - {"0"}) | TORCH_NUMBERS,
    "offset": WHOLE | TORCH_WHOLE,
    "draft_index": {"None"} | WHOLE | TORCH_WHOLE,
    "num_draft_tokens": {"None"} | WHOLE | TORCH_WHOLE,
    "seed": {"-2", "2**63", "uint64 2**63", "uint64", "torch uint64", "torch 0-D", "torch ids"} | (WHOLE - {"int8"}),
    "eos": {"None", "-2", "empty", "[]", "list of lists", "torch ids"} | (WHOLE - {"int8", "0-D"}),
    "prev_tokens": {"None", "list of lists"},
    "draft_tokens": {"list of lists"},
    "mask": {"None"},
    "draft_mask": {"None"},
    "draft_logits": {"None", "3-D"},
    "draft_probs": {"None"},
    "uniform_accept": {"None"},
    "uniform_sample": {"None"},
    "check": {"None", "bool"},
}


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sample": (dp.sample, {"logits": LOGITS}),
    "sample_with_logprobs": (dp.sample_with_logprobs, {"logits": LOGITS}),
    "sample_probs": (dp.sample_probs, {"probs": abs(LOGITS)}),
    "filter_logits": (dp.filter_logits, {"logits": LOGITS}),
    "verify": (dp.verify, {"target_logits": TARGET, "draft_logits": DRAFT, "draft_tokens": TOKENS}),
    "verify_probs": (dp.verify_probs, {"target_probs": abs(TARGET), "draft_probs": abs(DRAFT), "draft_tokens": TOKENS}),
    "verify_greedy": (dp.verify_greedy, {"target": TARGET, "draft_tokens": TOKENS}),
}


def error_of(call: Callable[..., Any], given: dict[str, Any]) -> Exception | None:
    """The library's own error, None if the call went through."""
    try:
        call(**given)
    except OURS as error:
        return error
    return None


@pytest.mark.parametrize("function", CALLS)
@BOTH
def test_anything_else_is_refused(function: str, put: Put) -> None:
    """For every parameter, the values that make sense run, and all others raise the library's own errors naming it."""
    call, arrays = CALLS[function]
    parameters = inspect.signature(call).parameters
    seeded = {"seed": 1} if "seed" in parameters else {}
    for name in parameters:
        accepted = ACCEPTED.get(name, ACCEPTED.get(name.removeprefix("draft_"), set()))
        for form, value in ANYTHING.items():
            given = {**{key: put(array) for key, array in arrays.items()}, **seeded, name: value}
            # Of the arrays, those of the rows' own library; seeds may always come from NumPy.
            foreign = torch.is_tensor(value) if put is KINDS["numpy"] else isinstance(value, np.ndarray)
            expected = form in accepted and (not foreign or (name == "seed" and not torch.is_tensor(value)))
            error = error_of(call, given)
            assert (error is None) == expected, f"{name}={form}: {error or 'accepted'}"
            # Wrong rows may show first in what does not fit them.
            assert expected or name in arrays or name in str(error), f"{name}={form}: {error}"


@BOTH
def test_a_large_unsigned_offset_is_out_of_range(put: Put) -> None:
    given = put(np.array([2**63 + 1, 0], np.uint64))
    with pytest.raises(ValueRangeError, match=r"^offset must be"):
        sample(put, offset=given)


@pytest.mark.parametrize("dtype", _checks.FLOATS + _checks.INTEGERS)
@BOTH
def test_top_k_of_any_dtype(put: Put, dtype: str) -> None:
    """Whole numbers are one top-k, whatever holds them: 0 is off, one beyond the vocabulary too."""
    if put is KINDS["numpy"] and dtype == "bfloat16":
        return
    column = (
        torch.tensor([2, 0, 1, 100]).to(getattr(torch, dtype))
        if put is KINDS["torch"]
        else np.array([2, 0, 1, 100], dtype)
    )
    logits = np.concatenate([LOGITS, LOGITS])
    for backend in CPU:
        filtered = dp.filter_logits(put(logits), top_k=column, backend=backend)
        assert [(row > -np.inf).sum() for row in np.asarray(filtered)] == [2, 5, 1, 5]
        expected = dp.sample(put(logits), top_k=[2, 0, 1, 100], seed=1, backend=backend)
        assert dp.sample(put(logits), top_k=column, seed=1, backend=backend).tolist() == expected.tolist()


def test_memory_mapped_logits(tmp_path: Path) -> None:
    stored = np.memmap(tmp_path / "logits", np.float32, "w+", shape=LOGITS.shape)
    stored[:] = LOGITS
    stored = np.memmap(tmp_path / "logits", np.float32, "r", shape=LOGITS.shape)
    np.testing.assert_array_equal(dp.sample(stored, top_k=3, seed=1), dp.sample(LOGITS, top_k=3, seed=1))


def test_no_gradient_flows() -> None:
    """Filtered logits would carry the gradient of some steps only; they carry none, without a warning."""
    logits = torch.from_numpy(LOGITS).requires_grad_()
    filtered = dp.filter_logits(logits, temperature=0.5, top_k=3)
    result = dp.sample_with_logprobs(torch.nn.Parameter(logits.detach()), seed=1)
    assert not filtered.requires_grad
    assert not result.logprobs.requires_grad
    np.testing.assert_array_equal(filtered.numpy(), dp.filter_logits(LOGITS, temperature=0.5, top_k=3))
    np.testing.assert_array_equal(result.tokens.numpy(), dp.sample(LOGITS, seed=1))


def test_read_only_seeds_for_tensors() -> None:
    seeds = np.array([2**63 + 5, 7], np.uint64)
    seeds.flags.writeable = False
    expected = dp.sample(LOGITS, seed=seeds)
    np.testing.assert_array_equal(dp.sample(torch.from_numpy(LOGITS), seed=seeds).numpy(), expected)
