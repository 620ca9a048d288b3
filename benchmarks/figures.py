"""The results of a run as numbers: medians by cell and contestant, and geometric means of ratios inside cells."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from .cells import MASS, OWN, READ, Cell

Where = Callable[[Cell], bool]


class Figures(NamedTuple):
    """What was measured in one cell: microseconds by contestant, accepted drafts, cores used by other processes."""

    median: dict[str, float]
    p90: dict[str, float]
    accepted: float | None
    others: float

    def peers(self) -> Iterator[str]:
        return (name for name in self.median if name not in (READ, MASS) and not name.startswith(OWN))


class Results(NamedTuple):
    """A whole run."""

    cells: dict[Cell, Figures]
    machine: dict[str, Any]

    def where(self, wanted: Where) -> dict[Cell, Figures]:
        return {cell: figures for cell, figures in self.cells.items() if wanted(cell)}

    def ratios(self, wanted: Where, above: str, below: str) -> list[float]:
        """Return ``above / below`` of each wanted cell that has both."""
        found = self.where(wanted).values()
        return [f.median[above] / f.median[below] for f in found if above in f.median and below in f.median]

    def ratio(self, wanted: Where, above: str, below: str) -> float:
        """Return the geometric mean of those ratios; nan where there is none."""
        return geometric_mean(self.ratios(wanted, above, below))


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def only(operation: str, also: Where = lambda _: True, **wanted: object) -> Where:
    """Select the cells of an operation with these fields."""
    return lambda c: c.operation == operation and all(getattr(c, k) == v for k, v in wanted.items()) and also(c)


def main(operation: str, also: Where = lambda _: True, **wanted: object) -> Where:
    """Select from the grid that the goals are about: float32, cold rows, one thread."""
    return only(operation, also, dtype="float32", threads=1, cache="cold", **wanted)


def load(file: Path) -> Results:
    """Read a run's CSV file and the description of its machine beside it."""
    cells: dict[Cell, Figures] = {}
    kinds = get_type_hints(Cell)
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            fields = {name: kind(row[name]) for name, kind in kinds.items()}
            accepted = float(row["accepted"]) if row["accepted"] else None
            figures = cells.setdefault(Cell(**fields), Figures({}, {}, accepted, float(row["others"])))
            figures.median[row["contestant"]] = float(row["median_us"])
            figures.p90[row["contestant"]] = float(row["p90_us"])
    return Results(cells, json.loads(file.with_suffix(".json").read_text()))
