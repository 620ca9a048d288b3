"""The package as it is installed: wheels with a compiler and without one, and the levels the core finds."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from draftproof import _native

ROOT = Path(__file__).parents[1]
CPUINFO = Path("/proc/cpuinfo")
V2 = {"cx16", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def run(*command: str | Path, **environment: str) -> str:
    """Return what a command prints, run where the sources are not on the path by themselves."""
    surroundings = {**os.environ, "PYTHONPATH": "", **environment}
    done = subprocess.run(command, cwd="/", env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel(folder: Path, **environment: str) -> Path:
    """Build the wheel of this Python from a copy of what git knows, and return where it is."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listing.split("\0"):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps")
    run(*pip, "-w", folder, folder / "source", **environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.skipif(not CPUINFO.exists() or not _native.levels(), reason="no list of processor features, or no core")
def test_levels_are_those_of_the_processor() -> None:
    features = next((line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")), None)
    if features is None:
        pytest.skip("not an x86-64 processor")
    flags = set(features.split(":")[1].split())
    expected = [name for name, needed in (("x86_64_v4", V4), ("x86_64_v3", V3), ("x86_64_v2", V2)) if needed <= flags]
    assert _native.levels() == expected


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_core(tmp_path: Path) -> None:
    built = wheel(tmp_path)
    names = zipfile.ZipFile(built).namelist()
    (core,) = (name for name in names if "_core" in name)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"draftproof"}
    assert {"draftproof/__init__.py", "draftproof/py.typed"} <= set(names)
    if sys.version_info < (3, 12):
        assert "-cp311-cp311-" in built.name
        return
    assert "-cp312-abi3-" in built.name
    if sys.platform != "win32":
        assert core == "draftproof/_core.abi3.so"
    if find_spec("abi3audit"):
        run(sys.executable, "-m", "abi3audit", "--strict", built)


@pytest.mark.slow
def test_without_a_compiler_the_package_is_pure_python_and_says_so(tmp_path: Path) -> None:
    built = wheel(tmp_path, CXX="false")
    assert built.name.endswith("-py3-none-any.whl")
    asked = (
        "import numpy, draftproof; print(draftproof.backends()['sample']['cpu']);"
        "print(draftproof.sample(numpy.zeros((1, 1), numpy.float32), seed=1).tolist())"
    )
    reason, token = run(
        sys.executable, "-S", "-c", asked, PYTHONPATH=f"{built}{os.pathsep}{Path(np.__file__).parents[1]}"
    ).splitlines()
    assert reason.startswith("the C++ core is not in this installation")
    assert reason.endswith("install draftproof where a C++20 compiler works")
    assert token == "[0]"
