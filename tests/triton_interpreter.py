"""Triton's interpreter, made faster."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np


@contextlib.contextmanager
def quick(check_overflow: bool = False) -> Iterator[None]:
    """Prepare the language once, where the interpreter does it anew in every call of a function.

    ``check_overflow`` has it look at every sum and product of int32, which doubles the time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    everything = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(everything)
    kept = types.SimpleNamespace(restore=lambda: None)
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=check_overflow)
    reduce = interpreter.ReduceOps.generic_reduce

    def reduce_quickly(self: Any, operands: Any) -> Any:
        # Sorting takes thousands of these, element by element.
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return reduce(self, operands)
        data = np.bitwise_xor.reduce(operands[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(data, operands[0].dtype)]

    try:
        with (
            mock.patch.object(interpreter, "_patch_lang", return_value=kept),
            mock.patch.object(builder, "options", options),
            mock.patch.object(interpreter.ReduceOps, "generic_reduce", reduce_quickly),
        ):
            yield
    finally:
        scope.restore()
