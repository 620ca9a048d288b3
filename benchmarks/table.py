"""Write the table of README.md from benchmarks/results/cpu.csv: geometric means of ratios inside one run."""

from __future__ import annotations

import csv
import math
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table from benchmarks/table.py -->", "<!-- end of table -->"


def mean(values: list[float]) -> str:
    return f"{math.exp(math.fsum(math.log(v) for v in values) / len(values)):.1f}" if values else "-"


def table() -> str:
    with (ROOT / "benchmarks/results/cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        cell = (row["operation"], row["vocab"], row["batch"], row["shape"])
        cells.setdefault(cell, {})[row["contestant"]] = float(row["median_us"])
    lines = [
        "| operation | times one read, V < 100k | times one read, V >= 100k | transformers / draftproof |",
        "|---|---|---|---|",
    ]
    for operation in dict.fromkeys(cell[0] for cell in cells):
        mine = {cell: times for cell, times in cells.items() if cell[0] == operation}
        small = [t["draftproof"] / t["floor"] for cell, t in mine.items() if int(cell[1]) < 100_000]
        large = [t["draftproof"] / t["floor"] for cell, t in mine.items() if int(cell[1]) >= 100_000]
        peer = [t["transformers"] / t["draftproof"] for t in mine.values()]
        lines.append(f"| {operation} | {mean(small)} | {mean(large)} | {mean(peer)} |")
    return "\n".join([*lines, "", f"One process, one run, medians; {rows[0]['machine']}."])


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
