"""Tables of README.md and docs/performance.md, generated from a run's results between markers in the texts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .cells import BATCHES, LARGE, MASS, OWN, READ, SAMPLING, SHAPES, VERIFICATION, VOCABULARIES, Cell
from .figures import Results, geometric_mean, load, main, only
from .goals import Outcome, lost, outcomes

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/performance.md")
OPERATIONS = (*SAMPLING, *VERIFICATION)
PUBLISHED = {("verify greedy", 32000, 4): (33, 126), ("verify probs", 32000, 4): (117, 657)}
"""Microseconds a round on a Raspberry Pi 5 and a Raspberry Pi 4, as the authors of spec-verify published them."""


def write(file: Path) -> None:
    """Bring the pages and the plot up to date with a run."""
    from .plot import plot

    results = load(file)
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text(), results))
    plot(results, ROOT / "docs" / "performance.svg")


def filled(text: str, results: Results) -> str:
    """Return a page with each marked part replaced by its table."""
    for name, table in TABLES.items():
        begin, end = f"<!-- benchmark: {name} -->", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        text = pattern.sub(lambda _, b=begin, t=table, e=end: f"{b}\n{t(results)}\n{e}", text)
    return text


def page(file: Path) -> str:
    """Return every table of a run, for the terminal."""
    results = load(file)
    return "".join(f"\n## {name}\n\n{table(results)}\n" for name, table in TABLES.items())


def summary(results: Results) -> str:
    """What each operation costs, and what the same work costs elsewhere."""
    names = [peer for peer in ("transformers", "vllm", "llama.cpp", "numpy") if peer in results.machine["peers"]]
    rows = []
    for operation in OPERATIONS:
        small = results.ratio(main(operation, lambda cell: cell.vocab < LARGE), OWN, READ)
        large = results.ratio(main(operation, lambda cell: cell.vocab >= LARGE), OWN, READ)
        others = [results.ratio(main(operation), peer, OWN) for peer in names]
        rows.append([operation, *map(_number, (small, large, *others))])
    header = ["operation", "times one read, V < 100k", "V >= 100k", *(f"{peer} / draftproof" for peer in names)]
    return f"{_table(header, rows)}\n\n{machine(results)}"


def goals(results: Results) -> str:
    """Goals beside results."""
    rows = [
        [o.goal, f"{'>=' if o.at_least else '<='} {o.limit:g}", *map(_number, (o.measured, o.shared)), _verdict(o)]
        for o in outcomes(results)
    ]
    return _table(["goal", "limit", "measured", "in the shared cache", "met"], rows)


def floors(results: Results) -> str:
    """Times the floor by vocabulary and shape."""
    rows = []
    for operation in OPERATIONS:
        below = floor_of(operation)
        cold = [
            results.ratio(main(operation, vocab=vocab, shape=shape), OWN, below)
            for shape in SHAPES
            for vocab in VOCABULARIES
        ]
        warmer = [results.ratio(only(operation, cache=cache), OWN, below) for cache in ("shared", "warm")]
        rows.append([operation, "mass pass" if below == MASS else "read", *map(_number, (*cold, *warmer))])
    header = [f"{shape} {vocab // 1000}k" for shape in SHAPES for vocab in VOCABULARIES]
    return _table(["operation", "floor", *header, "shared", "warm"], rows)


def floor_of(operation: str) -> str:
    """Return the floor that binds: ratios of softmaxes need a mass for each logit, everything else only a read."""
    return MASS if operation in ("verify token", "verify block") else READ


def peers(results: Results) -> str:
    """Times draftproof: geometric mean, least and most, on the main grid."""
    names = results.machine["peers"]
    rows = []
    for operation in OPERATIONS:
        row = [operation]
        for peer in names:
            found = results.ratios(main(operation), peer, OWN)
            spread = f" ({min(found):.2g} to {max(found):.3g})" if found else ""
            row.append(f"{_number(geometric_mean(found))}{spread}")
        rows.append(row)
    return _table(["operation", *(f"{name} / draftproof" for name in names)], rows)


def conditions(results: Results) -> str:
    """What dtype, threads and tails change."""
    rows = []
    for operation in OPERATIONS:
        bfloat16 = results.ratio(only(operation, dtype="bfloat16"), OWN, f"{OWN}, float32")
        threads = [results.ratio(only(operation, threads=2, batch=b), f"{OWN}, 1 thread", OWN) for b in BATCHES]
        tail = geometric_mean(f.p90[OWN] / f.median[OWN] for f in results.where(main(operation)).values())
        rows.append([operation, *map(_number, (bfloat16, *threads, tail))])
    header = ["operation", "bfloat16 / float32", *(f"1 / 2 threads, B = {b}" for b in BATCHES), "p90 / median"]
    return _table(header, rows)


def acceptance(results: Results) -> str:
    """Accepted drafts of a round, on average over the cells of the main grid."""
    rows = []
    for operation in VERIFICATION:
        row = [operation]
        for drafted in (4, 5, 8):
            found = results.where(main(operation, drafted=drafted)).values()
            accepted = [figures.accepted for figures in found if figures.accepted is not None]
            row.append(_number(sum(accepted) / len(accepted) if accepted else math.nan))
        rows.append(row)
    return _table(["operation", "K = 4", "K = 5", "K = 8"], rows)


def rounds(results: Results) -> str:
    """Microseconds a round of one sequence, beside figures published for other hardware."""
    rows = []
    for operation in ("verify greedy", "verify probs"):
        for vocab, drafted in ((32000, 4), (128256, 5)):
            figures = results.cells.get(Cell(operation, vocab, 1, drafted))
            times = ["-", "-"] if figures is None else [_number(figures.median[n]) for n in (OWN, READ)]
            published = PUBLISHED.get((operation, vocab, drafted), ("-", "-"))
            rows.append([operation, str(vocab), str(drafted), *times, *map(str, published)])
    header = ["operation", "V", "K", "draftproof, us", "one read of all rows, us"]
    return _table([*header, "Raspberry Pi 5 (other hardware), us", "Raspberry Pi 4 (other hardware), us"], rows)


def losses(results: Results) -> str:
    """Where a peer is faster, worst first by operation and peer."""
    groups: dict[tuple[str, str], list[tuple[float, Cell]]] = {}
    for cell, peer, times in lost(results):
        groups.setdefault((cell.operation, peer), []).append((times, cell))
    if not groups:
        return "No cell: draftproof is the fastest in each one."
    rows = []
    for (operation, peer), cells in sorted(groups.items(), key=lambda item: -max(item[1])[0]):
        ran = [c for c, f in results.cells.items() if c.operation == operation and peer in f.median]
        worst, cell = max(cells)
        where = ", ".join(str(value) for value in cell[1:])
        rows.append([operation, peer, f"{len(cells)} of {len(ran)}", _number(worst), where])
    return _table(
        ["operation", "faster peer", "cells", "times, at worst", "V, B, K, shape, dtype, threads, rows"], rows
    )


def machine(results: Results) -> str:
    """Where the figures come from."""
    about = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    others = sorted(figures.others for figures in results.cells.values())
    return (
        f"{about['date']}, commit {about['commit']}: {about['processor']}, {about['machine']}; "
        f"Python {about['python']}, {versions}. One process, one run, {len(others)} cells, medians; other processes "
        f"used {others[len(others) // 2]:.2f} cores in the median cell, {others[-1]:.2f} at most."
    )


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "goals": goals,
    "floors": floors,
    "peers": peers,
    "conditions": conditions,
    "acceptance": acceptance,
    "rounds": rounds,
    "losses": losses,
    "machine": machine,
}


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _verdict(outcome: Outcome) -> str:
    return "-" if math.isnan(outcome.measured) else "yes" if outcome.met else "no"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
