"""The benchmark: its texts are what its results say, no peer goes missing unnoticed, and its floors compute."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from benchmarks import __main__ as command
from benchmarks import cells, contestants, report, suite
from benchmarks.cells import MASS, OWN, READ, Cell
from benchmarks.figures import load, main
from benchmarks.floor import floor
from benchmarks.goals import outcomes
from benchmarks.rows import bank

from draftproof._arrays import namespace
from draftproof._native import core
from draftproof.numerics.exp2 import exp2, exponent, scale
from draftproof.numerics.masses import masses

ROOT = Path(__file__).parents[1]
compiled = pytest.mark.skipif(
    core is None or shutil.which(os.environ.get("CXX", "c++")) is None, reason="the floors need a C++ compiler"
)
HEAVY = frozenset({"vllm", "llama.cpp", "flashspec", "transformers"})


@pytest.mark.parametrize("page", report.PAGES)
def test_pages_hold_what_the_committed_results_say(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- benchmark: " in text
    assert report.filled(text, load(command.RESULTS)) == text


def test_committed_results_hold_every_peer_and_operation() -> None:
    results = load(command.RESULTS)
    assert {name for figures in results.cells.values() for name in figures.peers()} == set(contestants.PEERS)
    assert {cell.operation for cell in results.cells} == {cell.operation for cell in cells.publish()}
    assert set(results.cells) <= set(cells.publish())
    assert not any(np.isnan(outcome.measured) for outcome in outcomes(results))


def test_publishing_without_a_peer_fails_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        contestants, "PEERS", {"numpy": ("numpy_rows", "-"), "nobody": ("absent", "pip install nobody")}
    )
    assert command.main(["run", "--publish"]) == 1
    assert "nobody is missing" in capsys.readouterr().err
    assert "pip install nobody" in contestants.missing()["nobody"]


@compiled
@pytest.mark.parametrize(
    "cell",
    [
        Cell("full chain", 512, 2),
        Cell("top-p", 2048, 1, dtype="bfloat16", threads=2),
        Cell("verify token", 256, 2, 3, cache="warm"),
        Cell("verify probs", 256, 1, 2, shape="flat"),
    ],
    ids=str,
)
def test_a_tiny_cell(cell: Cell) -> None:
    rows = suite.measure_cell(cell, 0.01, HEAVY, 1)
    figures = [dict(zip(suite.COLUMNS, row, strict=True)) for row in rows]
    assert all(Cell(*row[: len(cell)]) == cell for row in rows)
    assert {OWN, READ} <= {str(row["contestant"]) for row in figures}
    assert (MASS in {row["contestant"] for row in figures}) == (cell.rule == "token")
    assert all(0 < float(str(row["median_us"])) <= float(str(row["p90_us"])) for row in figures)


@compiled
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", ["real", "flat"])
def test_the_floors_do_the_work(threads: int, shape: str) -> None:
    rows = bank(shape, 50_003, 5)
    xp = namespace(rows)
    maxima = rows.max(-1, keepdims=True)
    weights = exp2(xp, exponent(xp, rows, maxima, scale(xp, np.float32(1.0))))
    assert floor(list(rows), threads, masses=True)() == int(masses(xp, weights).sum())
    pieces = [int(row[start : start + 16384].max()) for row in rows for start in range(0, 50_003, 16384)]
    assert floor(list(rows), threads)() == sum(pieces)


def test_ratios_are_geometric_means_inside_cells(tmp_path: Path) -> None:
    file = tmp_path / "run.csv"
    lines = [",".join(suite.COLUMNS)]
    for batch, own in ((1, 2.0), (8, 32.0)):
        cell = ",".join(map(str, Cell("greedy", 32000, batch)))
        lines += [f"{cell},{OWN},9,{own},{own},,0.01", f"{cell},{READ},9,1.0,1.0,,0.01"]
    file.write_text("\n".join(lines))
    file.with_suffix(".json").write_text('{"peers": []}')
    assert load(file).ratio(main("greedy"), OWN, READ) == pytest.approx(8.0)
    assert load(file).ratio(main("greedy", batch=8), OWN, READ) == pytest.approx(32.0)
