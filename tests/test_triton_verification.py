"""Verification on Triton with rows that many programs share, looked at together and position by position."""

from __future__ import annotations

import importlib

import pytest

import matrix

pytest.importorskip("triton")

from draftproof._dispatch import interpreted
from matrix import DEFINITION, RULES, Subject, assert_same

if not interpreted():
    pytest.skip("needs triton's interpreter", allow_module_level=True)

TRITON = Subject("triton", "torch-cpu")


@pytest.mark.parametrize("together", [0, 1 << 60], ids=["by position", "together"])
@pytest.mark.parametrize("rule", RULES)
def test_rows_that_programs_share(rule: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = importlib.import_module("draftproof.verification.chain.triton")
    monkeypatch.setattr(launcher, "CHUNK", 64)
    monkeypatch.setattr(launcher, "TOGETHER", together)
    for difference in (None, 5) if rule in ("token", "block") else (None,):
        calls = [matrix.verification("mask", 150, rule, difference, 6, 2)]
        if difference is None:
            calls.append(matrix.verification("top_k", 150, rule, None, 2, 1))
        for call in calls:
            assert_same(call.run(TRITON), call.run(DEFINITION), rule, difference)
