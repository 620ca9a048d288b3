"""What tests of wrong arguments share: good arrays and calls on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import draftproof as dp
from draftproof import BackendError, DtypeError, ShapeError, ValueRangeError, _dispatch

torch = pytest.importorskip("torch")


Put = Callable[[Any], Any]


OURS = (ShapeError, DtypeError, ValueRangeError, BackendError)


KINDS: dict[str, Put] = {"numpy": np.asarray, "torch": lambda a: torch.from_numpy(np.array(a))}


BOTH = pytest.mark.parametrize("put", KINDS.values(), ids=KINDS)


rng = np.random.default_rng(0)


LOGITS = rng.normal(size=(2, 5)).astype(np.float32)


TARGET = rng.normal(size=(2, 3, 5)).astype(np.float32)


DRAFT = rng.normal(size=(2, 2, 6)).astype(np.float32)


TOKENS = np.array([[1, 2], [3, 4]])


NAN = float("nan")


def sample(put: Put, logits: Any = LOGITS, **given: Any) -> Any:
    return dp.sample(put(logits), **{"seed": 1, **given})


CPU = [name for name in (*_dispatch.BACKENDS["cpu"], "reference") if dp.backends()["sample"][name] == "available"]
