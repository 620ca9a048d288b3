"""The way into the C++ core: NumPy views of what came in, and outputs of the same kind."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

from ._arrays import is_torch
from .errors import BackendError, ValueRangeError
from .types import Array, Filters

core: Any
missing = ""
try:
    core = importlib.import_module("._core", __package__)
except ImportError as error:
    core = None
    missing = f"the C++ core is not in this installation ({error}): install draftproof where a C++20 compiler works"


LEVEL_VARIABLE = "DRAFTPROOF_LEVEL"
"""Environment variable that names the instruction-set level the core starts at."""


def levels() -> list[str]:
    """Return the instruction-set levels of the core that this machine runs, best first; empty without a core."""
    return [] if core is None else list(core.levels())


def set_level(name: str) -> None:
    """Run the core at one instruction-set level. The bits are the same at each; for tests and for faulty machines."""
    if core is None:
        raise BackendError(missing)
    if not core.set_level(name):
        raise BackendError(f"level must be one of {', '.join(levels())}, got {name!r}")


def set_num_threads(n: int) -> None:
    """Set how many threads the C++ core may use; results do not depend on it. The start value is the core count.

    Parameters
    ----------
    n : int
        From 1 to 1024.

    Raises
    ------
    ValueRangeError
        ``n`` is not an int in [1, 1024].
    BackendError
        This installation has no C++ core.

    Examples
    --------
    >>> import draftproof
    >>> draftproof.set_num_threads(2)  # doctest: +SKIP
    """
    if isinstance(n, np.generic):
        n = n.item()
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
        raise ValueRangeError(f"n must be an int in [1, 1024], got {n!r}")
    if core is None:
        raise BackendError(missing)
    core.set_num_threads(n)


if core is not None and LEVEL_VARIABLE in os.environ:
    set_level(os.environ[LEVEL_VARIABLE])


def view(array: Array | None) -> Any:
    """Return a NumPy view of a NumPy array or torch CPU tensor; bfloat16 as the int16 that holds its bits."""
    if array is None:
        return None
    if not isinstance(array, np.ndarray):
        array = array.detach().resolve_neg()
        array = array.view(_torch().int16).numpy() if is_bfloat16(array) else array.numpy()
    # The core steps from item to item, at addresses that suit them. A field of a structured array may lie elsewhere.
    plain = array.flags.aligned and not any(stride % array.itemsize for stride in array.strides)
    return array if plain else array.copy()


def views(filters: Filters) -> tuple[Any, ...]:
    """Return views of the filter columns."""
    return tuple(view(column) for column in filters)


def is_bfloat16(array: Array | None) -> bool:
    """Whether the rows are bfloat16, which NumPy has no dtype for."""
    return array is not None and is_torch(array) and array.dtype == _torch().bfloat16


class Outputs:
    """Makes result arrays of the kind of the rows, and their NumPy views for the core to write to."""

    def __init__(self, like: Array) -> None:
        self._torch = _torch() if is_torch(like) else None
        self.arrays: list[Array] = []

    def new(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a writable NumPy view of a new uninitialised array."""
        if self._torch is None:
            self.arrays.append(np.empty(shape, dtype=dtype))
            return self.arrays[-1]
        self.arrays.append(self._torch.empty(shape, dtype=getattr(self._torch, dtype)))
        return self.arrays[-1].numpy()


def sample_plain(logits: Array, parameters: Filters, history: Array | None, seed: Any, offset: Any) -> Array | None:
    """Draw as ``sample`` does where the call is plain: host rows, numbers for parameters. None for any other call.

    It goes round checks, dispatcher and registered op, which cost more than the draw. A call that is wrong in some way
    is not plain either: the full path says what is the matter.
    """
    if type(logits) is np.ndarray:
        if logits.dtype.char not in "fed" or logits.strides[-1:] != (logits.itemsize,):
            return None
        if history is not None and (type(history) is not np.ndarray or history.dtype != np.int64):
            return None
        tokens = np.empty(logits.shape[:1], dtype=np.int64)
        plain = core.sample_plain(logits, False, *parameters, seed, offset, history, tokens)
        return tokens if plain else None
    torch = sys.modules.get("torch")
    if torch is None or not _is_plain_tensor(torch, logits):
        return None
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return None
    if history is not None:
        if not _is_plain_tensor(torch, history) or history.dtype != torch.int64:
            return None
        history = history.numpy()
    tokens = np.empty(logits.shape[:1], dtype=np.int64)
    plain = core.sample_plain(view(logits), is_bfloat16(logits), *parameters, seed, offset, history, tokens)
    return torch.from_numpy(tokens) if plain else None


def _is_plain_tensor(torch: Any, value: Any) -> bool:
    """Whether a value is a tensor in memory that nothing (compile, functorch, a mode) is looking at."""
    return (
        not torch.compiler.is_compiling()
        and type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_neg()
        and not _looked_at(torch)
    )


def _looked_at(torch: Any) -> bool:
    """Whether functorch or a dispatch mode is active; a torch that does not tell counts as looking."""
    try:
        return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0
    except AttributeError:
        return True


def _torch() -> Any:
    import torch

    return torch
