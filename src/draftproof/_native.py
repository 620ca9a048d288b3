"""The C++ core, and the way into it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from . import _numpy as np
from ._arrays import is_numpy, is_torch, number
from .errors import BackendError, ValueRangeError
from .types import Array

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
    # The core itself takes no text that is not UTF-8.
    if name not in levels() or not core.set_level(name):
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
    n = number(n)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
        raise ValueRangeError(f"n must be an int in [1, 1024], got {n!r}")
    if core is None:
        raise BackendError(missing)
    core.set_num_threads(n)


if core is not None and LEVEL_VARIABLE in os.environ:
    try:
        set_level(os.environ[LEVEL_VARIABLE])
    except BackendError as error:
        raise BackendError(f"the environment variable {LEVEL_VARIABLE} is set to another: {error}") from None


def call(operation: str, *arguments: Any) -> tuple[Array, ...]:
    """Run an operation on checked arguments, the rows first; dead rows are marked in the last output."""
    outputs: tuple[Array, ...] | None = getattr(core, operation)(*map(view, arguments), False)
    if outputs is None:
        raise RuntimeError(
            f"{operation}: an argument that was checked cannot be read any more: another thread wrote to it meanwhile, "
            "or its memory was freed"
        )
    if is_torch(arguments[0]) and is_numpy(outputs[0]):
        return tuple(map(_torch().from_numpy, outputs))
    return outputs


def view(value: Any) -> Any:
    """Return an argument as the core reads it: an array in place wherever it can be."""
    # The core steps from item to item, at addresses that suit them. A field of a structured array may lie elsewhere.
    if is_numpy(value):
        plain = value.flags.aligned and not any(stride % value.itemsize for stride in value.strides)
        return np.asarray(value) if plain else np.array(value)
    if not is_torch(value):
        return value
    torch = _torch()
    value = value.detach()
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return view((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    return value.clone() if value.data_ptr() % value.element_size() else value


def watched(rows: Any) -> bool:
    """Whether torch is tracing the call or a mode of its is active, so that the registered op has to be seen.

    A torch that does not tell counts as watching.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    try:
        return bool(
            torch.compiler.is_compiling()
            or (
                isinstance(rows, torch.Tensor)
                and (
                    torch._C._functorch.peek_interpreter_stack() is not None
                    or torch._C._len_torch_dispatch_stack()
                    or torch._C._len_torch_function_stack()
                    or torch._C._is_tracing()
                )
            )
        )
    except AttributeError:
        return True


def _torch() -> Any:
    import torch

    return torch
