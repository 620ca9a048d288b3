"""Run the benchmark, or write what its results say into README.md and docs/.

python -m benchmarks run [--publish] [--minutes 25] [--out FILE]   (and more: --help)
python -m benchmarks report [--results FILE] [--print]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .cells import BATCHES, CALL, VOCABULARIES

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results") / "publish.csv"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure")
    run.add_argument("--publish", action="store_true", help="the whole suite, every peer: the committed results")
    run.add_argument("--minutes", type=float, help="aim at this time; default 3, with --publish 25")
    run.add_argument("--attempts", type=int, default=3, help="how often a disturbed cell is measured at most")
    run.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES, help="only these")
    run.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="only these")
    run.add_argument("--out", type=Path, help="default build/benchmarks/quick.csv, with --publish the committed file")
    report = commands.add_parser("report", help="write tables and plot")
    report.add_argument("--results", type=Path, default=RESULTS)
    report.add_argument("--print", action="store_true", help="print the tables, write nothing")
    options = parser.parse_args(arguments)
    if options.command == "run":
        return _run(options)
    from . import report as written

    if options.print:
        sys.stdout.write(written.page(options.results))
    else:
        written.write(options.results)
    return 0


def _run(options: argparse.Namespace) -> int:
    # Threads that wait for work must not keep a core busy while somebody else is timed.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from . import cells, suite
    from .contestants import missing

    absent = missing()
    if options.publish and absent:
        for peer, reason in absent.items():
            sys.stderr.write(f"bench-publish needs every peer, and {peer} is missing: {reason}\n")
        return 1
    for peer in absent:
        sys.stdout.write(f"without {peer}: {absent[peer]}\n")
    grid = cells.publish() if options.publish else cells.quick()
    chosen = [
        c for c in grid if c.operation == CALL or (c.vocab in options.vocabularies and c.batch in options.batches)
    ]
    out = options.out or (RESULTS if options.publish else ROOT / "build" / "benchmarks" / "quick.csv")
    minutes = options.minutes or (25.0 if options.publish else 3.0)
    suite.run(chosen, out, 60 * minutes, frozenset(absent), options.attempts)
    if not options.publish:
        from .report import page

        sys.stdout.write(page(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
