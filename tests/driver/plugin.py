"""A pytest plugin that runs the backend ``cpu`` in a driver compiled for another machine.

The command that starts the driver is in CORE_DRIVER, and this folder on PYTHONPATH::

    export CORE_DRIVER="qemu-aarch64 build/driver" PYTHONPATH=tests/driver
    python -m pytest -p plugin tests/test_bits.py -k cpu-
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import shlex
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np

from draftproof import _dispatch, _native
from draftproof.types import Filters, SampleResult, VerifyResult

OPERATIONS = ("sample", "sample_with_logprobs", "sample_probs", "filter_logits", "verify", "verify_probs")
RULES = ("token", "block", "match", "greedy")
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3, "int64": 4, "bool": 5, "int32": 6}
VERIFIED = ("int64", "int64", "int64", "int64", "bool", "int32")

driver = subprocess.Popen(shlex.split(os.environ["CORE_DRIVER"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def encoded(value: Any) -> bytes:
    """One argument: its memory as it lies there, strides included."""
    if value is None:
        return struct.pack("<q", -1)
    name = str(value.dtype).removeprefix("torch.")
    kind = TYPES[name]
    if not isinstance(value, np.ndarray):
        value = value.detach().resolve_neg()
        value = (value.view(importlib.import_module("torch").int16) if name == "bfloat16" else value).numpy()
    array = _native.view(value)
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
    first = array.__array_interface__["data"][0] - low if array.size else 0
    strides = [stride // array.itemsize for stride in array.strides]
    numbers = [kind, first, array.ndim, *array.shape, *strides, high - low]
    return struct.pack(f"<{len(numbers)}q", *numbers) + ctypes.string_at(low, high - low)


def flat(arguments: dict[str, Any]) -> Iterator[Any]:
    """Arguments in the driver's order: those that only some operations have stand before those that most have."""
    last = ("num_draft_tokens", "eos", "seed", "offset", "draft_index")
    for name, value in sorted(arguments.items(), key=lambda item: last.index(item[0]) if item[0] in last else -1):
        if isinstance(value, Filters):
            yield from value
        elif name == "rule":
            yield np.array(RULES.index(value))
        else:
            yield np.ascontiguousarray(value) if name.startswith("uniform") and value is not None else value


def call(operation: str, names: tuple[str, ...], *values: Any) -> Any:
    rows = values[0]
    arguments = dict(zip(names, values, strict=True))
    request = b"".join(map(encoded, flat(arguments)))
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(struct.pack("<q", OPERATIONS.index(operation)) + request)
    driver.stdin.flush()
    batch = rows.shape[0]
    if operation.startswith("verify"):
        width = arguments["draft_tokens"].shape[1] + 1
        views = [np.empty((batch, width) if i == 2 else (batch,), dtype) for i, dtype in enumerate(VERIFIED)]
    elif operation == "filter_logits":
        views = [np.empty(tuple(rows.shape), "float32"), np.empty((batch,), "int32")]
    elif operation == "sample_with_logprobs":
        views = [np.empty((batch,), dtype) for dtype in ("int64", "float32", "float32", "int64", "int32")]
    else:
        views = [np.empty((batch,), dtype) for dtype in ("int64", "int32")]
    for view in views:
        sent = driver.stdout.read(view.nbytes)
        assert len(sent) == view.nbytes, "the driver has ended"
        view[...] = np.frombuffer(sent, view.dtype).reshape(view.shape)
    results = views if isinstance(rows, np.ndarray) else map(importlib.import_module("torch").from_numpy, views)
    wrap = {"sample_with_logprobs": SampleResult, "verify": VerifyResult, "verify_probs": VerifyResult}.get(operation)
    return wrap(*results) if wrap else tuple(results)


def pytest_unconfigure() -> None:
    """End the driver with the tests."""
    driver.communicate()


_dispatch.MISSING.pop("cpu", None)
for _operation in OPERATIONS:
    _package = _dispatch.OPERATIONS[_operation].package
    _module = importlib.import_module(f"draftproof.{_package}.cpu")
    _names = getattr(_module, _operation).__code__.co_varnames[: getattr(_module, _operation).__code__.co_argcount]
    setattr(_module, _operation, functools.partial(call, _operation, _names))


def verify_greedy(target: Any, draft_tokens: Any, num_draft_tokens: Any, eos: Any) -> Any:
    """The rule of that name, where no filter acts and nothing is drawn."""
    rule = (None, draft_tokens, "greedy", Filters(None), Filters(None), None, None, None)
    return importlib.import_module("draftproof.verification.chain.cpu").verify(
        target, *rule, num_draft_tokens, eos, None, None
    )


importlib.import_module("draftproof.verification.chain.cpu").verify_greedy = verify_greedy  # type: ignore[attr-defined]
