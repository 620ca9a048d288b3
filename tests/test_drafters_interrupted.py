"""Ctrl-C while a table is read: generation goes on afterwards."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest

from draftproof import SpeculativeDecoder
from draftproof.drafters import CorpusDrafter, MixDrafter, NgramDrafter, RecyclingDrafter, SuffixDrafter
from draftproof.testing import TableModel

CHANGING = {"read", "append", "_grow", "_add", "advance", "settle", "_enter"}


class InterruptedAt:
    """Raises KeyboardInterrupt at one line that the tables run, counted from 0."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> None:
        sys.settrace(self.call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def call(self, frame: Any, *_: object) -> Any:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        return self.line if name in CHANGING and "drafters" in file else None

    def line(self, frame: Any, event: str, _: object) -> Any:
        self.left -= event == "line"
        if self.left == -1:
            self.left = -2
            raise KeyboardInterrupt
        return self.line


@pytest.mark.parametrize(
    "drafter",
    [SuffixDrafter(), SuffixDrafter(capacity=12), NgramDrafter(), RecyclingDrafter(), MixDrafter()],
    ids=lambda d: type(d).__name__,
)
def test_an_interrupted_table_is_read_again(drafter: Any) -> None:
    """Wherever Ctrl-C comes, generation goes on afterwards."""
    model = TableModel(seed=3)
    plain = SpeculativeDecoder(drafter, model).generate([1, 2, 1, 2, 1], max_new=12)
    interrupted = 0
    for line in range(0, 700, 5):
        decoder = SpeculativeDecoder(drafter, model)
        try:
            with InterruptedAt(line):
                decoder.generate([1, 2, 1, 2, 1], max_new=12)
        except KeyboardInterrupt:
            interrupted += 1
            assert decoder.resume() == plain, line
    assert interrupted > 20


def test_an_interrupted_text_is_not_in_the_corpus() -> None:
    text = [3, 1, 2, 3, 4, 1, 1, 2]
    for line in range(0, 300, 7):
        drafter, expected = (CorpusDrafter([[1, 2, 3, 1, 2, 4]]) for _ in range(2))
        with contextlib.suppress(KeyboardInterrupt), InterruptedAt(line):
            drafter.add(text)
            expected.add(text)
        drafter.add([9, 9])
        expected.add([9, 9])
        assert vars(drafter.automaton) == vars(expected.automaton)
