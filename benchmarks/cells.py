"""The cells of the benchmark: every operation on a main grid, and one axis after the other changed from there."""

from __future__ import annotations

from typing import NamedTuple

OWN, READ, MASS = "draftproof", "read", "mass"
"""Names of contestants: draftproof, and the two floors."""
PENALISED = 512
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k + top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p": {"top_p": 0.9},
    "full chain": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
}
VERIFICATION = ("verify greedy", "verify probs", "verify token", "verify block", "verify match")
CALL = "call"
"""A greedy draw from 16 logits: what a call costs apart from its work."""
VOCABULARIES = (32000, 49152, 128256, 151936)
BATCHES = (1, 8, 32)
SHAPES = ("real", "zipf", "flat")
LARGE = 100_000


class Cell(NamedTuple):
    """What is measured at once: all contestants of one operation on the same rows under the same conditions."""

    operation: str
    vocab: int
    batch: int
    drafted: int = 0
    shape: str = "real"
    dtype: str = "float32"
    threads: int = 1
    cache: str = "cold"

    @property
    def verifies(self) -> bool:
        return self.operation in VERIFICATION

    @property
    def rule(self) -> str:
        """The rule of a verification, empty for sampling; ``probs`` is the rule token on probabilities."""
        return self.operation.removeprefix("verify ") if self.verifies else ""

    @property
    def weight(self) -> float:
        """Roughly how long the slow peers take: sorts of sampled rows cost some eight times what verified rows do."""
        return 1 + self.vocab * self.batch * (2 * self.drafted + 1 if self.verifies else 8) / 8e6


def quick() -> list[Cell]:
    """A few minutes' worth: two vocabularies, real rows, float32, cold, one thread."""
    cells = [Cell(CALL, 16, 1, cache="warm")]
    for vocab in (32000, 128256):
        for batch in (1, 8):
            cells += [Cell(operation, vocab, batch) for operation in SAMPLING]
            cells += [Cell(operation, vocab, batch, 4) for operation in VERIFICATION]
    return cells


def publish() -> list[Cell]:
    """The whole suite. Cells on the same rows follow one another, so that rows are made once."""
    cells = [Cell(CALL, 16, 1, cache="warm")]
    for vocab in VOCABULARIES:
        for batch in BATCHES:
            cells += _sampling(vocab, batch) + _verification(vocab, batch)
    return cells


def _sampling(vocab: int, batch: int) -> list[Cell]:
    axes: list[dict[str, object]] = [{"shape": shape} for shape in SHAPES]
    axes += [{"threads": 2}, {"cache": "shared"}, {"cache": "warm"}, {"dtype": "bfloat16"}]
    cells = [Cell(operation, vocab, batch)._replace(**axis) for axis in axes for operation in SAMPLING]
    return sorted(cells, key=lambda cell: (SHAPES.index(cell.shape), cell.dtype != "float32"))


def _verification(vocab: int, batch: int) -> list[Cell]:
    axes: list[dict[str, object]] = [{"drafted": 4}, {"drafted": 4, "threads": 2}, {"drafted": 4, "dtype": "bfloat16"}]
    axes += [{"drafted": 5}, {"drafted": 8}]
    if batch == 1:
        axes += [{"drafted": 4, "cache": "warm"}]
    if batch < 32:
        axes += [{"drafted": 4, "shape": shape} for shape in SHAPES[1:]]
    cells = [Cell(operation, vocab, batch)._replace(**axis) for axis in axes for operation in VERIFICATION]
    return sorted(cells, key=lambda cell: (SHAPES.index(cell.shape), cell.dtype != "float32", cell.drafted))
