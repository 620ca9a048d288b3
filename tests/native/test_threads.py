"""The threads of the core under ThreadSanitizer, where a compiler has it. ``make tsan`` runs operations too."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


def compiled(program, *sources):
    """Compile with ThreadSanitizer; None if no compiler here makes a program that runs."""
    for compiler in filter(shutil.which, (os.environ.get("CXX", ""), "clang++-19", "clang++", "c++")):
        command = [compiler, "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{CSRC}", "-o", program]
        trial = program.with_name("trial.cpp")
        trial.write_text("int main() {}")
        if subprocess.run([*command, trial], capture_output=True, check=False).returncode:
            continue
        if subprocess.run([program], capture_output=True, check=False).returncode:
            continue
        subprocess.run([*command, *sources], check=True)
        return program
    return None


def test_threads_under_the_thread_sanitizer(tmp_path):
    program = compiled(tmp_path / "threads_test", HERE / "threads_test.cpp", CSRC / "threads.cpp")
    if program is None:
        pytest.skip("no compiler with ThreadSanitizer")
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout
