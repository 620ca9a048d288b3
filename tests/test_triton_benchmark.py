"""The benchmark for GPUs, tried in Triton's interpreter on rows that are tiny: its times mean nothing here."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from benchmarks import gpu

import draftproof
from draftproof._dispatch import interpreted

if not interpreted():
    pytest.skip("needs triton's interpreter", allow_module_level=True)

TINY = "--device cpu --vocabs 33 --batches 1 --probs 1 2 33 --warm-up 0 --iterations 1"


def run(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *TINY.split(), "--csv", str(path)])
    gpu.main()


def test_it_checks_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, tmp_path / "gpu.csv")
    with (tmp_path / "gpu.csv").open() as file:
        lines = list(csv.DictReader(file))
    ours = [line["cell"] for line in lines if line["contestant"] == "draftproof"]
    assert ours == [
        "verify_probs",
        *(f"verify {rule}" for rule in ("token", "block", "match", "greedy")),
        *gpu.SETTINGS,
        "full chain",
    ]
    assert {line["contestant"] for line in lines} >= {"draftproof", "torch eager", "transformers"}
    assert all(float(line["median_us"]) > 0 for line in lines)
    shown = capsys.readouterr().out
    assert "outputs have the bits of eager on the CPU" in shown
    assert "NVIDIA L4" in shown


def test_other_bits_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = draftproof.sample_with_logprobs
    monkeypatch.setattr(
        draftproof,
        "sample_with_logprobs",
        lambda rows, **given: right(rows, **given)._replace(tokens=given["seed"] + (given["backend"] == "eager")),
    )
    with pytest.raises(SystemExit, match=r"sample_with_logprobs .* other bits than eager's"):
        run(monkeypatch, tmp_path / "gpu.csv")
