"""The functions of ``_arrays`` on torch tensors of any device."""

from __future__ import annotations

from typing import Any

import torch

from .types import Array

_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bool": torch.bool}
_FEW = 8


class TorchArrays:
    """Array functions on torch."""

    name = "torch"

    # --- making and converting -----------------------------------------------------------------------------------
    @staticmethod
    def asarray(value: Any, like: Array) -> Array:
        # A copy from the host waits for the device, and a graph cannot capture it; a few fills do neither.
        few = isinstance(value, (list, tuple)) and 0 < len(value) <= _FEW and all(isinstance(n, int) for n in value)
        if few and like.device.type != "cpu":
            return torch.stack([torch.full((), number, device=like.device) for number in value])
        return torch.as_tensor(value, device=like.device)

    @staticmethod
    def arange(n: int, like: Array) -> Array:
        return torch.arange(n, dtype=torch.int64, device=like.device)

    @staticmethod
    def full(shape: tuple[int, ...], value: float, dtype: str, like: Array) -> Array:
        return torch.full(shape, value, dtype=_DTYPES[dtype], device=like.device)

    @staticmethod
    def scalar(value: float, dtype: str, like: Array) -> Array:
        # A compiled graph would be split where the host and a device meet.
        device = like.device if torch.compiler.is_compiling() else "cpu"
        return torch.full((), value, dtype=_DTYPES[dtype], device=device)

    @staticmethod
    def joined(a: Array, shape: tuple[int, ...], like: Array) -> Array:
        # A fill carries its number along: nothing waits, and a graph can capture it.
        if a.device != like.device and a.numel() == 1:
            return torch.full(shape, a.item(), dtype=a.dtype, device=like.device)
        return a.to(like.device).expand(shape)

    @staticmethod
    def full_like(a: Array, value: float) -> Array:
        return torch.full_like(a, value)

    @staticmethod
    def float32(a: Array) -> Array:
        return a.to(torch.float32)

    @staticmethod
    def int64(a: Array) -> Array:
        return a.view(torch.int64) if a.dtype == torch.uint64 else a.to(torch.int64)

    @staticmethod
    def int32(a: Array) -> Array:
        return a.to(torch.int32)

    @staticmethod
    def bits(a: Array) -> Array:
        return a.view(torch.int32)

    @staticmethod
    def from_bits(a: Array) -> Array:
        return a.to(torch.int32).view(torch.float32)

    @staticmethod
    def exponent(a: Array) -> Array:
        return torch.frexp(a).exponent.to(torch.int64)

    @staticmethod
    def copy(a: Array) -> Array:
        return a.clone()

    @staticmethod
    def broadcast(a: Array, shape: tuple[int, ...]) -> Array:
        return a.expand(shape)

    @staticmethod
    def concat(arrays: list[Array], axis: int) -> Array:
        return torch.cat(arrays, dim=axis)

    # --- elementwise ---------------------------------------------------------------------------------------------
    @staticmethod
    def where(condition: Array, a: Any, b: Any) -> Array:
        return torch.where(condition, a, b)

    @staticmethod
    def floor(a: Array) -> Array:
        return torch.floor(a)

    @staticmethod
    def isnan(a: Array) -> Array:
        return torch.isnan(a)

    @staticmethod
    def minimum(a: Array, b: Any) -> Array:
        return torch.minimum(a, b) if isinstance(b, torch.Tensor) else torch.clamp(a, max=b)

    @staticmethod
    def maximum(a: Array, b: Any) -> Array:
        return torch.maximum(a, b) if isinstance(b, torch.Tensor) else torch.clamp(a, min=b)

    # --- along the last axis -------------------------------------------------------------------------------------
    @staticmethod
    def max(a: Array) -> Array:
        return a.amax(dim=-1, keepdim=True)

    @staticmethod
    def argmax(a: Array) -> Array:
        return a.argmax(dim=-1, keepdim=True)

    @staticmethod
    def argmin(a: Array) -> Array:
        return a.argmin(dim=-1, keepdim=True)

    @staticmethod
    def sum(a: Array) -> Array:
        return a.sum(dim=-1, keepdim=True, dtype=torch.int64)

    @staticmethod
    def cumsum(a: Array) -> Array:
        return a.cumsum(dim=-1, dtype=torch.int64)

    @staticmethod
    def any(a: Array) -> bool:
        return bool(a.any())

    @staticmethod
    def first_above(prefix: Array, threshold: Array) -> Array:
        if prefix.shape[0] == 1:
            return torch.searchsorted(prefix[0].contiguous(), threshold[:, 0].contiguous(), right=True)[:, None]
        return (prefix <= threshold).sum(dim=-1, keepdim=True)

    @staticmethod
    def kth_largest(a: Array, k: Array) -> Array:
        ordered = torch.topk(a, int(k.max()), dim=-1).values
        return torch.take_along_dim(ordered, k - 1, dim=-1)

    @staticmethod
    def take(a: Array, index: Array) -> Array:
        return torch.take_along_dim(a, index, dim=-1)

    @staticmethod
    def nonzero(a: Array) -> tuple[Array, ...]:
        return torch.nonzero(a, as_tuple=True)

    @staticmethod
    def interleave(columns: tuple[Array, ...]) -> Array:
        return torch.stack(columns, dim=-1).flatten(1)

    @staticmethod
    def repeat(a: Array, n: int) -> Array:
        return a.repeat_interleave(n, dim=-1)

    # --- what kind of array --------------------------------------------------------------------------------------
    @staticmethod
    def same_row(a: Array) -> bool:
        return a.shape[0] > 1 and a.stride(0) == 0

    @staticmethod
    def on_host(a: Array) -> bool:
        return bool(a.device.type == "cpu")

    @staticmethod
    def device_type(a: Array) -> str:
        return str(a.device.type)

    @staticmethod
    def dtype_name(a: Array) -> str:
        return str(a.dtype).removeprefix("torch.")
