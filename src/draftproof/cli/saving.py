"""Files of ``compare``: every run as JSON or CSV, the standings as Markdown or as a picture."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..decoding import Stats
from .console import fail
from .contest import OWN, PLAIN, Run
from .report import markdown
from .standings import Standing, speeds

SUFFIXES = (".json", ".csv", ".md", ".png")
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
    # Whoever reads it meanwhile, or after a kill, finds a whole file.
    part = file.with_name(f".{os.getpid()}-{file.name}")
    if file.suffix == ".json":
        write_json(part, settings, runs, results)
    elif file.suffix == ".csv":
        write_csv(part, runs)
    elif file.suffix == ".md":
        part.write_text(markdown(settings, results, speeds(runs)))
    else:
        write_png(part, results)
    part.replace(file)


def write_json(file: Path, settings: dict[str, Any], runs: list[Run], results: list[Standing]) -> None:
    """Write settings, standings, speeds by prompt, and every run with draftproof's own statistics."""
    parts: dict[str, list[Any]] = {"standings": results, "speeds": speeds(runs), "runs": runs}
    listed = {name: [asdict(part) for part in listing] for name, listing in parts.items()}
    file.write_text(json.dumps({"settings": settings} | listed, indent=1, default=str) + "\n")


def read_json(file: Path) -> tuple[dict[str, Any], list[Run]]:
    """Return settings and runs of a file that ``write_json`` wrote."""
    try:
        saved = json.loads(file.read_text())
        runs = [Run(**run | {"stats": run["stats"] and Stats(**run["stats"])}) for run in saved["runs"]]
        return saved["settings"], runs
    except (ValueError, KeyError, TypeError) as error:
        fail(f"--done: expected a .json that compare --save wrote, got {file}: {error!r}")


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
