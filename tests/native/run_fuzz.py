"""Build the fuzz targets of the core and run each for a time: ``python tests/native/run_fuzz.py --seconds 600``.

Needs CMake and a clang with libFuzzer (Debian: ``apt-get install clang-19 libclang-rt-19-dev``), or ``CXX``. Corpora
stay in the build folder, so that a run goes on where the one before ended; an input that fails is kept beside them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OPERATIONS = (
    "sample",
    "sample_with_logprobs",
    "sample_probs",
    "filter_logits",
    "largest",
    "verify",
    "verify_probs",
    "verify_greedy",
)
COMPILERS = ("clang++-19", "clang++-20", "clang++-18", "clang++")


def build(folder: Path, csrc: Path, jobs: int) -> str:
    """Build all targets and return the compiler's name."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        sys.exit(f"none of {', '.join(COMPILERS)} is installed, and CXX is not set: libFuzzer is part of clang")
    configure = ["cmake", "-S", str(HERE), "-B", str(folder), f"-DCMAKE_CXX_COMPILER={compiler}"]
    subprocess.run([*configure, f"-DDRAFTPROOF_CSRC={csrc}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "-j", str(jobs)], check=True, stdout=subprocess.DEVNULL)
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]


def run(folder: Path, operation: str, seconds: int, seed: int) -> dict[str, Any]:
    """Run one target; ``result`` is "clean" or the input that failed."""
    corpus, artifacts = folder / "corpus" / operation, folder / "failures"
    corpus.mkdir(parents=True, exist_ok=True)
    artifacts.mkdir(exist_ok=True)
    options = {
        "max_total_time": seconds,
        "seed": seed,
        "max_len": 512,
        "len_control": 0,
        "timeout": 60,
        "rss_limit_mb": 4096,
    }
    command = [str(folder / f"fuzz_{operation}"), str(corpus), f"-artifact_prefix={artifacts}/{operation}-"]
    command += ["-print_final_stats=1", *(f"-{name}={value}" for name, value in options.items())]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    (folder / f"{operation}.log").write_text(done.stderr)
    # Inputs that took long are written too, and are no failures.
    failed = re.search(r"Test unit written to (\S+)", done.stderr) if done.returncode else None
    executions = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    if done.returncode:
        sys.stderr.write(
            "\n".join(line for line in done.stderr.split("\n") if re.search("got |ERROR|runtime error", line)) + "\n"
        )
    return {
        "operation": operation,
        "seed": seed,
        "seconds": seconds,
        "executions": int(executions[1]) if executions else None,
        "covered": int(covered[-1]) if covered else None,
        "corpus": len(list(corpus.iterdir())),
        "result": failed[1] if failed else "clean" if done.returncode == 0 else f"exit status {done.returncode}",
    }


def version(csrc: Path) -> str:
    """Return the commit that last changed the core, with a mark if it has been changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments, "--", "."], cwd=csrc, capture_output=True, text=True, check=False
        ).stdout.strip()

    return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain") else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each operation")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--seed", type=int, help="of the first operation, the others follow; at random by default")
    parser.add_argument("--build", type=Path, default=HERE.parents[1] / "build" / "fuzz")
    parser.add_argument("--csrc", type=Path, default=HERE.parents[1] / "csrc")
    parser.add_argument("--version", help="what to call the core in the results; by default its commit")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once")
    parser.add_argument("--results", type=Path, help="a JSON file that says what was run")
    given = parser.parse_args()
    seed = random.randrange(1, 2**31 - len(OPERATIONS)) if given.seed is None else given.seed
    said: dict[str, Any] = {"core": given.version or version(given.csrc)}
    said |= {"compiler": build(given.build, given.csrc, given.jobs), "runs": []}
    for i, operation in enumerate(given.operations):
        outcome = run(given.build, operation, given.seconds, seed + i)
        said["runs"].append(outcome | {"ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")})
        print(json.dumps(outcome), flush=True)  # noqa: T201
        if given.results:
            given.results.write_text(json.dumps(said, indent=1) + "\n")
    return int(any(outcome["result"] != "clean" for outcome in said["runs"]))


if __name__ == "__main__":
    sys.exit(main())
