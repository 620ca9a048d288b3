"""The core on other machines: compiled for them, run in an emulator, compared with eager by the whole of test_bits.

``results/portability.json`` says what passed where: ``python tests/test_portability.py`` writes it anew (ten minutes).
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "portability.json"
CLANG = next(filter(shutil.which, ("clang++", *(f"clang++-{n}" for n in range(30, 13, -1)))), "clang++")
X86_LEVELS = ("x86_64_v4", "x86_64_v3", "x86_64_v2")
FUSED = re.compile(r"\s(vfn?m(add|sub)|fn?m(add|sub)\s|fml[as]\s)")
PACKED = re.compile(r"\sv?mulps\s|\sfmul\s+v\d+\.4s")


class Machine(NamedTuple):
    """A compiler, what it compiles for, what runs the result here, and the levels found there."""

    compiler: str
    system: str
    processor: str
    runner: str = ""
    levels: tuple[str, ...] = ()  # empty: those of the processor here
    objdump: str = "objdump"


# The processors below the highest level also show that its code has not got into what all levels share.
MACHINES = {
    "aarch64": Machine(
        "aarch64-linux-gnu-g++", "Linux", "aarch64", "qemu-aarch64", ("aarch64_neon",), "aarch64-linux-gnu-objdump"
    ),
    "x86-64-v2": Machine("g++", "Linux", "x86_64", "qemu-x86_64 -cpu Nehalem", X86_LEVELS[2:]),
    "x86-64-v3": Machine("g++", "Linux", "x86_64", "qemu-x86_64 -cpu Haswell", X86_LEVELS[1:]),
    "clang": Machine(CLANG, "Linux", "x86_64"),
    "windows": Machine("zig", "Windows", "AMD64", "wine"),
}


def tool(command: str) -> str:
    """Return where a program is; a test that needs one which is not installed is skipped."""
    places = (command, "/usr/lib/wine/wine64") if command == "wine" else (command,)
    return next(filter(None, map(shutil.which, places)), None) or pytest.skip(f"{command} is not installed")


def zig(folder: Path) -> str:
    """Return a script that calls Zig, which brings a C++ library for Windows and spells the levels its own way."""
    if find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    script = folder / "zig"
    options = """$(printf '%s\\n' "$@" | sed 's/^-march=x86-64-/-march=x86_64_/')"""
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -m ziglang c++ -target x86_64-windows-gnu {options}\n")
    script.chmod(0o755)
    return str(script)


def compile_driver(name: str, folder: Path) -> Path:
    machine = MACHINES[name]
    if machine.processor != "aarch64" and platform.machine() != "x86_64":
        pytest.skip("compilers here are for another processor")
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": zig(folder) if machine.compiler == "zig" else tool(machine.compiler),
        "CMAKE_SYSTEM_NAME": machine.system,
        "CMAKE_SYSTEM_PROCESSOR": machine.processor,
    }
    defined = [f"-D{key}={value}" for key, value in definitions.items()]
    for step in (["-S", ROOT / "tests" / "driver", "-B", folder, *defined], ["--build", folder]):
        done = subprocess.run([tool("cmake"), *step], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run test_bits through the driver and return what passed."""
    machine = MACHINES[name]
    program, *options = shlex.split(machine.runner) or [""]
    driver = folder / ("driver.exe" if machine.system == "Windows" else "driver")
    command = [*([tool(program), *options] if program else []), str(driver)]
    levels = subprocess.run([*command, "levels"], capture_output=True, text=True, check=True).stdout.split()
    assert levels
    assert not machine.levels or tuple(levels) == machine.levels
    path = os.pathsep.join([str(ROOT / "tests" / "driver"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "CORE_DRIVER": shlex.join(command), "WINEDEBUG": "-all"}
    tests = [sys.executable, "-m", "pytest", "tests/test_bits.py", "-k", "cpu-numpy or cpu-torch", "-p", "plugin", "-q"]
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    summary = done.stdout.splitlines()[-1]
    assert "skipped" not in summary
    passed = int(summary.split()[0])
    assert passed > 400
    return {"compiler": machine.compiler, "run by": machine.runner, "levels": levels, "tests passed": passed}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that compiles the driver for a machine, once, and returns the folder."""
    return functools.cache(lambda name: compile_driver(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", MACHINES)
def test_bits_of_eager(name: str, build: Any) -> None:
    measure(name, build(name))


@pytest.mark.parametrize("name", MACHINES)
def test_vectors_and_no_fused_multiply_add(name: str, build: Any) -> None:
    objects = [path for path in build(name).rglob("*.cpp.o*") if path.suffix in (".o", ".obj")]
    levels = [path for path in objects if path.name.startswith("level.cpp")]
    assert len(levels) == (1 if name == "aarch64" else 3)
    for path in objects:
        dump = [tool(MACHINES[name].objdump), "-d", "--no-show-raw-insn", path]
        listing = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        assert [line for line in listing.splitlines() if FUSED.search(line)] == []
        assert path not in levels or len(PACKED.findall(listing)) > 20


if __name__ == "__main__":
    results = {}
    for machine in MACHINES:
        with tempfile.TemporaryDirectory() as temporary:
            results[machine] = measure(machine, compile_driver(machine, Path(temporary)))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
