"""A GPU that is not there: tensors that say they are on a device, and live on the CPU.

What a call launches is listed; what would wait for a device is refused: reading a value, copying to or from the host.
Triton's kernels run in the interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import InterpretedFunction

from draftproof import _dispatch

# Torch has functions for this device without having one.
DEVICE = "meta"

# They say how memory is seen, or ask for some, and launch nothing.
_FREE = {"alias", "as_strided", "detach", "diagonal", "expand", "movedim", "permute", "reshape", "select", "slice"}
_FREE |= {"split", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_unsafe_view"}
_FREE |= {"empty", "empty_like", "empty_strided", "new_empty", "_reshape_alias", "lift_fresh"}
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero"}


class OnDevice(torch.Tensor):
    """A tensor on the device; ``inner`` holds it."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), device=DEVICE, **layout)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the simulation")


def below(value: Any) -> Any:
    """Return a structure of tensors with those of the device as they are on the CPU."""
    return tree_map_only(OnDevice, lambda tensor: tensor.inner, value)


class Simulation(TorchDispatchMode):
    """Runs what is called on tensors of the device; ``launched`` is what a device would have to run."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if func.namespace == "draftproof":
            *arguments, check, backend = args
            with self:
                return _dispatch.run(name, tuple(arguments), check, backend)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        from_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
        device = kwargs.get("device")
        to_device = from_device if device is None else torch.device(device).type == DEVICE
        if not from_device and not to_device:
            return func(*args, **kwargs)
        assert name not in _READS, f"{name} reads a value on the host"
        assert to_device, f"{name} copies to the host"
        # Numbers that torch wraps in tensors are no copies.
        host = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.ndim > 0]
        assert not host, f"{name} copies from the host"
        if device is not None:
            kwargs["device"] = "cpu"
        result = func(*below(args), **below(kwargs))
        if name not in _FREE and not any(result is tensor.inner for tensor in tensors if isinstance(tensor, OnDevice)):
            self.launched.append(name)
        return tree_map_only(torch.Tensor, OnDevice, result)


@contextlib.contextmanager
def simulation(processors: int = 4) -> Iterator[list[str]]:
    """Simulate a device; what is launched on it joins the list, kernels of triton in brackets."""
    mode, launch = Simulation(), InterpretedFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        mode.launched.append(f"<{kernel.fn.__name__}>")
        with _disable_current_modes():
            launch(kernel, *below(args), **below(kwargs))

    with (
        mock.patch.object(InterpretedFunction, "run", run),
        mock.patch.dict(_dispatch.BACKENDS, {DEVICE: _dispatch.BACKENDS["cuda"]}),
        mock.patch("draftproof.sampling.kernels.launch.processors", return_value=processors),
        mode,
    ):
        yield mode.launched
