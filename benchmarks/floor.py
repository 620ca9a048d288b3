"""The floors: benchmarks/floor.cpp, compiled for this machine on first use and called through ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FLAGS = ["-O3", "-std=c++20", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


@cache
def library() -> ctypes.PyDLL:
    """Compile and load. PyDLL keeps the interpreter's lock: dropping it would add to the time of a small row."""
    source = Path(__file__).with_name("floor.cpp")
    built = ROOT / "build" / "benchmarks" / "floor.so"
    sources = (source, ROOT / "csrc" / "arithmetic.h")
    if not built.exists() or built.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        built.parent.mkdir(parents=True, exist_ok=True)
        # A run that has the old one open goes on with it.
        made = built.with_suffix(f".{os.getpid()}")
        wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
        command = [os.environ.get("CXX", "c++"), *FLAGS, *wide, "-shared", "-fPIC", "-pthread"]
        command += ["-DDRAFTPROOF_LEVEL=native", f"-I{ROOT / 'csrc'}", str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        made.replace(built)
    loaded = ctypes.PyDLL(str(built))
    loaded.draftproof_floor.restype = ctypes.c_int64
    return loaded


def floor(rows: list[np.ndarray], threads: int, masses: bool = False) -> Callable[[], int]:
    """Return a call that reads every row once, or turns each into masses at temperature 1 given its maximum.

    Rows are equally long, contiguous, and of any dtype for reading; float32 for masses.
    """
    words = [row.view(np.float32) for row in rows]
    pointers = np.array([row.ctypes.data for row in words], dtype=np.uint64)
    maxima = np.array([row.max() for row in words], dtype=np.float32) if masses else None
    arguments = (
        ctypes.c_void_p(pointers.ctypes.data),
        ctypes.c_void_p(None if maxima is None else maxima.ctypes.data),
        ctypes.c_int64(len(words)),
        ctypes.c_int64(words[0].size),
        ctypes.c_int(threads),
    )
    function = library().draftproof_floor

    held = (words, pointers, maxima)

    def call() -> int:
        return function(*arguments) if held else 0

    return call
