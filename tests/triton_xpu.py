"""Compile the Triton kernels for Intel GPUs with triton-xpu 3.3, which has to come first on the path; prints JSON.

``pip install --no-deps --target DIR triton-xpu==3.3.0b1``, then ``PYTHONPATH=DIR:src python tests/triton_xpu.py``. That
triton is older than what the kernels are written for: constants get the two abilities that it lacks.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import types
from typing import Any

import torch
import triton
import triton.language as tl
from triton._utils import find_paths_if, get_iterable_path
from triton.backends import backends
from triton.backends.compiler import GPUTarget

import triton_targets as targets
from draftproof import _dispatch

# Of an integrated GPU, which has no float64.
PROPERTIES = {"name": "xpu", "vendor": "Intel", "sub_group_sizes": [8, 16, 32], "has_fp64": False}
TARGET = GPUTarget("xpu", {**PROPERTIES, "max_work_group_size": 512, "max_num_sub_groups": 64}, 32)
_FLOAT64, _CONTRACTION_OFF = 10, 31
_CAPABILITY, _EXECUTION_MODE, _EXTENDED, _FMA, _MAD = 17, 16, 12, 26, 42


def adapt() -> None:
    """Give triton 3.3 what the kernels and the recording use, and a device's driver that is not there."""
    tl.constexpr.__getitem__ = lambda self, index: self.value[getattr(index, "value", index)]
    tl.constexpr.__getattr__ = attribute
    targets.JITFunction._pack_args = pack
    nothing = types.SimpleNamespace(parse_device_arch=lambda _: "")
    for backend in backends.values():
        space = backend.compiler.__init__.__globals__
        if "compile_module_from_src" in space:
            space["compile_module_from_src"] = lambda *_: nothing
    _dispatch.MISSING.pop("triton", None)
    torch.version.cuda = None


def attribute(constant: Any, name: str) -> Any:
    if name.startswith("__") or name == "value":
        raise AttributeError(name)
    return getattr(constant.value, name)


def pack(kernel: Any, backend: Any, keywords: Any, bound: Any, specialization: Any, _: Any) -> tuple[Any, ...]:
    types_of = [each[0] for each in specialization]
    marks = [each[1] for each in specialization]
    constants = find_paths_if(types_of, lambda _, value: value == "constexpr")
    marked = find_paths_if(marks, lambda _, value: isinstance(value, str))
    return (
        backend.parse_options(keywords),
        dict(zip([p.name for p in kernel.params], types_of, strict=True)),
        {path: get_iterable_path(list(bound.values()), path) for path in constants},
        {path: backend.parse_attr(get_iterable_path(marks, path)) for path in marked},
    )


def of_spirv(code: bytes) -> dict[str, Any]:
    """Return what a module declares, and how many of its calls are fused."""
    words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
    found = {"float64": 0, "contraction off": 0, "fused": 0}
    at = 5
    while at < len(words) and words[at] >> 16:
        operation, operands = words[at] & 0xFFFF, words[at + 1 : at + (words[at] >> 16)]
        found["float64"] += operation == _CAPABILITY and operands[0] == _FLOAT64
        found["contraction off"] += operation == _EXECUTION_MODE and operands[1] == _CONTRACTION_OFF
        found["fused"] += operation == _EXTENDED and operands[3] in (_FMA, _MAD)
        at += words[at] >> 16
    return found


def main() -> None:
    """Compile one form of each kernel."""
    adapt()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        triton.runtime.cache.default_cache_dir = lambda: cache
        for kernel, (launch, *_) in targets.by_kernel(targets.launches(TARGET, targets.USUAL)).items():
            source = targets.ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
            options = targets.make_backend(TARGET).parse_options(dict(launch.options)).__dict__
            try:
                found[kernel] = of_spirv(triton.compile(source, target=TARGET, options=options).asm["spv"])
            except Exception as error:  # what its language cannot say
                found[kernel] = f"{type(error).__name__}"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
