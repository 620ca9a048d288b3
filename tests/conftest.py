"""Settings for the whole suite: no network, the same examples in every run, poisoned uninitialised memory."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

# A plugin for the run it is named in.
collect_ignore = ["driver/plugin.py"]

# Shells start background jobs with Ctrl-C ignored, and the tests of Ctrl-C would see nothing of it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# One profile here and in CI, so that CI is never laxer than a laptop; `fuzz` draws new examples in every run.
hypothesis.settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("fuzz", hypothesis.settings.get_profile("same"), derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_configure(config: pytest.Config) -> None:
    """Have triton interpret its kernels, on the CPU, but in ``-m gpu``; it reads this when it is imported."""
    os.environ.setdefault("TRITON_INTERPRET", str(int(not config.option.markexpr.startswith("gpu"))))


def _spoil(array: Any, is_float: bool, is_bool: bool, info: Callable[[Any], Any]) -> None:
    # Half of the largest integer: torch cannot fill uint64 above 2^63.
    array[...] = float("nan") if is_float else True if is_bool else info(array.dtype).max // 2


def _spoil_numpy(array: Any) -> None:
    _spoil(array, array.dtype.kind == "f", array.dtype.kind == "b", np.iinfo)


def _spoil_torch(tensor: Any) -> None:
    torch = sys.modules["torch"]
    # A compiled graph has no caller whose memory could be poisoned.
    if not torch.compiler.is_compiling():
        _spoil(tensor, tensor.is_floating_point(), tensor.dtype == torch.bool, torch.iinfo)


# Cached: torch.compile guards on the identity of what it traces, and a new wrapper per test would mean recompiling.
@functools.cache
def _spoiled(allocate: Callable[..., Any], spoil: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        array = allocate(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "draftproof":
            spoil(array)
        return array

    return wrapper


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that the package leaves uninitialised with NaN, True or huge integers, so that a read shows."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, _spoiled(getattr(np, name), _spoil_numpy))
    if torch := sys.modules.get("torch"):
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(owner, name, _spoiled(getattr(owner, name), _spoil_torch))


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make triton's interpreter quick in the tests that are named for it."""
    if "triton" in request.node.nodeid and os.environ["TRITON_INTERPRET"] == "1":
        triton_interpreter = importlib.import_module("triton_interpreter")
        with triton_interpreter.quick(check_overflow="slow" in request.keywords):
            yield
    else:
        yield
