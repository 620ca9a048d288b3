"""The array functions that eager code uses, for NumPy and for torch: the same names, the same results.

``namespace(array)`` gives the functions for an array's library; torch is looked up only once a torch tensor arrives.
Rows lie along axis 0 and the reductions run along the last axis. Operators (``+ - * / & | ^ << >>``, comparisons,
indexing) are the arrays' own. Scalars must be exact in float32 and never divide: torch on CUDA turns division by a
scalar into a multiplication.
"""

from __future__ import annotations

import sys
from typing import Any

from . import _numpy as np
from .types import Array


class NumpyArrays:
    """Array functions on NumPy."""

    name = "numpy"

    # --- making and converting -----------------------------------------------------------------------------------
    @staticmethod
    def asarray(value: Any, like: Array) -> Array:
        return np.asarray(value)

    @staticmethod
    def arange(n: int, like: Array) -> Array:
        return np.arange(n, dtype=np.int64)

    @staticmethod
    def full(shape: tuple[int, ...], value: float, dtype: str, like: Array) -> Array:
        return np.full(shape, value, dtype=dtype)

    @staticmethod
    def scalar(value: float, dtype: str, like: Array) -> Array:
        """A number as a 0-D array, on the host if its value may be looked at; ``joined`` brings it to the rows."""
        return np.full((), value, dtype=dtype)

    @staticmethod
    def joined(a: Array, shape: tuple[int, ...], like: Array) -> Array:
        """``a``, or one row that stands for all, in the given shape where ``like`` is."""
        return np.broadcast_to(a, shape)

    @staticmethod
    def full_like(a: Array, value: float) -> Array:
        return np.full_like(a, value)

    @staticmethod
    def float32(a: Array) -> Array:
        return a.astype(np.float32, copy=False)

    @staticmethod
    def int64(a: Array) -> Array:
        if a.dtype == np.uint64:
            return a.view(np.int64)
        return a.astype(np.int64, copy=False)

    @staticmethod
    def int32(a: Array) -> Array:
        return a.astype(np.int32, copy=False)

    @staticmethod
    def bits(a: Array) -> Array:
        return a.view(np.int32)

    @staticmethod
    def from_bits(a: Array) -> Array:
        return a.astype(np.int32, copy=False).view(np.float32)

    @staticmethod
    def exponent(a: Array) -> Array:
        """e with 2**(e-1) <= a < 2**e, int64; 0 for 0."""
        return np.frexp(a)[1].astype(np.int64)

    @staticmethod
    def copy(a: Array) -> Array:
        return a.copy()

    @staticmethod
    def broadcast(a: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(a, shape)

    @staticmethod
    def concat(arrays: list[Array], axis: int) -> Array:
        return np.concatenate(arrays, axis=axis)

    # --- elementwise ---------------------------------------------------------------------------------------------
    @staticmethod
    def where(condition: Array, a: Any, b: Any) -> Array:
        return np.where(condition, a, b)

    @staticmethod
    def floor(a: Array) -> Array:
        return np.floor(a)

    @staticmethod
    def isnan(a: Array) -> Array:
        return np.isnan(a)

    @staticmethod
    def minimum(a: Array, b: Any) -> Array:
        return np.minimum(a, b)

    @staticmethod
    def maximum(a: Array, b: Any) -> Array:
        return np.maximum(a, b)

    # --- along the last axis -------------------------------------------------------------------------------------
    @staticmethod
    def max(a: Array) -> Array:
        return a.max(axis=-1, keepdims=True)

    @staticmethod
    def argmax(a: Array) -> Array:
        """Index of the maximum, the lowest on ties, kept as a column."""
        return a.argmax(axis=-1)[..., None]

    @staticmethod
    def argmin(a: Array) -> Array:
        return a.argmin(axis=-1)[..., None]

    @staticmethod
    def sum(a: Array) -> Array:
        return a.sum(axis=-1, keepdims=True, dtype=np.int64)

    @staticmethod
    def cumsum(a: Array) -> Array:
        return a.cumsum(axis=-1, dtype=np.int64)

    @staticmethod
    def any(a: Array) -> bool:
        return bool(a.any())

    @staticmethod
    def first_above(prefix: Array, threshold: Array) -> Array:
        """First column of non-decreasing ``prefix`` [b or 1, C] above ``threshold`` [b, 1], as a column."""
        if prefix.shape[0] == 1:
            return np.searchsorted(prefix[0], threshold[:, 0], side="right")[:, None]
        return (prefix <= threshold).sum(axis=-1, keepdims=True)

    @staticmethod
    def kth_largest(a: Array, k: Array) -> Array:
        """The k-th largest value of each row [b, 1]; ``k`` int64 [b or 1, 1] in [1, C]."""
        position = a.shape[-1] - k
        ordered = np.partition(a, np.unique(position), axis=-1)
        return np.take_along_axis(ordered, position, axis=-1)

    @staticmethod
    def take(a: Array, index: Array) -> Array:
        """``a[row, index[row, j]]`` along the last axis; rows broadcast."""
        return np.take_along_axis(a, index, axis=-1)

    @staticmethod
    def nonzero(a: Array) -> tuple[Array, ...]:
        return np.nonzero(a)

    @staticmethod
    def interleave(columns: tuple[Array, ...]) -> Array:
        """Arrays [b, n] of equal shape to [b, n * len], their columns side by side."""
        return np.stack(columns, axis=-1).reshape(columns[0].shape[0], -1)

    @staticmethod
    def repeat(a: Array, n: int) -> Array:
        return np.repeat(a, n, axis=-1)

    # --- what kind of array --------------------------------------------------------------------------------------
    @staticmethod
    def same_row(a: Array) -> bool:
        """Whether all rows are one row in memory (an expanded view)."""
        return a.shape[0] > 1 and a.strides[0] == 0

    @staticmethod
    def on_host(a: Array) -> bool:
        return True

    @staticmethod
    def device_type(a: Array) -> str:
        return "cpu"

    @staticmethod
    def dtype_name(a: Array) -> str:
        return str(a.dtype)


def is_torch(value: object) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy(value: object) -> bool:
    """Whether ``value`` is an array of NumPy's own, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) in (numpy.ndarray, numpy.memmap)


def number(value: Any) -> Any:
    """Return the Python number that a NumPy scalar holds, anything else as it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def is_dense(tensor: Any) -> bool:
    """Whether a torch tensor is an ordinary strided one."""
    return bool(tensor.layout == sys.modules["torch"].strided and not tensor.is_nested)


def namespace(array: Array) -> Any:
    """Return the array functions of the library that ``array`` belongs to."""
    if not is_torch(array):
        return NumpyArrays
    from ._torch_arrays import TorchArrays

    return TorchArrays
