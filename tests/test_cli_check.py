"""``draftproof check`` and ``backends``, and the level of the core."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import draftproof
from command_line import run
from draftproof import _dispatch, _native
from draftproof.cli import check

# --- check and backends ----------------------------------------------------------------------------------------------


def test_check_passes() -> None:
    lines = run("check").stdout.splitlines()
    assert len(lines) >= 9
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert any("bits on eager (torch cpu)" in line for line in lines)


def test_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    whole = check.filter_logits
    monkeypatch.setattr(check, "philox", lambda counter, _: tuple(word * 0 for word in counter))
    monkeypatch.setattr(check, "RULES", {"token": check.testing.MUTANTS["p and q swapped"].system.rule})
    monkeypatch.setattr(check.testing, "MUTANTS", {})
    monkeypatch.setattr(check, "verify_probs", wrong)
    monkeypatch.setattr(
        check, "filter_logits", lambda logits, **o: whole(logits, **o) + (0 if isinstance(logits, np.ndarray) else 1)
    )
    lines = run("check", code=1).stdout.splitlines()
    failed = dict(line.removeprefix("FAILED ").split(": ", 1) for line in lines if line.startswith("FAILED"))
    places = [place.name for place in check.places()]
    assert places[0] == "eager (NumPy)"
    tensors = [f"bits on {name}" for name in places if "torch" in name]
    assert list(failed) == ["Philox4x32-10", "law of rule token", *(f"verification on {p}" for p in places), *tensors]
    assert failed["law of rule token"].startswith("the law is off by")
    assert failed[f"verification on {places[1]}"].startswith("RuntimeError('broken')")
    assert failed[tensors[0]].startswith("filter_logits differs from eager (NumPy)")


def test_check_notices_a_mutant_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = check.testing.MUTANTS["p and q swapped"]
    monkeypatch.setattr(check.testing, "MUTANTS", {"alive": dataclasses.replace(mutant, system=mutant.original)})
    with pytest.raises(AssertionError, match="'alive' passed as lossless"):
        check.mutants()


def test_backends() -> None:
    header, *rows = run("backends").stdout.splitlines()
    assert header.split()[0] == "operation"
    assert {"eager", "reference"} <= set(header.split())
    assert [row.split()[0] for row in rows][: len(draftproof.backends())] == list(draftproof.backends())
    assert rows[0].count("available") >= 2


def test_reasons_keep_their_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_dispatch.MISSING, "triton", "it is not here: install draftproof[triton]")
    assert "triton: it is not here: install draftproof[triton]" in run("backends").stdout


@pytest.mark.skipif(not _native.levels(), reason=_native.missing)
def test_the_level_of_the_core_can_be_forced() -> None:
    listed = "instruction-set levels of the C++ core: "
    core, levels = _native.core, _native.levels()
    before = core.level()
    try:
        for level in levels:
            line = run("--level", level, "backends").stdout.splitlines()[-1]
            assert line == listed + ", ".join(f"{name} (in use)" if name == level else name for name in levels)
            assert core.level() == level
        for wrong in ("x86_64_v9", "\udcff"):
            refused = run("--level", wrong, "backends", code=2)
            assert refused.stderr.startswith(f"error: level must be one of {', '.join(levels)}, got '")
    finally:
        core.set_level(before)


def test_a_level_needs_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "core", None)
    monkeypatch.setattr(_native, "missing", "no core here")
    assert run("--level", "x86_64_v2", "backends", code=2).stderr == "error: no core here\n"


@pytest.mark.parametrize("command", [("generate", "x"), ("compare",)])
def test_more_threads_than_the_core_takes_are_refused_before_torch_starts_them(command: tuple[str, ...]) -> None:
    said = run(*command, "--threads", 100_000, code=2).stderr
    assert "--threads" in said
    assert "1024" in said
