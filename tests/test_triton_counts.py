"""What the Triton backend launches and moves: counted in the interpreter, held against the table in ``docs/gpu.md``.

``python tests/test_triton_counts.py`` writes that table anew (minutes).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

import draftproof as dp
from draftproof._dispatch import interpreted

if not interpreted():
    pytest.skip("needs triton's interpreter", allow_module_level=True)

from draftproof.verification.chain import triton as launcher
from triton_counts import Counts, counting
from triton_interpreter import quick

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
VOCAB, SMALL, DRAFTED = 128256, 16384, 2
# Bytes a microsecond, from the makers' data sheets.
BANDWIDTH = {"L4": 300e3, "H100": 3350e3, "H200": 4800e3, "Iris Xe": 68e3}
MARKS = "<!-- counted: python tests/test_triton_counts.py -->\n", "<!-- end -->\n"


class Cell(NamedTuple):
    """A call by its name and settings, how many rows it is given, and the most that it may read, in rows."""

    function: str
    settings: dict[str, Any]
    rows: int
    most: float
    launches: int
    rejected: bool = False  # at the first draft
    by_position: bool = False  # as larger batches go


# Up to 2 % of a row for the blocks that can win a race, a row and a half where a draw of top-p is checked and redrawn.
CELLS = {
    "sample, greedy": Cell("sample", {"temperature": 0}, 1, 1.01, 2),
    "sample": Cell("sample", {}, 1, 1.1, 2),
    "sample, min-p": Cell("sample", {"min_p": 0.05}, 1, 1.1, 2),
    "sample, top-k 50": Cell("sample", {"top_k": 50}, 1, 1.2, 4),
    "sample, top-k 50, top-p, min-p": Cell("sample", {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, 1, 1.2, 6),
    "sample, top-p": Cell("sample", {"top_p": 0.9}, 1, 3.0, 4),
    "sample_with_logprobs": Cell("sample_with_logprobs", {}, 1, 3.2, 6),
    "filter_logits, top-k 50": Cell("filter_logits", {"top_k": 50}, 1, 2.2, 4),
    "sample_probs": Cell("sample_probs", {}, 1, 2.1, 3),
    "verify greedy": Cell("verify", {"rule": "greedy"}, DRAFTED + 1, 1.01 * (DRAFTED + 1), 4),
    "verify match": Cell("verify", {"rule": "match"}, DRAFTED + 1, 1.1 * (DRAFTED + 1), 5),
    "verify token": Cell("verify", {"rule": "token", "q": True}, 2 * DRAFTED + 1, 2 * (2 * DRAFTED + 1) + 2.2, 6),
    "verify token, point mass": Cell("verify", {"rule": "token"}, DRAFTED + 1, 2.2 * (DRAFTED + 1), 6),
    "verify block": Cell("verify", {"rule": "block", "q": True}, 2 * DRAFTED + 1, 3.2 * (2 * DRAFTED + 1), 6),
    "verify token, top-k 50": Cell("verify", {"rule": "token", "q": True, "top_k": 50}, 2 * DRAFTED + 1, 11, 9),
    "verify match, top-p": Cell("verify", {"rule": "match", "top_p": 0.9}, DRAFTED + 1, 18, 9),
    "verify token, by position": Cell(
        "verify", {"rule": "token", "q": True}, 2 * DRAFTED + 1, 2 * (2 * DRAFTED + 1) + 2.2, 11, by_position=True
    ),
    "verify token, rejected": Cell(
        "verify", {"rule": "token", "q": True}, 2 * DRAFTED + 1, 2 * (2 * DRAFTED + 1) + 2.2, 5, rejected=True
    ),
    "verify token, rejected, by position": Cell(
        "verify", {"rule": "token", "q": True}, 2 * DRAFTED + 1, 6.2, 11, rejected=True, by_position=True
    ),
    "verify block, by position": Cell(
        "verify", {"rule": "block", "q": True}, 2 * DRAFTED + 1, 3.2 * (2 * DRAFTED + 1), 9, by_position=True
    ),
    "verify block, rejected": Cell(
        "verify", {"rule": "block", "q": True}, 2 * DRAFTED + 1, 3.2 * (2 * DRAFTED + 1), 5, rejected=True
    ),
    "verify greedy, rejected, by position": Cell(
        "verify", {"rule": "greedy"}, DRAFTED + 1, 1.01, 7, rejected=True, by_position=True
    ),
    "verify_probs token": Cell("verify_probs", {"rule": "token", "q": True}, 2 * DRAFTED + 1, 14.2, 6),
    "verify_greedy": Cell("verify_greedy", {}, DRAFTED + 1, 1.01 * (DRAFTED + 1), 4),
}
# What the default suite has time for.
QUICK = (
    "sample, greedy",
    "sample",
    "sample, top-k 50",
    "sample, top-p",
    "verify greedy",
    "verify token",
    "verify token, rejected, by position",
)


def zipf(seed: int, shape: tuple[int, ...], vocab: int) -> torch.Tensor:
    """Return bfloat16 rows that fall with the rank as models' rows do, each in an order of its own."""
    draw = torch.Generator().manual_seed(seed)
    rows = -1.2 * torch.arange(1, vocab + 1).log() + 0.3 * torch.randn((*shape, vocab), generator=draw)
    return rows.gather(-1, torch.rand((*shape, vocab), generator=draw).argsort(-1)).to(torch.bfloat16)


def count(cell: Cell, vocab: int) -> Counts:
    """Run a cell on one sequence."""
    own: dict[str, Any] = {"backend": "triton", **{k: v for k, v in cell.settings.items() if k != "q"}}
    if cell.function not in ("filter_logits", "verify_greedy"):
        own |= {"seed": torch.tensor([3]), "offset": torch.tensor([40])}
    if cell.rows == 1:
        rows = [zipf(0, (1,), vocab)]
        given = []
    else:
        rows = [zipf(1, (1, DRAFTED + 1), vocab)]
        draft = rows[0][:, :DRAFTED] + zipf(2, (1, DRAFTED), vocab) / 16
        if cell.rejected:
            draft[0, 0, rows[0][0, 0].argmin()] = 20
        given = [draft.argmax(-1)]
        rows += [draft] if "q" in cell.settings else []
    if "probs" in cell.function:
        rows = [r.float().softmax(-1).to(torch.bfloat16) for r in rows]
    if cell.function in ("verify", "verify_probs"):
        given = [None, *given] if len(rows) == 1 else given
    together = 0 if cell.by_position else launcher.TOGETHER
    with mock.patch.object(launcher, "TOGETHER", together), counting(*rows) as counts:
        getattr(dp, cell.function)(*rows, *given, **own)
    return counts


def read(counts: Counts, vocab: int) -> float:
    """Return how many rows were read."""
    return sum(launch.rows for launch in counts.launches) / (2 * vocab)


@pytest.mark.parametrize("name", QUICK)
def test_launches_and_reads_are_few(name: str) -> None:
    cell = CELLS[name]
    counts = count(cell, SMALL)
    assert len(counts.launches) <= cell.launches
    # Of fewer blocks a larger share can win.
    assert cell.rows * 0.99 <= read(counts, SMALL) <= cell.most + 0.2 * cell.rows
    assert not any(launch.atomics for launch in counts.launches) or "top-k" in name


def line(name: str) -> str:
    """Return a cell's line of the table."""
    cell = CELLS[name]
    counts = count(cell, VOCAB)
    launches = [launch.kernel for launch in counts.launches]
    rows = read(counts, VOCAB)
    assert len(launches) <= cell.launches, (name, launches)
    assert rows <= cell.most, (name, rows)
    moved = sum(launch.rows + launch.other + launch.written for launch in counts.launches)
    atomics = sum(launch.atomics for launch in counts.launches)
    times = " | ".join(f"{float(f'{64 * moved / rate:.3g}'):g}" for rate in BANDWIDTH.values())
    return f"| {name} | {len(launches)} | {cell.rows} | {rows:.2f} | {moved / 1024:.0f} | {atomics} | {times} |\n"


def table() -> str:
    """Return the table of the page."""
    head = ("operation", "launches", "rows", "read, in rows", "KiB moved", "atomics", *(f"{n}, us" for n in BANDWIDTH))
    rule = "| " + " | ".join(["---"] + ["---:"] * (len(head) - 1)) + " |\n"
    return f"| {' | '.join(head)} |\n{rule}" + "".join(map(line, CELLS))


@pytest.mark.slow
def test_the_table_is_what_is_counted() -> None:
    assert table() == PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]


if __name__ == "__main__":
    with quick():
        made = table()
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + made + MARKS[1] + rest.partition(MARKS[1])[2])
