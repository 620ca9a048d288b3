"""Sampling on the CPU: every contestant in one process and one run, interleaved, against one read of the same bytes.

    python benchmarks/cpu.py [--seconds 2] [--out benchmarks/results/cpu.csv]

A cell is (operation, vocabulary, batch, shape of the logits). Its contestants take turns in shuffled order, each for a
burst of calls on buffers that rotate over more than the caches hold, so rows are cold. Reported are medians, and ratios
to the floor: one SIMD maximum over the same bytes on one thread.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import draftproof
from draftproof._native import core

ROTATE_BYTES = 32 << 20
BURST = 4
VOCABULARIES = (32000, 49152, 128256, 151936)
BATCHES = (1, 8)
OPERATIONS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k + top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p": {"top_p": 0.9},
    "full chain": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
}
Call = Callable[[int], object]


def logits(shape: str, rows: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Return cold rows: ``zipf`` falls like a language model's, ``flat`` is the adverse case."""
    noise = rng.standard_normal((rows, vocab), dtype=np.float32)
    if shape == "flat":
        return noise
    zipf = -1.2 * np.log(np.arange(1, vocab + 1, dtype=np.float32))
    return rng.permuted(zipf + 0.3 * noise, axis=1)


def transformers_call(batches: list[torch.Tensor], settings: dict[str, float], history: torch.Tensor) -> Call:
    """The processors that ``generate`` would build, softmax, multinomial."""
    chain = LogitsProcessorList()
    if "repetition_penalty" in settings:
        chain.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if settings.get("temperature", 1.0) not in (0.0, 1.0):
        chain.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        chain.append(TopKLogitsWarper(int(settings["top_k"])))
    if "top_p" in settings:
        chain.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        chain.append(MinPLogitsWarper(settings["min_p"]))
    if settings.get("temperature") == 0.0:
        return lambda i: batches[i].argmax(-1)
    return lambda i: torch.multinomial(torch.softmax(chain(history, batches[i]), -1), 1)


def torch_call(batches: list[torch.Tensor], settings: dict[str, float]) -> Call | None:
    """Plain torch written with care: top-k first, everything else on the survivors."""
    if settings.get("temperature") == 0.0:
        return lambda i: batches[i].argmax(-1)
    if "top_k" not in settings or "repetition_penalty" in settings:
        return None

    def call(i: int) -> torch.Tensor:
        values, ids = torch.topk(batches[i], int(settings["top_k"]))
        probs = torch.softmax(values / settings["temperature"], -1)
        probs = torch.where(probs.cumsum(-1) - probs < settings["top_p"], probs, 0.0)
        return ids.gather(-1, torch.multinomial(probs, 1))

    return call


def contestants(operation: str, rows: np.ndarray, batch: int, rng: np.random.Generator) -> dict[str, Call]:
    settings = OPERATIONS[operation]
    vocab = rows.shape[1]
    arrays = [rows[i : i + batch] for i in range(0, len(rows) - batch + 1, batch)]
    tensors = [torch.from_numpy(a) for a in arrays]
    history = rng.integers(0, vocab, (batch, 512))
    given = dict(settings)
    if "repetition_penalty" in settings:
        given["prev_tokens"] = history
    calls: dict[str, Call | None] = {
        "floor": lambda i: core.read(arrays[i].reshape(-1)),
        "draftproof": lambda i: draftproof.sample(arrays[i], **given, seed=i),
        "transformers": transformers_call(tensors, settings, torch.from_numpy(history)),
        "torch": torch_call(tensors, settings),
    }
    return {name: call for name, call in calls.items() if call is not None}


def measure(calls: dict[str, Call], count: int, seconds: float) -> dict[str, float]:
    """Return the median time of a call per contestant, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    position = dict.fromkeys(calls, 0)
    for name, call in calls.items():
        call(0)
        times[name].clear()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["floor"]) < 3 * BURST:
        for name in random.sample(list(calls), len(calls)):
            for _ in range(BURST if name in ("floor", "draftproof") else 1):
                i = position[name] = (position[name] + 1) % count
                start = time.perf_counter()
                calls[name](i)
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) * 1e6 for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="time for one cell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draftproof.set_num_threads(1)
    random.seed(0)
    rng = np.random.default_rng(0)
    machine = (
        f"{platform.machine()} {core.level()}, 1 thread; python {platform.python_version()}, numpy {np.__version__}, "
    )
    machine += f"torch {torch.__version__}, transformers {transformers.__version__}"
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["operation", "vocab", "batch", "shape", "contestant", "median_us", "times_floor", "machine"])
        for vocab in VOCABULARIES:
            for shape in ("zipf", "flat"):
                rows = logits(shape, max(16, ROTATE_BYTES // (4 * vocab)), vocab, rng)
                for batch in BATCHES:
                    for operation in OPERATIONS:
                        calls = contestants(operation, rows, batch, rng)
                        medians = measure(calls, len(rows) // batch, options.seconds)
                        floor = medians["floor"]
                        cell = (operation, vocab, batch, shape)
                        for name, median in medians.items():
                            writer.writerow([*cell, name, f"{median:.1f}", f"{median / floor:.2f}", machine])
                        shown = ", ".join(f"{name} {median / floor:.1f}" for name, median in medians.items())
                        sys.stdout.write(f"{operation} V={vocab} B={batch} {shape}: {floor:.0f} us x {shown}\n")


if __name__ == "__main__":
    main()
