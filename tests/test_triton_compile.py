"""The Triton kernels compiled for devices that are not here: what the code must not hold, and what it uses.

``results/triton.json`` says what each kernel takes on each target: ``python tests/test_triton_compile.py`` writes it
anew (minutes).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

PROGRAM = Path(__file__).parent / "triton_targets.py"
RESULTS = Path(__file__).parent / "results" / "triton.json"
DEFAULT = ("sm_90", "gfx942")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx90a", "gfx942")
FORBIDDEN = ("fused", "flushing", "float64")


def compile_for(target: str, *options: str) -> dict[str, list[dict[str, int]]]:
    """Return for each kernel what the code of its forms holds; compiled in a process without the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(PROGRAM), target, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {kernel: forms[target] for kernel, forms in json.loads(done.stdout).items()}


def forbidden(found: dict[str, list[dict[str, int]]]) -> dict[str, Any]:
    """Return what no kernel may hold, by kernel."""
    return {
        kernel: form for kernel, forms in found.items() for form in forms if any(form.get(name) for name in FORBIDDEN)
    }


def check(target: str, *options: str) -> None:
    found = compile_for(target, *options)
    assert forbidden(found) == {}
    assert list(found) == list(json.loads(RESULTS.read_text())["kernels"])


@pytest.mark.parametrize("target", DEFAULT)
def test_each_kernel_in_one_form(target: str) -> None:
    check(target)


@pytest.mark.parametrize("target", DEFAULT)
def test_the_check_finds_what_is_planted(target: str) -> None:
    ((form,),) = compile_for(target, "--planted").values()
    assert form["fused"] > 0
    assert form.get("flushing") != 0


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in TARGETS if target not in DEFAULT])
def test_each_kernel_on_the_other_targets(target: str) -> None:
    check(target)


@pytest.mark.slow
@pytest.mark.parametrize("target", DEFAULT)
def test_each_kernel_in_many_forms(target: str) -> None:
    check(target, "--forms", "12")


@pytest.mark.slow
@pytest.mark.parametrize("target", DEFAULT)
def test_each_kernel_on_one_row_of_one_token(target: str) -> None:
    assert forbidden(compile_for(target, "--smallest", "--forms", "4")) == {}


@pytest.mark.slow
def test_kernels_for_intel_gpus() -> None:
    """In a triton of its own, older than the others, whose language cannot say three of them."""
    if "DRAFTPROOF_TRITON_XPU" not in os.environ:
        pytest.skip("DRAFTPROOF_TRITON_XPU names no folder with triton-xpu 3.3.0b1")
    path = os.pathsep.join([os.environ["DRAFTPROOF_TRITON_XPU"], os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    program = PROGRAM.with_name("triton_xpu.py")
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    made = {kernel: form for kernel, form in found.items() if isinstance(form, dict)}
    assert len(made) >= len(found) - 3
    assert {kernel: form for kernel, form in made.items() if form["float64"] or form["fused"]} == {}
    assert sum(form["contraction off"] for form in made.values()) > len(made) / 3


if __name__ == "__main__":
    import triton

    table: dict[str, Any] = {}
    for name in TARGETS:
        for kernel, (form,) in compile_for(name).items():
            table.setdefault(kernel, {})[name] = form
    RESULTS.write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")
