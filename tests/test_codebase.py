"""What holds for the repository as a whole: a light import, short files, nothing that belongs to one machine."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
OPTIONAL = ("numpy", "torch", "triton", "transformers", "typer")
SOURCES = (".py", ".cpp", ".h")
# Written so that this file does not match.
LOCAL = re.compile(r"/(?:work|root|home)/|py[p]i\.org|python[h]osted\.org|registry\.[n]pmjs|download\.[p]ytorch")


def repository_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    return [path for name in listing.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout


def test_import_loads_nothing_optional() -> None:
    assert fresh(f"import sys, draftproof; print([m for m in {OPTIONAL} if m in sys.modules])").strip() == "[]"


def test_import_is_fast() -> None:
    # Processor time: what other processes do meanwhile is not ours.
    code = "import numpy, time; start = time.process_time(); import draftproof; print(time.process_time() - start)"
    assert statistics.median(float(fresh(code)) for _ in range(5)) < 0.2


def test_source_files_are_short() -> None:
    sources = [path for folder in ("src", "csrc") for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert "src/draftproof/__init__.py" in lines
    assert {name: number for name, number in lines.items() if number > 500} == {}


def test_nothing_names_a_machine_or_a_registry() -> None:
    assert LOCAL.search(f"cd /{'home'}/me")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in repository_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if LOCAL.search(line)
    ]
    assert found == []


def test_what_the_texts_point_to_exists() -> None:
    pages = [path for path in repository_files() if path.suffix in (".py", ".md", ".h", ".cpp")]
    named = {name for path in pages for name in re.findall(r"\bdocs/[\w-]+\.\w+", path.read_text())}
    named |= {f"docs/{name}" for path in pages for name in re.findall(r"\]\(([\w-]+\.md)\)", path.read_text())}
    assert "docs/decisions.md" in named
    assert {name for name in named if not (ROOT / name).is_file() and not (ROOT / Path(name).name).is_file()} == set()


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_uninitialised_memory_of_the_package_is_poisoned(library: Any) -> None:
    package: dict[str, Any] = {"__name__": "draftproof.module", "library": library}
    exec("def allocate(dtype): return library.empty(4, dtype=dtype)", package)
    for dtype, expected in (("float32", "nan"), ("int64", str(2**62 - 1)), ("bool", "True")):
        assert [str(v) for v in package["allocate"](getattr(library, dtype)).tolist()] == [expected] * 4
