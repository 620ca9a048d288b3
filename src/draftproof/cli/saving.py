"""Files of ``compare``: every run as JSON or CSV, the standings as a picture."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .console import fail
from .contest import OWN, PLAIN, Run
from .standings import Standing, speeds

SUFFIXES = (".json", ".csv", ".png")
COLOURS = {PLAIN: "silver", OWN: "#c1121f"}


def check_files(files: list[Path]) -> None:
    """Refuse files that cannot be written, before hours of work."""
    for file in files:
        if file.suffix not in SUFFIXES:
            fail(f"--save: expected a name that ends in {', '.join(SUFFIXES)}, got {file}")
        if not file.parent.is_dir():
            fail(f"--save: expected a folder that exists, got {file.parent}: make it first")
        if file.suffix == ".png" and find_spec("matplotlib") is None:
            fail("--save: a picture needs matplotlib, which is missing; run: python -m pip install 'draftproof[bench]'")


def write(file: Path, settings: dict[str, Any], runs: list[Run], results: list[Standing]) -> None:
    """Write a file of the format that its name ends in."""
    if file.suffix == ".json":
        write_json(file, settings, runs, results)
    elif file.suffix == ".csv":
        write_csv(file, runs)
    else:
        write_png(file, results)


def write_json(file: Path, settings: dict[str, Any], runs: list[Run], results: list[Standing]) -> None:
    """Write settings, standings, speeds by prompt, and every run with draftproof's own statistics."""
    parts: dict[str, list[Any]] = {"standings": results, "speeds": speeds(runs), "runs": runs}
    listed = {name: [asdict(part) for part in listing] for name, listing in parts.items()}
    file.write_text(json.dumps({"settings": settings} | listed, indent=1, default=str) + "\n")


def write_csv(file: Path, runs: list[Run]) -> None:
    """Write a line a run."""
    lines = [{name: value for name, value in vars(run).items() if name != "stats"} for run in runs]
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, lines[0])
        writer.writeheader()
        writer.writerows(lines)


def write_png(file: Path, results: list[Standing]) -> None:
    """Draw speed, tokens per forward and acceptance as bars, classes side by side."""
    from matplotlib.figure import Figure

    kinds, arms = (list(dict.fromkeys(getattr(s, name) for s in results)) for name in ("kind", "arm"))
    figure = Figure(figsize=(3 + 1.2 * len(kinds), 8), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    titles = {"speed": "times as fast as plain decoding", "tokens_per_forward": "tokens per forward"}
    for panel, (name, title) in zip(panels, [*titles.items(), ("acceptance", "share of drafts accepted")], strict=True):
        for number, arm in enumerate(arms):
            heights = [getattr(s, name) for s in results if s.arm == arm]
            places = [i + 0.8 * (number + 0.5) / len(arms) - 0.4 for i in range(len(kinds))]
            panel.bar(places, heights, 0.8 / len(arms), label=arm, color=COLOURS.get(arm))
        panel.set_title(title, fontsize=10)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    panels[0].axhline(1, color="black", lw=0.8)
    panels[-1].set_xticks(range(len(kinds)), kinds)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(arms), frameon=False)
    figure.savefig(file)
